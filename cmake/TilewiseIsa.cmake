# The instruction sets of the CPU backend, best last, as rows of name and compiler flags. The sources
# src/cpu/isa/<name>/<dtype>.cpp are compiled with exactly these flags, one source per dtype because each
# takes a minute, and TILEWISE_ISA_<NAME>=1 is defined for the whole library, so that the code knows
# which sets were built.
#
# A new set needs a row here, a folder in src/cpu/isa/, and its requirements in the run-time check.
set(avx512_flags -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(isa_portable_flags "")
set(isa_neon_flags -march=armv8-a)
set(isa_neon_bf16_flags -march=armv8.2-a+bf16)
set(isa_avx2_flags -mavx2 -mfma -mf16c)
set(isa_avx512_flags ${avx512_flags})
set(isa_avx512_bf16_flags ${avx512_flags} -mavx512bf16)
set(isa_amx_flags ${avx512_flags} -mavx512bf16 -mamx-tile -mamx-bf16)
# Sources of another set that serve the dtypes for which a set has no instructions (kernels_of_isa).
set(isa_avx512_bf16_borrows avx512/float32 avx512/float16)
set(isa_amx_borrows avx512/float32)
set(isa_neon_bf16_borrows neon/float32 neon/float16)
if(TILEWISE_AMX_EMULATOR) # tile instructions written in C++, found before the real ones
  set(isa_amx_flags ${isa_avx512_bf16_flags} -iquote "${PROJECT_SOURCE_DIR}/tests/amx_emulator")
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/src/cpu/detect.cpp" APPEND
               PROPERTY COMPILE_DEFINITIONS TILEWISE_AMX_EMULATOR=1)
endif()

set(tilewise_isas portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  list(APPEND tilewise_isas avx2 avx512 avx512_bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  list(APPEND tilewise_isas neon neon_bf16)
endif()
set(TILEWISE_CPU_ISAS "" CACHE STRING "Only these CPU instruction sets (empty: all)")
if(TILEWISE_CPU_ISAS)
  string(REPLACE ";" "|" wanted "${TILEWISE_CPU_ISAS}")
  list(FILTER tilewise_isas INCLUDE REGEX "^(${wanted})$")
endif()

# Multiplications and additions may contract into FMA (ISO mode forbids it by default), and since no
# code reads floating-point exceptions, selects may become masks. There is no -ffast-math: NaN and
# infinity keep their meaning. Debug uses -O1, because without optimisation inline functions would
# be emitted as weak symbols that contain this instruction set (tests/cpp/check_symbols.cmake). With
# sanitizers, -O3 takes five times as long to compile.
set(isa_common_flags
    -ffp-contract=fast -fno-trapping-math -fno-exceptions
    $<IF:$<OR:$<CONFIG:Debug>,$<BOOL:${TILEWISE_SANITIZE}>>,-O1,-O3>)

function(tilewise_add_isa_sources target)
  set(built "")
  set(units "") # as set/dtype
  foreach(isa IN LISTS tilewise_isas)
    # The glob makes the build notice sources that are added or removed.
    file(GLOB own RELATIVE "${PROJECT_SOURCE_DIR}/src/cpu/isa" CONFIGURE_DEPENDS
         "${PROJECT_SOURCE_DIR}/src/cpu/isa/${isa}/*.cpp")
    if(own)
      list(TRANSFORM own REPLACE "\\.cpp$" "")
      list(APPEND units ${own} ${isa_${isa}_borrows})
      string(TOUPPER "${isa}" upper)
      target_compile_definitions(${target} PUBLIC TILEWISE_ISA_${upper}=1)
      list(APPEND built ${isa})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES units)
  foreach(unit IN LISTS units)
    get_filename_component(isa "${unit}" DIRECTORY)
    set(source "${PROJECT_SOURCE_DIR}/src/cpu/isa/${unit}.cpp")
    target_sources(${target} PRIVATE "${source}")
    set_property(SOURCE "${source}" TARGET_DIRECTORY ${target}
                 PROPERTY COMPILE_OPTIONS ${isa_common_flags} ${isa_${isa}_flags})
  endforeach()
  set_property(TARGET ${target} PROPERTY TILEWISE_ISAS "${built}")
  message(STATUS "tilewise: CPU instruction sets: ${built}")
endfunction()
