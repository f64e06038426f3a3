# Toolchain file: compiles for 64-bit Arm (Debian: g++-aarch64-linux-gnu) and runs the tests under
# QEMU's user mode. TILEWISE_AARCH64_ROOT is a folder with Arm's libraries and GoogleTest, laid out
# like a root file system; `tools/setup.sh aarch64` makes one.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++) # for nvcc of `tools/setup.sh nvcc-aarch64`

set(TILEWISE_AARCH64_ROOT "" CACHE PATH "Root file system of the target: libraries, GoogleTest")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TILEWISE_AARCH64_ROOT)
set(CMAKE_FIND_ROOT_PATH "${TILEWISE_AARCH64_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L "${TILEWISE_AARCH64_ROOT}")
