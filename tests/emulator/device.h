// The functions that the device wrappers of src/cuda/ptx call when a kernel is compiled for the
// host: the semantics of the instructions, with the checks that README.md lists. They are called by
// the threads of a block that run_grid (grid.h) runs. One host thread runs one grid at a time;
// several host threads may run grids at once.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda::emulator {

// Constant for the calling thread, whatever happens between two calls.
#define TILEWISE_EMULATOR_CONSTANT __attribute__((const))
TILEWISE_EMULATOR_CONSTANT int thread_index();
TILEWISE_EMULATOR_CONSTANT int block_threads();
TILEWISE_EMULATOR_CONSTANT int64_t block_index();
TILEWISE_EMULATOR_CONSTANT int64_t grid_blocks();
TILEWISE_EMULATOR_CONSTANT char* shared_memory();
#undef TILEWISE_EMULATOR_CONSTANT
// Shared memory starts at address 1024, as on a GPU that reserves the first bytes: an offset that
// is mistaken for an address is out of bounds.
uint32_t shared_address(const void* p);

void sync_block();
void griddepcontrol_wait();
void sync_warp();

float shuffle_xor(float x, int mask);
uint32_t shuffle_xor(uint32_t x, int mask);
float shuffle(float x, int lane);
uint32_t shuffle(uint32_t x, int lane);
bool any(bool x);

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row);
void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]);
void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]);
uint32_t ld_shared_b32(uint32_t address);
void ld_shared_v2_b32(uint32_t (&r)[2], uint32_t address);
void ld_shared_v4_b32(uint32_t (&r)[4], uint32_t address);
void st_shared_b16(uint32_t address, uint16_t x);
void st_shared_b32(uint32_t address, uint32_t x);
void st_shared_v4_b32(uint32_t address, const uint32_t (&r)[4]);

// Writes `bytes` of shared memory: `bytes_read` of them from `source`, the rest with 0.
void cp_async(uint32_t to, const void* source, int bytes, int bytes_read);
void cp_async_mbarrier_arrive(uint32_t barrier);
void cp_async_commit_group();
void cp_async_wait_group(int pending);

// Products are exact; sums are rounded to nearest in fp32, one after another in the order of k.
// Tensor cores add several products at once and truncate bits below the largest one, so the last
// bits differ from a GPU's, with an error of the same order.
void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

void ld_global_v4_b32(uint32_t (&r)[4], const void* p);
void st_global_v4_b32(void* p, const uint32_t (&r)[4]);
void red_add_f32(float* p, float x);
void red_add_v4_f32(float* p, const float (&x)[4]);
// Lets the other threads run, then reads: a thread may wait in a loop for a value that another
// thread, or an earlier block, writes.
int32_t ld_acquire(const int32_t* p);
void st_release(int32_t* p, int32_t x);

void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier);
void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes);
void mbarrier_wait_parity(uint32_t barrier, int parity);
void fence_mbarrier_init();
void fence_proxy_async();

void cp_async_bulk_tensor_load(uint32_t to, const TensorMap& map, int column, int row, int head,
                               int batch, uint32_t barrier);
void cp_async_bulk_tensor_store(const TensorMap& map, int column, int row, int head, int batch,
                                uint32_t from);
void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier);
void cp_reduce_async_bulk_add_f32(float* to, uint32_t from, int bytes);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group_read(int pending);
void cp_async_bulk_wait_group(int pending);

// Instructions between the blocks of a cluster. A remote arrival releases like a local one.
void sync_cluster();
void st_async_v4_b32(uint32_t to, const uint32_t (&r)[4], uint32_t barrier);
uint32_t map_to_rank(uint32_t address, int rank);
void mbarrier_arrive_remote(uint32_t barrier);
void cp_async_bulk_to_rank(uint32_t to, uint32_t from, int bytes, uint32_t barrier);

void bar_sync(int barrier, int threads);
void bar_arrive(int barrier, int threads);
bool bar_any(int barrier, int threads, bool x);
void setmaxnreg_inc(int registers);
void setmaxnreg_dec(int registers);

void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(int pending);
// d: the n / 2 sums per thread, computed like those of mma. `d` is poison until it is waited for.
void wgmma(float* d, int n, bool bf16, uint64_t a, uint64_t b, bool trans_a, bool trans_b,
           bool add);
void wgmma(float* d, int n, bool bf16, const uint32_t (&a)[4], uint64_t b, bool trans_b, bool add);
// Operands of float8_e4m3.
void wgmma_float8(float* d, int n, uint64_t a, uint64_t b, bool add);
void wgmma_float8(float* d, int n, const uint32_t (&a)[4], uint64_t b, bool add);

// d, and a in tensor memory, are addresses in tensor memory. `kind` is the instruction descriptor.
void tcgen05_alloc(uint32_t result, int columns);
void tcgen05_dealloc(uint32_t address, int columns);
void tcgen05_relinquish_alloc_permit();
void tcgen05_fence_before();
void tcgen05_fence_after();
void tcgen05_ld(uint32_t* d, int n, uint32_t from);  // `d` is poison until it is waited for
void tcgen05_st(uint32_t to, const uint32_t* d, int n);
void tcgen05_wait_ld();
void tcgen05_wait_st();
void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, bool add);
void tcgen05_mma_f16_tensor_a(uint32_t d, uint32_t a, uint64_t b, uint32_t kind, bool add);
void tcgen05_commit(uint32_t barrier);

uint32_t cvt_f16x2(float low, float high);
uint32_t cvt_bf16x2(float low, float high);
// Needs sm_89.
uint32_t cvt_f16x2_e4m3x2(uint16_t x);
uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3);
// Like .approx.ftz: subnormal arguments and results are 0. The last bits are those of the host.
float ex2(float x);
float lg2(float x);
float rcp_approximate(float x);

using tilewise::detail::bits_of;
using tilewise::detail::float_of;

}  // namespace tilewise::cuda::emulator
