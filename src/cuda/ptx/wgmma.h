// Matrix products of a warpgroup, asynchronous (sm_90a). PTX ISA 9.7.15: wgmma.mma_async.
//
// d [64, kN] = a [64, 16] b [16, kN] (+ d), 16-bit operands, fp32 sums. Warp w of the warpgroup
// holds rows 16 w to 16 w + 15; with g = lane / 4 and t = lane % 4, d[4 j + e] is row g + 8 (e /
// 2), column 8 j + 2 t + e % 2. An `a` in registers is the fragment of mma.m16n8k16 (mma.h).
// Operands in shared memory are given by descriptors (cuda/tile/swizzled.h). kTransA and kTransB:
// the operand is stored with m or n contiguous instead of k.
//
// The required order is: writes to d or to a in registers, wgmma_fence, products,
// wgmma_commit_group, wgmma_wait_group, reads of d. `add` reads d. `start` does not, and ptxas
// knows it (scale-d is a constant). `restart` does not either, but ptxas assumes that it does, so
// the product waits for earlier reads of d. `add_if` is `add` if its first argument is not 0, else
// `restart`.
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/ptx/register_lists.h"

namespace tilewise::cuda::ptx {

enum class Half16 { f16, bf16 };  // the type of both operands

template <int kN, Half16 kType>
struct Wgmma;

#if defined(TILEWISE_EMULATOR)

// wgmma.fence, wgmma.commit_group, and wgmma.wait_group: at most kPending groups are in flight.
TILEWISE_DEVICE void wgmma_fence() { emulator::wgmma_fence(); }
TILEWISE_DEVICE void wgmma_commit_group() { emulator::wgmma_commit_group(); }
template <int kPending>
TILEWISE_DEVICE void wgmma_wait_group() {
  emulator::wgmma_wait_group(kPending);
}

template <int kN, Half16 kType>
struct Wgmma {
  static constexpr bool kBf16 = kType == Half16::bf16;
  using D = float (&)[kN / 2];

  template <bool kTransA, bool kTransB>
  static TILEWISE_DEVICE void add(D d, uint64_t a, uint64_t b) {
    emulator::wgmma(d, kN, kBf16, a, b, kTransA, kTransB, true);
  }
  template <bool kTransA, bool kTransB>
  static TILEWISE_DEVICE void start(D d, uint64_t a, uint64_t b) {
    emulator::wgmma(d, kN, kBf16, a, b, kTransA, kTransB, false);
  }
  template <bool kTransA, bool kTransB>
  static TILEWISE_DEVICE void restart(D d, uint64_t a, uint64_t b) {
    start<kTransA, kTransB>(d, a, b);
  }
  template <bool kTransB>
  static TILEWISE_DEVICE void add(D d, const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma(d, kN, kBf16, a, b, kTransB, true);
  }
  template <bool kTransB>
  static TILEWISE_DEVICE void add_if(int32_t adds, D d, const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma(d, kN, kBf16, a, b, kTransB, adds != 0);
  }
  template <bool kTransB>
  static TILEWISE_DEVICE void start(D d, const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma(d, kN, kBf16, a, b, kTransB, false);
  }
};

#else

TILEWISE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TILEWISE_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
TILEWISE_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define TILEWISE_SUM(x) "+f"(x)
#define TILEWISE_RESULT(x) "=f"(x)

// The instruction for N = n, with r sums per thread. x0 to x6 are the asm names of the operands
// that follow the sums. Predicate p is scale-d: from a constant that ptxas sees (0 in `start` and
// `restart`, 1 in `add`), or from a register (`add_if`).
#define TILEWISE_WGMMA_SHAPE(n, r, type, how, accumulate, a_names, a_operands, flags, b_name, b, \
                             ...)                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate                                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
               " {" TILEWISE_NAMES##r "}, " a_names ", " b_name ", p, 1, 1, " flags ";\n}"       \
               : TILEWISE_D##r(how, 0)                                                           \
               : a_operands, "l"(b), __VA_ARGS__)

#define TILEWISE_WGMMA_TYPE(n, r, kind, type, x0, x1, x2, x3, x4, x5, x6)                       \
  template <>                                                                                   \
  struct Wgmma<n, Half16::kind> {                                                               \
    using D = float (&)[r];                                                                     \
    template <bool kTransA, bool kTransB>                                                       \
    static TILEWISE_DEVICE void add(D d, uint64_t a, uint64_t b) {                              \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_SUM, "1", x0, "l"(a), x2 ", " x3, x1, b,        \
                           "n"(int{kTransA}), "n"(int{kTransB}));                               \
    }                                                                                           \
    template <bool kTransA, bool kTransB>                                                       \
    static TILEWISE_DEVICE void start(D d, uint64_t a, uint64_t b) {                            \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_RESULT, "0", x0, "l"(a), x2 ", " x3, x1, b,     \
                           "n"(int{kTransA}), "n"(int{kTransB}));                               \
    }                                                                                           \
    template <bool kTransA, bool kTransB>                                                       \
    static TILEWISE_DEVICE void restart(D d, uint64_t a, uint64_t b) {                          \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_SUM, "0", x0, "l"(a), x2 ", " x3, x1, b,        \
                           "n"(int{kTransA}), "n"(int{kTransB}));                               \
    }                                                                                           \
    template <bool kTransB>                                                                     \
    static TILEWISE_DEVICE void add(D d, const uint32_t (&a)[4], uint64_t b) {                  \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_SUM, "1", "{" x0 "," x1 "," x2 "," x3 "}",      \
                           TILEWISE_A4, x5, x4, b, "n"(int{kTransB}));                          \
    }                                                                                           \
    template <bool kTransB>                                                                     \
    static TILEWISE_DEVICE void add_if(int32_t adds, D d, const uint32_t (&a)[4], uint64_t b) { \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_SUM, x6, "{" x0 "," x1 "," x2 "," x3 "}",       \
                           TILEWISE_A4, x5, x4, b, "n"(int{kTransB}), "r"(adds));               \
    }                                                                                           \
    template <bool kTransB>                                                                     \
    static TILEWISE_DEVICE void start(D d, const uint32_t (&a)[4], uint64_t b) {                \
      TILEWISE_WGMMA_SHAPE(n, r, type, TILEWISE_RESULT, "0", "{" x0 "," x1 "," x2 "," x3 "}",   \
                           TILEWISE_A4, x5, x4, b, "n"(int{kTransB}));                          \
    }                                                                                           \
  };
#define TILEWISE_A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define TILEWISE_WGMMA(n, r, ...)                    \
  TILEWISE_WGMMA_TYPE(n, r, f16, "f16", __VA_ARGS__) \
  TILEWISE_WGMMA_TYPE(n, r, bf16, "bf16", __VA_ARGS__)

TILEWISE_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
TILEWISE_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
TILEWISE_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
TILEWISE_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
TILEWISE_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
TILEWISE_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
TILEWISE_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef TILEWISE_WGMMA
#undef TILEWISE_WGMMA_TYPE
#undef TILEWISE_WGMMA_SHAPE
#undef TILEWISE_A4
#undef TILEWISE_SUM
#undef TILEWISE_RESULT

#endif

}  // namespace tilewise::cuda::ptx
