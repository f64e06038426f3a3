# libtilewise_jax.so has the handlers of XLA's foreign function interface on top of the C ABI. That
# interface consists of headers, which jaxlib ships; there is no library to link to. So one binary
# works with every Python, and with every jaxlib that is not older than the headers.
if(NOT EXISTS "${TILEWISE_XLA_INCLUDE}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "TILEWISE_XLA_INCLUDE=${TILEWISE_XLA_INCLUDE} has no xla/ffi/api/ffi.h; it "
                      "must be the folder that jax.ffi.include_dir() returns")
endif()
message(STATUS "tilewise: XLA headers for the JAX adapter: ${TILEWISE_XLA_INCLUDE}")

file(GLOB jax_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bindings/jax/*.cpp")
add_library(tilewise_jax SHARED ${jax_sources})
tilewise_compile_options(tilewise_jax)
tilewise_link_options(tilewise_jax)
target_include_directories(tilewise_jax SYSTEM PRIVATE "${TILEWISE_XLA_INCLUDE}")
target_link_libraries(tilewise_jax PRIVATE tilewise)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # In a struct of the headers, a field has the name of a type that another field uses. GCC refuses
  # that, Clang accepts it.
  target_compile_options(tilewise_jax PRIVATE -fpermissive)
endif()
set_target_properties(tilewise_jax PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
