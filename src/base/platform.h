// Macros for every header of the library, in host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define TILEWISE_HOST_DEVICE __host__ __device__
#else
#define TILEWISE_HOST_DEVICE
#endif

// For functions in headers, which are compiled once per CPU instruction set. An inline function
// that is emitted out of line would be a weak symbol with one body per instruction set, and the
// linker could pick the AVX-512 body for a machine without AVX-512. So these are always inlined (a
// test checks the symbols of the objects).
#define TILEWISE_FN TILEWISE_HOST_DEVICE inline __attribute__((always_inline))

// Before a short loop that must be unrolled on a GPU. On the host the compiler decides.
#if defined(__CUDA_ARCH__)
#define TILEWISE_UNROLL _Pragma("unroll")
#else
#define TILEWISE_UNROLL
#endif
