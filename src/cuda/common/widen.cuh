// widen: see widen.h. Grid widen_blocks(problem); a warp converts a row of q, 8 numbers per lane at
// a time, and the CTA after those of the rows computes the factors of k.
#pragma once

#include "attention/widened_queries.h"
#include "base/float8.h"
#include "cuda/common/block.h"
#include "cuda/common/widen.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"

namespace tilewise::cuda::common {

inline constexpr int kWidenColumns = 8;  // of a lane at a time: 16 bytes of the copy

// The columns from `first` on of a row of `columns`, a byte each; those past its end are 0.
TILEWISE_DEVICE uint64_t load_columns(const Float8* row, int64_t first, int64_t columns) {
  const Float8* const from = row + first;
  if (first + kWidenColumns <= columns && reinterpret_cast<uintptr_t>(from) % kWidenColumns == 0)
    return *reinterpret_cast<const uint64_t*>(from);
  uint64_t bytes = 0;
  for (int64_t i = 0; i < min<int64_t>(kWidenColumns, columns - first); ++i)
    bytes |= uint64_t{from[i].bits} << (8 * i);
  return bytes;
}

TILEWISE_DEVICE void store_columns(uint16_t* to, uint64_t bytes, bool fp16) {
  const auto number = [&](int i) { return to_float(Float8{static_cast<uint8_t>(bytes >> 8 * i)}); };
  uint32_t pairs[kWidenColumns / 2];
#pragma unroll
  for (int i = 0; i < kWidenColumns / 2; ++i) {
    const float low = number(2 * i);
    const float high = number(2 * i + 1);
    pairs[i] = fp16 ? ptx::cvt_f16x2(low, high) : ptx::cvt_bf16x2(low, high);
  }
  ptx::st_global_v4_b32(to, pairs);
}

// One row of all heads. A power of two of lanes, up to the whole warp, takes a head at a time.
TILEWISE_DEVICE void widen_row(const WidenParams& params, int64_t row) {
  const Problem& p = params.problem;
  const Problem& wide = params.wide;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int64_t batch = varlen ? 0 : row / p.seqlen_q;
  const int64_t row_of_batch = varlen ? row : row - batch * p.seqlen_q;
  const Float8* const from = static_cast<const Float8*>(p.q.data) + batch * p.q.stride_batch +
                             row_of_batch * p.q.stride_row;
  uint16_t* const to = static_cast<uint16_t*>(wide.q.data) + row * wide.q.stride_row;
  int lanes = 1;
  while (lanes < ptx::kWarpSize && lanes * kWidenColumns < p.head_dim) lanes *= 2;
  const int lane = ptx::lane_index();
  for (int64_t head = lane / lanes; head < p.heads_q; head += ptx::kWarpSize / lanes) {
    for (int64_t column = lane % lanes * kWidenColumns; column < p.head_dim;
         column += lanes * kWidenColumns) {
      const uint64_t bytes = load_columns(from + head * p.q.stride_head, column, p.head_dim);
      store_columns(to + head * wide.q.stride_head + column, bytes, wide.dtype == TILEWISE_FLOAT16);
    }
  }
}

TILEWISE_KERNEL(kWidenThreads, 1) void widen(TILEWISE_PARAMETER WidenParams params) {
  const Problem& p = params.problem;
  const int64_t block = ptx::block_index();
  if (block < widen_row_blocks(p)) {
    const int64_t row = block * kWidenRows + ptx::warp_index();
    if (row < total_rows(p)) widen_row(params, row);
    return;
  }
  auto* const factors = const_cast<float*>(params.wide.k_descale);
  for (int64_t i = ptx::thread_index(); i < p.batch * p.heads_kv; i += kWidenThreads) {
    const int64_t b = i / p.heads_kv;
    factors[i] = score_descale(p, b, i - b * p.heads_kv);
  }
}

}  // namespace tilewise::cuda::common
