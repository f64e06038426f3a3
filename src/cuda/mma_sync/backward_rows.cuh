// Copies tiles of Q, dO and their statistics, and K and V, to shared memory.
#pragma once

#include "cuda/mma_sync/backward_key_tile.cuh"
#include "cuda/mma_sync/backward_mask.cuh"
#include "cuda/mma_sync/row_alignment.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

// Walks all row tiles that the CTA needs, in one query head after the other.
template <class C>
struct RowTile {
  int32_t row;    // first row
  int32_t end;    // end of the rows to walk, a whole number of tiles after the first one
  int32_t index;  // among the padded tiles of all heads

  // Returns whether the next tile is in the next head.
  TILEWISE_DEVICE bool advance(const KeyTile<C>& key_tile) {
    row += BackwardPlan<C>::kQueries;
    ++index;
    if (row != end) return false;
    row = key_tile.begin();
    index += key_tile.skipped_tiles();
    return true;
  }
};

// The position and the mask of the tile in a stage, beside its data.
template <class C>
class TileRecord {
 public:
  TILEWISE_DEVICE TileRecord(ptx::SharedAddress shared, int stage)
      : at_(shared + static_cast<uint32_t>(BackwardPlan<C>::kStatistics +
                                           stage * BackwardPlan<C>::kStatisticsBytes +
                                           2 * BackwardPlan<C>::kQueries * 4)) {}

  TILEWISE_DEVICE void store(const RowTile<C>& tile, bool masked, int32_t head) const {
    const uint32_t x[4] = {static_cast<uint32_t>(tile.row), static_cast<uint32_t>(tile.index),
                           masked ? 1u : 0u, static_cast<uint32_t>(head)};
    ptx::st_shared_v4_b32(at_, x);
  }
  TILEWISE_DEVICE int32_t row() const { return get(kRow); }
  TILEWISE_DEVICE int32_t index() const { return get(kIndex); }
  TILEWISE_DEVICE bool masked() const { return get(kMasked) != 0; }
  TILEWISE_DEVICE int32_t head() const { return get(kHead); }  // in the group

 private:
  enum Word : int { kRow, kIndex, kMasked, kHead };  // the words that `store` writes

  TILEWISE_DEVICE int32_t get(Word word) const {
    return static_cast<int32_t>(ptx::ld_shared_b32(at_ + static_cast<uint32_t>(word * 4)));
  }

  ptx::SharedAddress at_;
};

// The keys that the mask shows to the query of this lane: bit i is key `key` + i of the sequence.
// `row` is the first query of the warp, and `key` its first key.
template <class C>
TILEWISE_DEVICE uint32_t shown_keys(const TileRecord<C>& record, int64_t first_head, int32_t row,
                                    int64_t key) {
  if constexpr (C::kMasked) {
    const int lane = ptx::lane_index();
    if (record.masked() && lane < BackwardPlan<C>::kWarpQueries)
      return masked_rows<C>().shown(first_head + record.head(), row + lane, key);
  }
  return ~0u;
}

// The 16-byte chunks of Q or dO that this thread copies.
template <class C>
class RowPointer {
  using Plan = BackwardPlan<C>;

 public:
  using Lanes = tile::CopyLanes<Plan::kThreads, Plan::kQueries, Plan::kRowBytes>;
  static_assert(Lanes::kWhole);

  TILEWISE_DEVICE RowPointer(const tilewise_tensor& view, const Sequence& s, const Lanes& lanes,
                             int64_t head, int32_t begin, int64_t columns)
      : from_(static_cast<const char*>(view.data) +
              (s.row_offset(view, begin + lanes.row) + head * view.stride_head) * Plan::kBytes +
              lanes.chunk * 16),
        bytes_(static_cast<int32_t>(columns) * Plan::kBytes - lanes.chunk * 16) {
    exists_ = bytes_ > 0;
    if constexpr (C::kGeneral) aligned_ = rows_are_aligned<typename C::Element>(view, columns);
  }

  // Copies a tile and moves on to the next one. `rows` rows from this thread's first row on are
  // valid; rows after these and columns past the last become 0.
  TILEWISE_DEVICE void copy(ptx::SharedAddress to, const tilewise_tensor& view, const Lanes& lanes,
                            int32_t rows) {
#pragma unroll
    for (int pass = 0; pass < Lanes::kPasses; ++pass) {
      const bool in_use = pass * Lanes::kRowsPerPass < rows;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        const int at = column * Lanes::kStride * 16;
        const ptx::SharedAddress chunk = to + lanes.offset(pass, column);
        if (C::kGeneral && !aligned_) {
          const int bytes = in_use ? static_cast<int>(clamp(bytes_ - at, 0, 16)) : 0;
          tile::copy_elements<typename C::Element>(
              chunk, reinterpret_cast<const typename C::Element::Storage*>(from_ + at),
              bytes / Plan::kBytes);
        } else {
          const bool exists = in_use && (kOneColumn ? exists_ : at < bytes_);
          tile::copy_chunk<typename C::Arch>(chunk, from_ + at, exists ? 16 : 0);
        }
      }
      from_ += view.stride_row * (Lanes::kRowsPerPass * Plan::kBytes);
    }
  }

  TILEWISE_DEVICE void move(const tilewise_tensor& view, int32_t heads, int32_t rows) {
    from_ += (heads * view.stride_head + rows * view.stride_row) * Plan::kBytes;
  }
  TILEWISE_DEVICE void next_head(const tilewise_tensor& view, int32_t rows_walked) {
    from_ += (view.stride_head - view.stride_row * rows_walked) * Plan::kBytes;
  }

 private:
  static constexpr bool kOneColumn = Lanes::kColumns == 1;

  const char* from_;
  int32_t bytes_;  // bytes of a row from this thread's first chunk on
  bool exists_;    // whether this thread's first chunk lies in the row
  bool aligned_ = true;
};

enum class RowOperand { q, d_out };

// Copies the row tiles, one or two ahead of the products.
template <class C>
class RowPipeline {
  using Plan = BackwardPlan<C>;
  using Lanes = typename RowPointer<C>::Lanes;

 public:
  TILEWISE_DEVICE RowPipeline(const BackwardParams& p, const Sequence& s, int64_t first_head,
                              const RowTile<C>& tile, ptx::SharedAddress shared)
      : lanes_(ptx::thread_index()),
        q_(p.problem.q, s, lanes_, first_head, tile.row, p.problem.head_dim),
        d_out_(p.gradients.dout, s, lanes_, first_head, tile.row, p.problem.head_dim_v),
        shared_(shared),
        rows_(static_cast<int32_t>(s.band.rows) - lanes_.row),
        tile_(tile) {
    if constexpr (C::kMasked) move_to(p, 0);
  }

  // Copies Q and the statistics of the next tile; copy_d_out then copies its dO and moves on.
  TILEWISE_DEVICE void copy_q(const BackwardParams& p, int stage) {
    if (ptx::thread_index() == 0) {
      const bool masked = C::kMasked ? !masked_rows<C>().is_full(step_)
                                     : !KeyTile<C>(shared_).unmasked_rows().contains(tile_.row);
      TileRecord<C>(shared_, stage).store(tile_, masked, head_);
    }
    q_.copy(stage_at(stage), p.problem.q, lanes_, rows_ - tile_.row);
    const int thread = ptx::thread_index();
    constexpr int kPerStatistic = Plan::kQueries / 4;
    if (thread < 2 * kPerStatistic) {
      const int at = Plan::kStatistics + stage * Plan::kStatisticsBytes + thread * 16;
      const float* from = thread < kPerStatistic ? p.row_lse : p.row_delta;
      tile::copy_chunk<typename C::Arch>(
          shared_ + static_cast<uint32_t>(at),
          from + (int64_t{tile_.index} * Plan::kQueries + thread % kPerStatistic * 4), 16);
    }
  }
  TILEWISE_DEVICE void copy_d_out(const BackwardParams& p, int stage) {
    d_out_.copy(stage_at(stage) + Plan::kRowTileBytes, p.gradients.dout, lanes_, rows_ - tile_.row);
    if constexpr (C::kMasked) {
      tile_.row += Plan::kQueries;
      move_to(p, step_ + 1);
    } else if (tile_.advance(KeyTile<C>(shared_))) {
      if constexpr (C::kGeneral) ++head_;
      q_.next_head(p.problem.q, tile_.end - tile_.row);
      d_out_.next_head(p.gradients.dout, tile_.end - tile_.row);
    }
  }
  // Copies Q or dO, if there is a tile: first the one, then the other.
  TILEWISE_DEVICE void copy(const BackwardParams& p, RowOperand which, int stage, bool exists) {
    if (exists && which == RowOperand::q) copy_q(p, stage);
    if (exists && which == RowOperand::d_out) copy_d_out(p, stage);
    tile::commit<typename C::Arch>();
  }
  // Copies the whole tile, if there is one.
  TILEWISE_DEVICE void copy(const BackwardParams& p, int stage, bool exists) {
    if constexpr (Plan::kColumnWarps > 1) {
      copy(p, RowOperand::q, stage, exists);
      copy(p, RowOperand::d_out, stage, exists);
    } else {
      if (exists) {
        copy_q(p, stage);
        copy_d_out(p, stage);
      }
      tile::commit<typename C::Arch>();
    }
  }

 private:
  // Masked form: moves on to the first visible step from `step` on, if there is one.
  TILEWISE_DEVICE void move_to(const BackwardParams& p, int32_t step) {
    const MaskedRows<C>& rows = masked_rows<C>();
    step = rows.from(step);
    if (!rows.has(step)) return;
    const KeyTile<C> key_tile(shared_);
    const int32_t head = rows.head_of(step);
    const int32_t row = key_tile.begin() + (step - head * rows.tiles_per_head()) * Plan::kQueries;
    q_.move(p.problem.q, head - head_, row - tile_.row);
    d_out_.move(p.gradients.dout, head - head_, row - tile_.row);
    tile_.row = row;
    tile_.index += step - step_ + (head - head_) * key_tile.skipped_tiles();
    head_ = head;
    step_ = step;
  }

  TILEWISE_DEVICE ptx::SharedAddress stage_at(int stage) const {
    return shared_ + static_cast<uint32_t>(Plan::row_tiles(stage));
  }

  Lanes lanes_;
  RowPointer<C> q_;
  RowPointer<C> d_out_;
  ptx::SharedAddress shared_;
  int32_t rows_;  // rows of the sequence minus this thread's first row in a tile
  RowTile<C> tile_;
  int32_t head_ = 0;
  int32_t step_ = 0;  // masked form
};

// Copies K or V of the CTA, once. Keys and columns past the last become 0.
template <class C>
TILEWISE_DEVICE void copy_keys(ptx::SharedAddress to, const tilewise_tensor& view,
                               const KvSource& source, int64_t head, Range keys, int64_t columns) {
  using Plan = BackwardPlan<C>;
  using Lanes = tile::CopyLanes<Plan::kThreads, Plan::kKeys, Plan::kRowBytes>;
  using Storage = typename C::Element::Storage;
  const Lanes lanes(ptx::thread_index());
  const bool aligned = !C::kGeneral || rows_are_aligned<typename C::Element>(view, columns);
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
