// What every header of the library may rely on, on the host and in device code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define TILEWISE_HOST_DEVICE __host__ __device__
#else
#define TILEWISE_HOST_DEVICE
#endif

// The policies are compiled once per CPU instruction set. An inline function that is emitted out of
// line there would be one weak symbol with several bodies, and the linker could hand the AVX-512
// one to a machine without it: so these are always inlined (a test reads the symbols of the
// objects).
#define TILEWISE_FN TILEWISE_HOST_DEVICE inline __attribute__((always_inline))

// Before a loop of few steps that a GPU is to run without one. Compilers of hosts decide
// themselves.
#if defined(__CUDA_ARCH__)
#define TILEWISE_UNROLL _Pragma("unroll")
#else
#define TILEWISE_UNROLL
#endif
