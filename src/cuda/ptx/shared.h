// Loads and stores of shared memory. PTX ISA 9.7.9 (ld, st), 9.7.14 (ldmatrix; stmatrix, sm_90).
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// ldmatrix.x4: four 8x8 matrices of 16-bit elements (8 rows of 16 bytes). Lane l gives the address
// of row l % 8 of matrix l / 8, and receives in r[i] the 4-byte word l % 4 of row l / 4 of matrix
// i.
TILEWISE_DEVICE void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
  emulator::ldmatrix_x4(r, row);
}
// ldmatrix.x4.trans: the same matrices transposed. r[i] holds elements (2 (l % 4), l / 4) and
// (2 (l % 4) + 1, l / 4).
TILEWISE_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) {
  emulator::ldmatrix_x4_trans(r, row);
}
// stmatrix.x4 and stmatrix.x4.trans: the corresponding stores.
TILEWISE_DEVICE void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4]) {
  emulator::stmatrix_x4(row, r);
}
TILEWISE_DEVICE void stmatrix_x4_trans(SharedAddress row, const uint32_t (&r)[4]) {
  emulator::stmatrix_x4_trans(row, r);
}
// ld.shared and st.shared.
TILEWISE_DEVICE uint32_t ld_shared_b32(SharedAddress a) { return emulator::ld_shared_b32(a); }
TILEWISE_DEVICE void ld_shared_v2_b32(uint32_t (&r)[2], SharedAddress a) {
  emulator::ld_shared_v2_b32(r, a);
}
TILEWISE_DEVICE void ld_shared_v4_b32(uint32_t (&r)[4], SharedAddress a) {
  emulator::ld_shared_v4_b32(r, a);
}
TILEWISE_DEVICE void st_shared_b16(SharedAddress a, uint16_t x) { emulator::st_shared_b16(a, x); }
TILEWISE_DEVICE void st_shared_b32(SharedAddress a, uint32_t x) { emulator::st_shared_b32(a, x); }
TILEWISE_DEVICE void st_shared_v4_b32(SharedAddress a, const uint32_t (&r)[4]) {
  emulator::st_shared_v4_b32(a, r);
}

#else

TILEWISE_DEVICE void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
TILEWISE_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
TILEWISE_DEVICE void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
TILEWISE_DEVICE void stmatrix_x4_trans(SharedAddress row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
TILEWISE_DEVICE uint32_t ld_shared_b32(SharedAddress a) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a));
  return x;
}
TILEWISE_DEVICE void ld_shared_v2_b32(uint32_t (&r)[2], SharedAddress a) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a));
}
TILEWISE_DEVICE void ld_shared_v4_b32(uint32_t (&r)[4], SharedAddress a) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
TILEWISE_DEVICE void st_shared_b16(SharedAddress a, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(a), "h"(x) : "memory");
}
TILEWISE_DEVICE void st_shared_b32(SharedAddress a, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
TILEWISE_DEVICE void st_shared_v4_b32(SharedAddress a, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

#endif

}  // namespace tilewise::cuda::ptx
