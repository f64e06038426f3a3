// Matrix products of a warpgroup with operands of float8_e4m3 (sm_90a): those of wgmma.h, with d
// [64, kN] = a [64, 32] b [32, kN] (+ d). PTX ISA 9.7.15.5: wgmma.mma_async.
//
// Both operands must be stored with k contiguous. A step of k is 32 bytes, as it is of 16-bit
// operands, so the tiles and descriptors of cuda/tile/swizzled.h serve both. An `a` in registers is
// the fragment of mma.m16n8k32: with g = lane / 4 and t = lane % 4, byte j of a[i] is row g + 8 (i
// % 2), column 16 (i / 2) + 4 t + j. Tensor cores keep some 14 bits of these sums, so long sums
// have to be continued in fp32.
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/ptx/register_lists.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

template <int kN>
struct WgmmaFloat8 {
  using D = float (&)[kN / 2];

  static TILEWISE_DEVICE void add(D d, uint64_t a, uint64_t b) {
    emulator::wgmma_float8(d, kN, a, b, true);
  }
  static TILEWISE_DEVICE void start(D d, uint64_t a, uint64_t b) {
    emulator::wgmma_float8(d, kN, a, b, false);
  }
  static TILEWISE_DEVICE void add(D d, const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma_float8(d, kN, a, b, true);
  }
  static TILEWISE_DEVICE void start(D d, const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma_float8(d, kN, a, b, false);
  }
};

#else

template <int kN>
struct WgmmaFloat8;

#define TILEWISE_SUM(x) "+f"(x)
#define TILEWISE_RESULT(x) "=f"(x)

// The instruction for N = n, with r sums per thread. Predicate p is scale-d, a constant that ptxas
// sees.
#define TILEWISE_WGMMA_FLOAT8_SHAPE(n, r, how, accumulate, a_names, b_name, ...)                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate                                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                                      \
               "k32.f32.e4m3.e4m3 {" TILEWISE_NAMES##r "}, " a_names ", " b_name ", p, 1, 1;\n}" \
               : TILEWISE_D##r(how, 0)                                                           \
               : __VA_ARGS__, "l"(b))

// x0 to x4 are the asm names of the operands that follow the sums.
#define TILEWISE_WGMMA_FLOAT8(n, r, x0, x1, x2, x3, x4)                                            \
  template <>                                                                                      \
  struct WgmmaFloat8<n> {                                                                          \
    using D = float (&)[r];                                                                        \
    static TILEWISE_DEVICE void add(D d, uint64_t a, uint64_t b) {                                 \
      TILEWISE_WGMMA_FLOAT8_SHAPE(n, r, TILEWISE_SUM, "1", x0, x1, "l"(a));                        \
    }                                                                                              \
    static TILEWISE_DEVICE void start(D d, uint64_t a, uint64_t b) {                               \
      TILEWISE_WGMMA_FLOAT8_SHAPE(n, r, TILEWISE_RESULT, "0", x0, x1, "l"(a));                     \
    }                                                                                              \
    static TILEWISE_DEVICE void add(D d, const uint32_t (&a)[4], uint64_t b) {                     \
      TILEWISE_WGMMA_FLOAT8_SHAPE(n, r, TILEWISE_SUM, "1", "{" x0 "," x1 "," x2 "," x3 "}", x4,    \
                                  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                     \
    }                                                                                              \
    static TILEWISE_DEVICE void start(D d, const uint32_t (&a)[4], uint64_t b) {                   \
      TILEWISE_WGMMA_FLOAT8_SHAPE(n, r, TILEWISE_RESULT, "0", "{" x0 "," x1 "," x2 "," x3 "}", x4, \
                                  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                     \
    }                                                                                              \
  };

TILEWISE_WGMMA_FLOAT8(64, 32, "%32", "%33", "%34", "%35", "%36")
TILEWISE_WGMMA_FLOAT8(128, 64, "%64", "%65", "%66", "%67", "%68")

#undef TILEWISE_WGMMA_FLOAT8
#undef TILEWISE_WGMMA_FLOAT8_SHAPE
#undef TILEWISE_SUM
#undef TILEWISE_RESULT

#endif

}  // namespace tilewise::cuda::ptx
