// The rows of the backward: tiles of Q, dO and their statistics on the way to shared memory.
#pragma once

#include "cuda/mma_sync/backward_plan.h"
#include "cuda/ptx/block.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

// Which rows of one head a key tile needs, in whole tiles, and how many rows there are.
struct RowSpan {
  int32_t begin;
  int32_t end;
  int32_t rows;

  template <class C>
  TILEWISE_DEVICE static RowSpan of(const Band& band, Range keys) {
    const Range touched =
        Tiling{band.rows, BackwardPlan<C>::kQueries}.touching(band.rows_of_any(keys));
    return {static_cast<int32_t>(touched.begin * BackwardPlan<C>::kQueries),
            static_cast<int32_t>(touched.end * BackwardPlan<C>::kQueries),
            static_cast<int32_t>(band.rows)};
  }
  TILEWISE_DEVICE int32_t length() const { return end - begin; }
};

// One of the two tensors: the chunks that this thread copies.
template <class C>
class RowPointer {
  using Plan = BackwardPlan<C>;

 public:
  using Lanes = tile::CopyLanes<Plan::kThreads, Plan::kQueries, Plan::kRowBytes>;
  static_assert(Lanes::kWhole);

  TILEWISE_DEVICE RowPointer(const tilewise_tensor& view, const Sequence& s, const Lanes& lanes,
                             int64_t head, int32_t row, int32_t rows, int64_t columns)
      : from_(static_cast<const char*>(view.data) +
              (s.row_offset(view, row + lanes.row) + head * view.stride_head) * Plan::kBytes +
              lanes.chunk * 16),
        rows_(rows - lanes.row),
        bytes_(static_cast<int32_t>(columns) * Plan::kBytes - lanes.chunk * 16) {
    if constexpr (C::kGeneral) aligned_ = rows_aligned(view, columns, Plan::kBytes);
  }

  // Copies a tile that starts at `row` and goes on to the next one. Rows past the last and columns
  // past the last become 0.
  TILEWISE_DEVICE void copy(ptx::SharedAddress to, const tilewise_tensor& view,
                            const Lanes& lanes, int32_t row) {
#pragma unroll
    for (int pass = 0; pass < Lanes::kPasses; ++pass) {
      const bool in_use = row + pass * Lanes::kRowsPerPass < rows_;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        const int at = column * Lanes::kStride * 16;
        if constexpr (C::kGeneral) {
          if (!aligned_) {
            const int bytes = in_use ? static_cast<int>(clamp(bytes_ - at, 0, 16)) : 0;
            tile::copy_elements<typename C::Element>(
                to + lanes.offset(pass, column),
                reinterpret_cast<const typename C::Element::Storage*>(from_ + at),
                bytes / Plan::kBytes);
            continue;
          }
        }
        tile::copy_chunk<typename C::Arch>(to + lanes.offset(pass, column), from_ + at,
                                           in_use && at < bytes_ ? 16 : 0);
      }
      from_ += view.stride_row * (Lanes::kRowsPerPass * Plan::kBytes);
    }
  }

  TILEWISE_DEVICE void next_head(const tilewise_tensor& view, int32_t rows_walked) {
    from_ += (view.stride_head - view.stride_row * rows_walked) * Plan::kBytes;
  }

 private:
  const char* from_;
  int32_t rows_;   // of the sequence, less the first row of this thread
  int32_t bytes_;  // of a row, from the first chunk of this thread on
  bool aligned_ = true;
};

// Walks the row tiles of the query heads that share a key/value head, always a tile or two ahead
// of the products.
template <class C>
class RowFeed {
  using Plan = BackwardPlan<C>;
  using Lanes = typename RowPointer<C>::Lanes;

 public:
  TILEWISE_DEVICE RowFeed(const BackwardParams& p, const Sequence& s, int64_t first_head,
                          const RowSpan& span, ptx::SharedAddress shared)
      : lanes_(ptx::thread_index()),
        q_(p.problem.q, s, lanes_, first_head, span.begin, span.rows, p.problem.head_dim),
        d_out_(p.gradients.dout, s, lanes_, first_head, span.begin, span.rows,
               p.problem.head_dim_v),
        span_(span),
        shared_(shared),
        row_(span.begin),
        heads_(span.length() > 0 ? static_cast<int32_t>(group_size(p.problem)) : 0) {
    const int thread = ptx::thread_index();
    const float* of = thread < Plan::kQueries / 4 ? p.row_lse : p.row_delta;
    statistics_ = of + first_head * p.rows.count(p.problem) + p.rows.first(p.problem, s.batch) +
                  span.begin + thread % (Plan::kQueries / 4) * 4;
  }

  // Q and the statistics of the next tile; then its dO, which ends the tile.
  TILEWISE_DEVICE void copy_q(const BackwardParams& p, int stage) {
    if (heads_ == 0) return;
    const ptx::SharedAddress to =
        shared_ + static_cast<uint32_t>(Plan::kRows + stage * 2 * Plan::kRowTileBytes);
    q_.copy(to, p.problem.q, lanes_, row_);
    const int thread = ptx::thread_index();
    if (thread < Plan::kQueries / 2) {
      const int at = Plan::kStatistics + stage * Plan::kStatisticsBytes + thread * 16;
      tile::copy_chunk<typename C::Arch>(shared_ + static_cast<uint32_t>(at), statistics_, 16);
    }
  }
  TILEWISE_DEVICE void copy_d_out(const BackwardParams& p, int stage) {
    if (heads_ == 0) return;
    const ptx::SharedAddress to =
        shared_ +
        static_cast<uint32_t>(Plan::kRows + (stage * 2 + 1) * Plan::kRowTileBytes);
    d_out_.copy(to, p.gradients.dout, lanes_, row_);
    row_ += Plan::kQueries;
    statistics_ += Plan::kQueries;
    if (row_ == span_.end) next_head(p);
  }
  TILEWISE_DEVICE void copy(const BackwardParams& p, int stage) {
    copy_q(p, stage);
    copy_d_out(p, stage);
    tile::commit<typename C::Arch>();
  }

 private:
  TILEWISE_DEVICE void next_head(const BackwardParams& p) {
    const int32_t walked = span_.length();
    --heads_;
    row_ -= walked;
    q_.next_head(p.problem.q, walked);
    d_out_.next_head(p.gradients.dout, walked);
    statistics_ += p.rows.count(p.problem) - walked;
  }

  Lanes lanes_;
  RowPointer<C> q_;
  RowPointer<C> d_out_;
  RowSpan span_;
  ptx::SharedAddress shared_;
  const float* statistics_;
  int32_t row_;
  int32_t heads_;  // still to be copied
};

// K or V of the block, once. Keys past the last and columns past the last become 0.
template <class C>
TILEWISE_DEVICE void copy_keys(ptx::SharedAddress to, const tilewise_tensor& view,
                               const KvSource& source, int64_t head, Range keys, int64_t columns) {
  using Plan = BackwardPlan<C>;
  using Lanes = tile::CopyLanes<Plan::kThreads, Plan::kKeys, Plan::kRowBytes>;
  using Storage = typename C::Element::Storage;
  const Lanes lanes(ptx::thread_index());
  const bool aligned = !C::kGeneral || rows_aligned(view, columns, Plan::kBytes);
#pragma unroll 4
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    if (!lanes.has(pass)) break;
    const int64_t key = keys.begin + lanes.row_of(pass);
    const bool in_use = key < keys.end;
    const Storage* row = static_cast<const Storage*>(view.data) + head * view.stride_head +
                         source.offset(view, in_use ? key : keys.begin);
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column) {
      constexpr int kPerChunk = 16 / Plan::kBytes;
      const int at = lanes.chunk_of(column) * kPerChunk;
      const int left = in_use ? static_cast<int>(clamp(columns - at, 0, kPerChunk)) : 0;
      const ptx::SharedAddress chunk = to + lanes.offset(pass, column);
      if (aligned)
        tile::copy_chunk<typename C::Arch>(chunk, left > 0 ? row + at : row, left * Plan::kBytes);
      else
        tile::copy_elements<typename C::Element>(chunk, row + at, left);
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
