# libtilewise_jax.so has the handlers of XLA's foreign function interface on top of the C ABI. The
# interface is a set of headers that jaxlib ships, without a library: one binary works with every
# jaxlib whose interface is at least as new as these headers, and with every Python.
set(TILEWISE_JAX_INCLUDE "" CACHE PATH "Folder with xla/ffi/api/ffi.h; empty: that of jaxlib")

if(NOT TILEWISE_JAX_INCLUDE)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  # The folder is found without importing jaxlib, which would also need NumPy and SciPy.
  execute_process(
    COMMAND
      "${Python3_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"
    OUTPUT_VARIABLE jaxlib_root
    ERROR_VARIABLE jaxlib_error
    RESULT_VARIABLE jaxlib_result
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT jaxlib_result EQUAL 0)
    message(FATAL_ERROR "TILEWISE_BUILD_JAX=ON, but ${Python3_EXECUTABLE} finds no jaxlib (set "
                        "Python3_EXECUTABLE or TILEWISE_JAX_INCLUDE):\n${jaxlib_error}")
  endif()
  set(TILEWISE_JAX_INCLUDE "${jaxlib_root}/include")
endif()
if(NOT EXISTS "${TILEWISE_JAX_INCLUDE}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "TILEWISE_BUILD_JAX=ON, but ${TILEWISE_JAX_INCLUDE} has no "
                      "xla/ffi/api/ffi.h, which jaxlib ships")
endif()
message(STATUS "tilewise: XLA headers for the JAX adapter: ${TILEWISE_JAX_INCLUDE}")

file(GLOB jax_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bindings/jax/*.cpp")
add_library(tilewise_jax SHARED ${jax_sources})
tilewise_compile_options(tilewise_jax)
target_include_directories(tilewise_jax SYSTEM PRIVATE "${TILEWISE_JAX_INCLUDE}")
target_link_libraries(tilewise_jax PRIVATE tilewise)
target_link_options(tilewise_jax PRIVATE "LINKER:--as-needed")
set_target_properties(tilewise_jax PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
