// What the launches of all passes share: the kernels of an instruction set, running work items on
// threads, the numbering of query tiles, and zeroing the rows that no work item writes.
#pragma once

#include <atomic>
#include <cstring>

#include "attention/schedule.h"
#include "base/parallel.h"
#include "cpu/generic/tasks.h"
#include "cpu/layout.h"

namespace tilewise::cpu {

// The kernels of each dtype of q.
struct KernelsByDtype {
  const Kernels* (*float32)();
  const Kernels* (*float16)();
  const Kernels* (*bfloat16)();
};

// `isa` must be compiled (cpu/backend.h). AVX512-BF16 and Arm's BF16 add bf16 dot products alone,
// and AMX has no fp32 products, so the dtypes that gain nothing use the AVX-512 or NEON kernels.
inline KernelsByDtype kernels_of_isa(Isa isa) {
  switch (isa) {
#if defined(TILEWISE_ISA_NEON)
    case Isa::neon:
      return {neon_float32, neon_float16, neon_bfloat16};
#endif
#if defined(TILEWISE_ISA_NEON_BF16)
    case Isa::neon_bf16:
      return {neon_float32, neon_float16, neon_bf16_bfloat16};
#endif
#if defined(TILEWISE_ISA_AVX2)
    case Isa::avx2:
      return {avx2_float32, avx2_float16, avx2_bfloat16};
#endif
#if defined(TILEWISE_ISA_AVX512)
    case Isa::avx512:
      return {avx512_float32, avx512_float16, avx512_bfloat16};
#endif
#if defined(TILEWISE_ISA_AVX512_BF16)
    case Isa::avx512_bf16:
      return {avx512_float32, avx512_float16, avx512_bf16_bfloat16};
#endif
#if defined(TILEWISE_ISA_AMX)
    case Isa::amx:
      return {avx512_float32, amx_float16, amx_bfloat16};
#endif
    default:
      return {portable_float32, portable_float16, portable_bfloat16};
  }
}

inline const Kernels& kernels_for(Isa isa, int32_t dtype) {
  const KernelsByDtype kernels = kernels_of_isa(isa);
  switch (dtype) {
    case TILEWISE_FLOAT32:
      return *kernels.float32();
    case TILEWISE_FLOAT16:
      return *kernels.float16();
    default:
      return *kernels.bfloat16();
  }
}

// Below this many multiply-adds, waking a thread costs more than it saves (about 5 us).
inline constexpr int64_t kSerialWork = 1 << 18;

// Runs items [0, items); workers take them in ascending order from a shared counter. `work` is any
// measure of the multiply-adds in all of them.
template <class Item>
void run_items(const Parallel& parallel, int64_t items, int64_t work, const Item& item) {
  std::atomic<int64_t> next{0};
  const int64_t workers =
      work < kSerialWork ? 1 : clamp(items, 1, static_cast<int64_t>(parallel.threads));
  parallel.run(workers, [&](int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) item(worker, i);
  });
}

inline int64_t saturating_work(int64_t a, int64_t b, int64_t c) {
  int64_t ab = 0;
  int64_t abc = 0;
  return checked_mul(a, b, &ab) && checked_mul(ab, c, &abc) ? abc : INT64_MAX;
}

// The query tiles of every sequence, numbered from first_tile[b] on.
struct QueryTiles {
  const Problem& p;
  int64_t step;
  int64_t* first_tile;
  int64_t max_tiles = 0;  // of one sequence
  int64_t max_keys = 0;   // of one sequence
  int64_t total = 0;

  QueryTiles(const Problem& problem, int64_t tile, int64_t* first)
      : p(problem), step(tile), first_tile(first) {
    for (int64_t b = 0; b < p.batch; ++b) {
      first_tile[b] = total;
      const Sequence s = sequence_of(p, b);
      const int64_t count = tiling(s).count();
      total += count;
      max_tiles = max(max_tiles, count);
      max_keys = max(max_keys, s.band.keys);
    }
    first_tile[p.batch] = total;
  }
  Tiling tiling(const Sequence& s) const { return {s.band.rows * group_size(p), step}; }
  // Index of a tile and key/value head in per-tile arrays.
  int64_t id(int64_t b, int64_t kv_head, int64_t tile) const {
    return (first_tile[b] + tile) * p.heads_kv + kv_head;
  }
  int64_t heads() const { return p.batch * p.heads_kv; }
};

// Calls row() for the unused rows of q: those beyond seqused_q and beyond the last cu_seqlens
// entry.
template <class Row>
void for_unused_rows(const Problem& p, const Row& row) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    const int64_t rows = query_rows(p, b).size();
    for (int64_t i = s.band.rows; i < rows; ++i) row(s, i);
  }
  if (p.cu_seqlens_q == nullptr) return;
  Sequence rest{};
  rest.first_row = p.batch > 0 ? p.cu_seqlens_q[p.batch] : 0;
  for (int64_t i = 0; rest.first_row + i < p.seqlen_q; ++i) row(rest, i);
}

inline void zero_row(int32_t dtype, const tilewise_tensor& view, int64_t offset, int64_t heads,
                     int64_t columns) {
  const int64_t size = element_bytes(dtype);
  for (int64_t h = 0; h < heads; ++h)
    std::memset(static_cast<char*>(view.data) + (offset + h * view.stride_head) * size, 0,
                static_cast<size_t>(columns * size));
}

}  // namespace tilewise::cpu
