# libtilewise_torch.so registers the PyTorch operators on top of the C ABI. It only uses torch's
# stable ABI, so one binary works with every torch from 2.10 on and every Python.
file(GLOB torch_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bindings/torch/*.cpp")
if(NOT torch_sources)
  message(FATAL_ERROR "TILEWISE_BUILD_TORCH=ON, but bindings/torch has no source")
endif()

set(TILEWISE_TORCH_PACKAGE "" CACHE PATH "Folder of the package torch of the target system")
if(TILEWISE_TORCH_PACKAGE) # for another system than this one, on which no Python can import it
  file(STRINGS "${TILEWISE_TORCH_PACKAGE}/version.py" torch_answer REGEX "^__version__ = ")
  string(REGEX REPLACE "^[^0-9]*([^']*)'.*" "\\1" torch_answer "${torch_answer}")
  string(APPEND torch_answer "\n${TILEWISE_TORCH_PACKAGE}")
  set(torch_origin "TILEWISE_TORCH_PACKAGE")
else()
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
            "import pathlib, torch; print(torch.__version__); print(pathlib.Path(torch.__file__).parent)"
    OUTPUT_VARIABLE torch_answer
    ERROR_VARIABLE torch_error
    RESULT_VARIABLE torch_result
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT torch_result EQUAL 0)
    message(FATAL_ERROR "TILEWISE_BUILD_TORCH=ON, but ${Python3_EXECUTABLE} cannot import torch "
                        "(set Python3_EXECUTABLE to one that can):\n${torch_error}")
  endif()
  set(torch_origin "${Python3_EXECUTABLE}")
endif()
string(REGEX MATCH "^([0-9]+\\.[0-9]+)[^\n]*\n(.*)$" matched "${torch_answer}")
set(torch_version "${CMAKE_MATCH_1}")
set(torch_root "${CMAKE_MATCH_2}")
if(NOT matched OR torch_version VERSION_LESS "2.10")
  message(FATAL_ERROR "the adapter needs torch >= 2.10; ${torch_origin} has ${torch_answer}")
endif()
message(STATUS "tilewise: torch ${torch_version} headers for the adapter")

add_library(tilewise_torch SHARED ${torch_sources})
tilewise_compile_options(tilewise_torch)
target_compile_definitions(tilewise_torch PRIVATE TORCH_TARGET_VERSION=0x020A000000000000ULL)
target_include_directories(
  tilewise_torch SYSTEM PRIVATE "${torch_root}/include"
                                "${torch_root}/include/torch/csrc/api/include")
# Python loads torch before the adapter, so the names of the libraries suffice to find them, and the
# binary contains no path of the build machine.
target_link_libraries(tilewise_torch PRIVATE tilewise "${torch_root}/lib/libtorch.so"
                                             "${torch_root}/lib/libtorch_cpu.so")
target_link_options(tilewise_torch PRIVATE "LINKER:--as-needed")
set_target_properties(tilewise_torch PROPERTIES BUILD_WITH_INSTALL_RPATH ON
                                                INSTALL_RPATH "$ORIGIN")
