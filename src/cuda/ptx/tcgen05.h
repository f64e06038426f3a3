// The tensor cores of datacenter Blackwell (sm_100a, sm_103a), whose sums lie in tensor memory. PTX
// ISA 9.7.16.
//
// Tensor memory has 128 lanes and 512 columns of 32 bits; an address is lane << 16 | column. Warp w
// of a block accesses lanes 32 (w % 4) to 32 (w % 4) + 31 and no others. A product with M = 128 has
// its row i in lane i and its column j in column j. An operand of 16 bits in tensor memory has two
// elements of a row in each column.
//
// One thread of a block issues its products, which run in the order in which they were issued.
// tcgen05_commit arrives at an mbarrier when all products that its thread has issued are done.
// A load is done after tcgen05_wait_ld, a store after tcgen05_wait_st. One thread hands tensor
// memory to another in this order: wait for loads and stores, tcgen05_fence_before, arrive at a
// barrier; wait for the barrier, tcgen05_fence_after, access.
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/ptx/register_lists.h"

namespace tilewise::cuda::ptx {

using TensorAddress = uint32_t;

inline constexpr int kTensorColumns = 512;
inline constexpr int kTensorLanes = 128;

#if defined(TILEWISE_EMULATOR)

// tcgen05.alloc, by all lanes of a warp: 32, 64, 128, 256 or 512 columns, whose address is written
// to `result` in shared memory. The same warp gives them back with tcgen05.dealloc.
TILEWISE_DEVICE void tcgen05_alloc(SharedAddress result, int columns) {
  emulator::tcgen05_alloc(result, columns);
}
TILEWISE_DEVICE void tcgen05_dealloc(TensorAddress address, int columns) {
  emulator::tcgen05_dealloc(address, columns);
}
// tcgen05.relinquish_alloc_permit: this block allocates no more, so that others may.
TILEWISE_DEVICE void tcgen05_relinquish_alloc_permit() {
  emulator::tcgen05_relinquish_alloc_permit();
}
// tcgen05.fence::before_thread_sync and ::after_thread_sync.
TILEWISE_DEVICE void tcgen05_fence_before() { emulator::tcgen05_fence_before(); }
TILEWISE_DEVICE void tcgen05_fence_after() { emulator::tcgen05_fence_after(); }
// tcgen05.ld and tcgen05.st of shape 32x32b, by all lanes of a warp with the same address:
// register i of a lane is column i of its lane of tensor memory.
template <int kN>
TILEWISE_DEVICE void tcgen05_ld(uint32_t (&d)[kN], TensorAddress from) {
  emulator::tcgen05_ld(d, kN, from);
}
template <int kN>
TILEWISE_DEVICE void tcgen05_st(TensorAddress to, const uint32_t (&d)[kN]) {
  emulator::tcgen05_st(to, d, kN);
}
// tcgen05.wait::ld. The arguments are the registers of the loads that it waits for: the compiler
// does not know that the instruction writes them.
template <int... kN>
TILEWISE_DEVICE void tcgen05_wait_ld(uint32_t (&... d)[kN]) {
  (static_cast<void>(d), ...);
  emulator::tcgen05_wait_ld();
}
// tcgen05.wait::st
TILEWISE_DEVICE void tcgen05_wait_st() { emulator::tcgen05_wait_st(); }
// tcgen05.mma.kind::f16: d [M, N] = a [M, 16] b [16, N], plus d if `add`, with fp16 or bf16
// operands and fp32 sums. `kind` is the instruction descriptor (idesc); a and b in shared memory
// are given by matrix descriptors (cuda/tile/tcgen05_operands.h).
TILEWISE_DEVICE void tcgen05_mma_f16(TensorAddress d, uint64_t a, uint64_t b, uint32_t kind,
                                     bool add) {
  emulator::tcgen05_mma_f16(d, a, b, kind, add);
}
// The same with a in tensor memory.
TILEWISE_DEVICE void tcgen05_mma_f16_tensor_a(TensorAddress d, TensorAddress a, uint64_t b,
                                              uint32_t kind, bool add) {
  emulator::tcgen05_mma_f16_tensor_a(d, a, b, kind, add);
}
// tcgen05.commit. It includes tcgen05_fence_before.
TILEWISE_DEVICE void tcgen05_commit(SharedAddress barrier) { emulator::tcgen05_commit(barrier); }

#else

TILEWISE_DEVICE void tcgen05_alloc(SharedAddress result, int columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result),
               "r"(columns)
               : "memory");
}
TILEWISE_DEVICE void tcgen05_dealloc(TensorAddress address, int columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}
TILEWISE_DEVICE void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
TILEWISE_DEVICE void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
TILEWISE_DEVICE void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
template <int kN>
TILEWISE_DEVICE void keep_behind_wait(uint32_t (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int... kN>
TILEWISE_DEVICE void tcgen05_wait_ld(uint32_t (&... d)[kN]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  (keep_behind_wait(d), ...);
}
TILEWISE_DEVICE void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}
TILEWISE_DEVICE void tcgen05_mma_f16(TensorAddress d, uint64_t a, uint64_t b, uint32_t kind,
                                     bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(kind), "r"(add ? 1u : 0u)
      : "memory");
}
TILEWISE_DEVICE void tcgen05_mma_f16_tensor_a(TensorAddress d, TensorAddress a, uint64_t b,
                                              uint32_t kind, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(kind), "r"(add ? 1u : 0u)
      : "memory");
}
TILEWISE_DEVICE void tcgen05_commit(SharedAddress barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

template <int kN>
TILEWISE_DEVICE void tcgen05_ld(uint32_t (&d)[kN], TensorAddress from);
template <int kN>
TILEWISE_DEVICE void tcgen05_st(TensorAddress to, const uint32_t (&d)[kN]);

#define TILEWISE_LOADED(x) "=r"(x)
#define TILEWISE_STORED(x) "r"(x)
#define TILEWISE_TENSOR_ACCESS(n)                                                                 \
  template <>                                                                                     \
  TILEWISE_DEVICE void tcgen05_ld(uint32_t (&d)[n], TensorAddress from) {                         \
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #n ".b32 {" TILEWISE_NAMES##n "}, [%" #n "];" \
                 : TILEWISE_D##n(TILEWISE_LOADED, 0)                                              \
                 : "r"(from));                                                                    \
  }                                                                                               \
  template <>                                                                                     \
  TILEWISE_DEVICE void tcgen05_st(TensorAddress to, const uint32_t (&d)[n]) {                     \
    asm volatile("tcgen05.st.sync.aligned.32x32b.x" #n ".b32 [%" #n "], {" TILEWISE_NAMES##n      \
                 "};" ::TILEWISE_D##n(TILEWISE_STORED, 0),                                        \
                 "r"(to)                                                                          \
                 : "memory");                                                                     \
  }
TILEWISE_TENSOR_ACCESS(16)
TILEWISE_TENSOR_ACCESS(32)
TILEWISE_TENSOR_ACCESS(64)
TILEWISE_TENSOR_ACCESS(128)
#undef TILEWISE_TENSOR_ACCESS
#undef TILEWISE_LOADED
#undef TILEWISE_STORED

#endif

}  // namespace tilewise::cuda::ptx
