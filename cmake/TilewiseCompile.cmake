# How our own code is compiled and linked: C++20, warnings, hidden symbols, sanitizers.
set(sanitize_flags "")
if(TILEWISE_SANITIZE)
  list(JOIN TILEWISE_SANITIZE "," sanitizers)
  set(sanitize_flags -fsanitize=${sanitizers} -fno-omit-frame-pointer)
  if("undefined" IN_LIST TILEWISE_SANITIZE)
    list(APPEND sanitize_flags -fno-sanitize-recover=undefined)
  endif()
endif()

function(tilewise_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(
    ${target} PROPERTIES CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
                         VISIBILITY_INLINES_HIDDEN ON)
  # -Wno-psabi: vector types stay inside the library, so their calling convention does not matter.
  target_compile_options(
    ${target}
    PRIVATE -Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wconversion
            -Wno-sign-conversion
            -Wno-psabi
            -fno-math-errno
            $<$<BOOL:${TILEWISE_WERROR}>:-Werror>
            ${sanitize_flags})
  target_link_options(${target} PUBLIC ${sanitize_flags})
endfunction()

# With TILEWISE_GLIBC, the shared libraries need no symbol newer than that glibc and the libstdc++
# of its time, so that wheels load on systems older than the build's.
function(tilewise_link_for_old_systems)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(stubs "${PROJECT_BINARY_DIR}/manylinux")
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/manylinux_stubs.py"
            ${TILEWISE_GLIBC} "${stubs}" "${CMAKE_CXX_COMPILER}" COMMAND_ERROR_IS_FATAL ANY)
  foreach(target IN ITEMS tilewise tilewise_torch tilewise_jax)
    if(TARGET ${target})
      # Symbols from static libraries are not exported.
      target_link_options(${target} BEFORE PRIVATE "-L${stubs}" "LINKER:--exclude-libs,ALL")
    endif()
  endforeach()
  message(STATUS "tilewise: linked for glibc ${TILEWISE_GLIBC}")
endfunction()

# Only the C ABI is exported. Hidden visibility is not enough: templates of the standard library are
# instantiated with default visibility, so a version script lists the exported symbols.
function(tilewise_link_options target)
  target_link_options(${target} PRIVATE ${sanitize_flags})
  if(UNIX AND NOT APPLE)
    set(map "${PROJECT_SOURCE_DIR}/cmake/tilewise.map")
    target_link_options(${target} PRIVATE "LINKER:--version-script=${map}")
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${map}")
    if(NOT TILEWISE_CUDA_EMULATOR) # its reports need the names of kernel functions
      target_link_options(${target} PRIVATE "$<$<CONFIG:Release>:LINKER:--discard-all>")
    endif()
    if(NOT TILEWISE_SANITIZE AND NOT TILEWISE_BUILD_FUZZ) # their runtime is part of the program
      target_link_options(${target} PRIVATE "LINKER:-z,defs" "LINKER:--as-needed")
    endif()
  endif()
endfunction()
