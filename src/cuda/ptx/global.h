// Global memory: vector loads and stores, reductions, atomics, flags between CTAs. PTX ISA 9.7.9
// (ld, st), 9.7.13 (red, atom).
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// ld.global and st.global. On a GPU, `volatile` keeps their order among other asm statements.
TILEWISE_DEVICE uint32_t ld_global_b32(const void* p) {
  uint32_t r;
  __builtin_memcpy(&r, p, sizeof(r));
  return r;
}
TILEWISE_DEVICE void ld_global_v4_b32(uint32_t (&r)[4], const void* p) {
  emulator::ld_global_v4_b32(r, p);
}
TILEWISE_DEVICE void st_global_v4_b32(void* p, const uint32_t (&r)[4]) {
  emulator::st_global_v4_b32(p, r);
}
TILEWISE_DEVICE void st_global_v2_b32(void* p, const uint32_t (&r)[2]) {
  static_cast<uint32_t*>(p)[0] = r[0];
  static_cast<uint32_t*>(p)[1] = r[1];
}
// red.global.add: an addition without a result.
TILEWISE_DEVICE void red_add_f32(float* p, float x) { emulator::red_add_f32(p, x); }
TILEWISE_DEVICE void red_add_v4_f32(float* p, const float (&x)[4]) {
  emulator::red_add_v4_f32(p, x);
}
// red.global.max and red.global.min.
TILEWISE_DEVICE void red_max_s32(void* p, int32_t x) {
  auto* const to = static_cast<int32_t*>(p);
  int32_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (old < x &&
         !__atomic_compare_exchange_n(to, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
TILEWISE_DEVICE void red_min_u32(void* p, uint32_t x) {
  auto* const to = static_cast<uint32_t*>(p);
  uint32_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (old > x &&
         !__atomic_compare_exchange_n(to, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
// ld.acquire.gpu, st.release.gpu and red.release.gpu.add: flags that CTAs set and wait for.
TILEWISE_DEVICE int32_t ld_acquire(const int32_t* p) { return emulator::ld_acquire(p); }
TILEWISE_DEVICE void st_release(int32_t* p, int32_t x) { emulator::st_release(p, x); }
TILEWISE_DEVICE void red_release_add_s32(int32_t* p, int32_t x) {
  emulator::st_release(p, emulator::ld_acquire(p) + x);
}
// atom.add: adds and returns the value before, with relaxed order.
TILEWISE_DEVICE int32_t atom_add(int32_t* p, int32_t x) {
  return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}
// atom.acq_rel.gpu.add: the same; it acquires the writes that earlier arrivals released.
TILEWISE_DEVICE uint64_t atom_acq_rel_add(uint64_t* p, uint64_t x) {
  return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}
// atom.cas: replaces the value `from` by `to`; returns the value before.
TILEWISE_DEVICE uint64_t atom_cas(uint64_t* p, uint64_t from, uint64_t to) {
  __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return from;
}

#else

TILEWISE_DEVICE uint32_t ld_global_b32(const void* p) {
  uint32_t r;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
TILEWISE_DEVICE void ld_global_v4_b32(uint32_t (&r)[4], const void* p) {
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(p));
}
TILEWISE_DEVICE void st_global_v4_b32(void* p, const uint32_t (&r)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}
TILEWISE_DEVICE void st_global_v2_b32(void* p, const uint32_t (&r)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(p), "r"(r[0]), "r"(r[1]) : "memory");
}
TILEWISE_DEVICE void red_add_f32(float* p, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// sm_90
TILEWISE_DEVICE void red_add_v4_f32(float* p, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
TILEWISE_DEVICE void red_max_s32(void* p, int32_t x) {
  asm volatile("red.global.max.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
TILEWISE_DEVICE void red_min_u32(void* p, uint32_t x) {
  asm volatile("red.global.min.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
TILEWISE_DEVICE int32_t ld_acquire(const int32_t* p) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
TILEWISE_DEVICE void st_release(int32_t* p, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
TILEWISE_DEVICE void red_release_add_s32(int32_t* p, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
TILEWISE_DEVICE int32_t atom_add(int32_t* p, int32_t x) {
  int32_t before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
  return before;
}
TILEWISE_DEVICE uint64_t atom_acq_rel_add(uint64_t* p, uint64_t x) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(p), "l"(x)
               : "memory");
  return before;
}
TILEWISE_DEVICE uint64_t atom_cas(uint64_t* p, uint64_t from, uint64_t to) {
  uint64_t before;
  asm volatile("atom.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(from), "l"(to)
               : "memory");
  return before;
}

#endif

}  // namespace tilewise::cuda::ptx
