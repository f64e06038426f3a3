// Copies by TMA, the tensor memory accelerator (sm_90). One thread issues a copy; its completion is
// counted in bytes by an mbarrier (loads) or waited for as a bulk group (stores, reductions). PTX
// ISA 9.7.9.25: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk. Shared-memory addresses
// are 128-byte aligned for TMA boxes and 16-byte aligned for plain bytes.
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda::ptx {

// L2 eviction priority of what a copy reads: the results of createpolicy.fractional with
// fraction 1.
enum class CachePolicy : uint64_t {
  evict_normal = 0x1000000000000000,
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

#if defined(TILEWISE_EMULATOR)

// cp.async.bulk.tensor, global to shared: the TMA box of `map` whose first element is (batch, head,
// row, column); for a paged cache `batch` is a page. Elements outside the tensor are read as 0.
TILEWISE_DEVICE void cp_async_bulk_tensor_load(SharedAddress to, const TensorMap& map, int column,
                                               int row, int head, int batch, SharedAddress barrier,
                                               CachePolicy) {
  emulator::cp_async_bulk_tensor_load(to, map, column, row, head, batch, barrier);
}
// cp.async.bulk.tensor, shared to global. Elements outside the tensor are not written.
TILEWISE_DEVICE void cp_async_bulk_tensor_store(const TensorMap& map, int column, int row, int head,
                                                int batch, SharedAddress from) {
  emulator::cp_async_bulk_tensor_store(map, column, row, head, batch, from);
}
// cp.async.bulk, global to shared.
TILEWISE_DEVICE void cp_async_bulk_load(SharedAddress to, const void* from, int bytes,
                                        SharedAddress barrier) {
  emulator::cp_async_bulk_load(to, from, bytes, barrier);
}
// cp.reduce.async.bulk.add.f32: adds shared to global memory.
TILEWISE_DEVICE void cp_reduce_async_bulk_add_f32(float* to, SharedAddress from, int bytes,
                                                  CachePolicy = CachePolicy::evict_normal) {
  emulator::cp_reduce_async_bulk_add_f32(to, from, bytes);
}
// cp.async.bulk.commit_group: this thread's stores and reductions since the last one form a group.
TILEWISE_DEVICE void cp_async_bulk_commit_group() { emulator::cp_async_bulk_commit_group(); }
// cp.async.bulk.wait_group.read: at most kPending of this thread's groups still read shared memory.
template <int kPending>
TILEWISE_DEVICE void cp_async_bulk_wait_group_read() {
  emulator::cp_async_bulk_wait_group_read(kPending);
}
// cp.async.bulk.wait_group: at most kPending of this thread's groups are incomplete.
template <int kPending>
TILEWISE_DEVICE void cp_async_bulk_wait_group() {
  emulator::cp_async_bulk_wait_group(kPending);
}
// prefetch.tensormap
TILEWISE_DEVICE void prefetch_tensormap(const TensorMap&) {}
// cp.async.bulk.prefetch.tensor: loads a TMA box into L2.
TILEWISE_DEVICE void cp_async_bulk_prefetch_tensor(const TensorMap&, int, int, int, int) {}

#else

TILEWISE_DEVICE void cp_async_bulk_tensor_load(SharedAddress to, const TensorMap& map, int column,
                                               int row, int head, int batch, SharedAddress barrier,
                                               CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}
TILEWISE_DEVICE void cp_async_bulk_tensor_store(const TensorMap& map, int column, int row, int head,
                                                int batch, SharedAddress from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(&map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
TILEWISE_DEVICE void cp_async_bulk_load(SharedAddress to, const void* from, int bytes,
                                        SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
TILEWISE_DEVICE void cp_reduce_async_bulk_add_f32(float* to, SharedAddress from, int bytes,
                                                  CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 "
      "[%0], [%1], %2, %3;" ::"l"(to),
      "r"(from), "r"(bytes), "l"(static_cast<uint64_t>(policy))
      : "memory");
}
TILEWISE_DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
TILEWISE_DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
TILEWISE_DEVICE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
TILEWISE_DEVICE void cp_async_bulk_prefetch_tensor(const TensorMap& map, int column, int row,
                                                   int head, int batch) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
TILEWISE_DEVICE void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#endif

}  // namespace tilewise::cuda::ptx
