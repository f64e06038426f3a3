// The K/V pipeline of prefill, and of decoding without TMA. All threads of the CTA copy K and V
// with cp.async and meet at a barrier before each product.
//
// Stages hold, in this order, K and V of the last key tile, K and V of the one before, ... Copies
// run kStages - 1 stages ahead of the products and are issued between their instructions.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_mask.h"
#include "cuda/mma_sync/forward_pages.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/mma_sync/row_alignment.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

// Copies 16 bytes, number `chunk` of a row with `columns` columns, to shared memory; columns past
// the last become 0. A null `row` stands for a row of zeros. In the fast path the row is aligned.
template <class C, class Element>
TILEWISE_DEVICE void copy_row_chunk(ptx::SharedAddress to, const char* row, int chunk, int columns,
                                    bool aligned) {
  constexpr int kPerChunk = 16 / Element::kBytes;
  const int begin = row != nullptr ? chunk * kPerChunk : columns;
  if (!C::kGeneral || aligned) {
    tile::copy_chunk<typename C::Arch>(to, row + chunk * 16, begin < columns ? 16 : 0);
  } else {
    const auto* from = reinterpret_cast<const typename Element::Storage*>(row) + begin;
    tile::copy_elements<Element>(to, from, max(0, min(kPerChunk, columns - begin)));
  }
}

// Copies rows, `stride` bytes apart from `row` on. The first `left` rows, counted from the thread's
// own, exist; the others become 0. `row` points to the thread's 16 bytes, and `exists` tells which
// of its columns exist.
template <class C, class Lanes>
TILEWISE_DEVICE void copy_rows(ptx::SharedAddress to, const Lanes& lanes, const char* row,
                               int64_t stride, int32_t left,
                               const bool (&exists)[Lanes::kColumns]) {
#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    if (!lanes.has(pass)) continue;
    const bool in = Lanes::rows_to(pass) < left;
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column) {
      tile::copy_chunk<typename C::Arch>(to + lanes.offset(pass, column),
                                         row + column * Lanes::kStride * 16,
                                         in && exists[column] ? 16 : 0);
    }
    if (pass + 1 < Lanes::kPasses)
      row += (Lanes::rows_to(pass + 1) - Lanes::rows_to(pass)) * stride;
  }
}

// Copies the tiles of K or V, from the last to the first.
template <class C, class Lanes>
class KvTileCopy {
 public:
  using Element = typename C::KvElement;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kParts = Lanes::kPasses < 2 ? 1 : 2;
  static constexpr int kPartPasses = (Lanes::kPasses + kParts - 1) / kParts;

  TILEWISE_DEVICE KvTileCopy(const ForwardParams& p, const tilewise_tensor& view, int64_t columns,
                             const QueryTile& q_tile)
      : view_(view),
        lanes_(ptx::thread_index()),
        columns_(static_cast<int>(columns)),
        keys_(q_tile.tiles.keys),
        first_(ptx::uniform(q_tile.tiles.first)) {
    if constexpr (C::kMasked) next_tile_ = ptx::uniform(q_tile.tiles.last);
    const KvSource& kv = q_tile.sequence.kv;
    const int64_t head = p.group.quotient(q_tile.rows.first_head);
    base_ = static_cast<const char*>(view.data) + head * view.stride_head * Element::kBytes;
    if constexpr (C::kGeneral) {
      kv_ = kv;
      aligned_ = rows_are_aligned<Element>(view, columns);
    } else {
      // Not paged, so `kv.offset` is avoided: it would need two divisions.
      next_ = base_ + kv.batch_index * view.stride_batch * Element::kBytes +
              row_bytes(kv.first + q_tile.tiles.last * kKeys + lanes_.row) + lanes_.chunk * 16;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        exists_[column] = lanes_.chunk_of(column) * (16 / Element::kBytes) < columns_;
      }
    }
  }

  // Before the loop: copies the whole next tile, which is `tile`. The last tile may be cut short by
  // the number of keys.
  TILEWISE_DEVICE void copy_whole(ptx::SharedAddress stage, int32_t tile) {
    if constexpr (C::kMasked) {
      copy_checked(stage, next_tile_, 0, Lanes::kPasses);
      next_tile_ = masked_tiles<C>().before(next_tile_);
    } else if constexpr (C::kGeneral) {
      copy_checked(stage, tile, 0, Lanes::kPasses);
    } else {
      const int32_t left = tile < first_ ? 0 : keys_ - tile * kKeys - lanes_.row;
      copy_rows<C>(stage, lanes_, next_, row_bytes(1), left, exists_);
      next_ -= row_bytes(kKeys);
    }
  }

  // In the loop: copies part `part` of the next tile, or zeros where there is no such tile. With a
  // mask the next tile is not always `tile`, which then only counts.
  TILEWISE_DEVICE void copy(ptx::SharedAddress stage, int32_t tile, int part) {
    const int begin = part * kPartPasses;
    const int end = min(Lanes::kPasses, begin + kPartPasses);
    if constexpr (C::kGeneral) {
      if constexpr (C::kMasked) tile = next_tile_;
      if (tile >= first_) copy_checked(stage, tile, begin, end);
      if (C::kMasked && part == kParts - 1) next_tile_ = masked_tiles<C>().before(next_tile_);
      return;
    }
#pragma unroll
    for (int pass = begin; pass < end; ++pass) {
      if (!lanes_.has(pass)) continue;
      const char* row = next_ + row_bytes(Lanes::rows_to(pass));
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        tile::copy_chunk<typename C::Arch>(stage + lanes_.offset(pass, column),
                                           row + column * Lanes::kStride * 16,
                                           exists_[column] && tile >= first_ ? 16 : 0);
      }
    }
    if (part == kParts - 1) next_ -= row_bytes(kKeys);
  }

 private:
  TILEWISE_DEVICE int64_t row_bytes(int64_t rows) const {
    return rows * view_.stride_row * Element::kBytes;
  }

  // Rows that a warp copies in a pass, when they follow each other; otherwise 0. Each lane looks up
  // the page of one row of the next passes, so that no row is looked up by several lanes.
  static constexpr int kWarpRows = [] {
    if constexpr (requires { Lanes::kRowsPerPass; })
      return max(1, ptx::kWarpSize / Lanes::kStride);
    else
      return 0;
  }();
  static constexpr int kPassesLookedUp = kWarpRows > 0 ? ptx::kWarpSize / kWarpRows : 1;

  TILEWISE_DEVICE bool is_there(int32_t tile, int32_t key) const {
    return tile >= first_ && key < keys_;
  }

  // Offset of the row that this lane looks up: row `lane % kWarpRows` of the warp in pass `pass +
  // lane / kWarpRows`. All lanes call it.
  TILEWISE_DEVICE int64_t look_up(int32_t tile, int pass) const {
    const int lane = ptx::lane_index();
    const int row = lanes_.row - lane / Lanes::kStride + lane % kWarpRows +
                    (pass + lane / kWarpRows) * Lanes::kRowsPerPass;
    const int32_t key = tile * kKeys + row;
    return row < kKeys && is_there(tile, key) ? kv_.offset(view_, key) : 0;
  }

  TILEWISE_DEVICE void copy_checked(ptx::SharedAddress stage, int32_t tile, int begin,
                                    int end) const {
    int64_t found = 0;
#pragma unroll 1  // so that the divisions of a page look-up are in the code only once
    for (int pass = begin; pass < end; ++pass) {
      const int32_t key = tile * kKeys + lanes_.row_of(pass);
      int64_t offset = 0;
      if constexpr (kWarpRows > 0) {
        const int passes_since_look_up = (pass - begin) % kPassesLookedUp;
        if (passes_since_look_up == 0) found = look_up(tile, pass);
        offset = ptx::shuffle(
            found, passes_since_look_up * kWarpRows + ptx::lane_index() / Lanes::kStride);
      } else if (is_there(tile, key)) {
        offset = kv_.offset(view_, key);
      }
      if (!lanes_.has(pass)) continue;
      const char* row = is_there(tile, key) ? base_ + offset * Element::kBytes : nullptr;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        copy_row_chunk<C, Element>(stage + lanes_.offset(pass, column), row,
                                   lanes_.chunk_of(column), columns_, aligned_);
      }
    }
  }

  const tilewise_tensor& view_;
  Lanes lanes_;
  int columns_;
  int32_t keys_;
  int32_t first_;                 // the first tile to load
  int32_t next_tile_ = 0;         // masked form: the next tile to load
  bool exists_[Lanes::kColumns];  // fast path: whether this thread's columns exist
  const char* base_;              // start of the head
  const char* next_ = nullptr;    // fast path: this thread's 16 bytes in the next tile
  KvSource kv_;                   // general form
  bool aligned_ = true;
};

struct NoPages {
  TILEWISE_DEVICE NoPages(const ForwardParams&, const QueryTile&, int32_t) {}
};

template <class C>
class KvPipeline {
 public:
  // In the paged form one warp copies a row, because its lanes exchange the places of rows.
  using Lanes =
      tile::CopyLanes<C::kForward.threads(), C::kForward.keys, C::kHeadDim * C::KvElement::kBytes,
                      C::kPaged ? ptx::kWarpSize : C::kForward.threads()>;
  using TileCopy = std::conditional_t<C::kPaged, PagedTileCopy<C, Lanes>, KvTileCopy<C, Lanes>>;
  using Rows = std::conditional_t<C::kPaged, PageRows<C, Lanes>, NoPages>;
  using Arch = typename C::Arch;
  static constexpr int kStages = C::kForward.stages;
  static constexpr int kStageBytes = mma_sync::kStageBytes<C>;
  static constexpr bool kPrefetchesPages = C::kPaged && C::kDecodes && Arch::kAsyncCopy;
  static constexpr int kLastStageAt = (kStages - 1) * kStageBytes;
  static constexpr int kPrefetchAt = kStages * kStageBytes;
  static constexpr int kPrefetchSectors = 4;  // per lane: the entries of at least 1024 keys
  static constexpr int kBytes =
      kPrefetchAt + (kPrefetchesPages ? kPrefetchBytes<kPrefetchSectors> : 0);
  // While the scores of a tile are computed, K (odd kStages) or V (even kStages) of a later tile is
  // loaded, and the other one while its values are summed.
  static constexpr bool kKeysFirst = kStages % 2 == 1;
  static constexpr int kKeysAhead = kStages / 2;
  static constexpr int kValuesAhead = (kStages - 1) / 2;
  static constexpr int kParts = TileCopy::kParts;
  using KeyLanes = tile::LaneOffsets<Lanes::kRowBytes, tile::Lanes::chunks_first>;
  using ValueLanes = std::conditional_t<
      C::kFloat8,
      tile::Float8B<C::kConverts, tile::LaneOffsets<Lanes::kRowBytes, tile::Lanes::rows_first>>,
      tile::TransposedB<typename C::Element, Lanes::kRowBytes>>;

  TILEWISE_DEVICE static void prepare(const ForwardParams&, ptx::SharedAddress) {}

  // See WarpPipeline::prefetch.
  TILEWISE_DEVICE static void prefetch(const Problem& p, int32_t sequence,
                                       ptx::SharedAddress base) {
    if constexpr (kPrefetchesPages)
      prefetch_pages<kPrefetchSectors>(p, sequence, base + kPrefetchAt);
  }

  TILEWISE_DEVICE KvPipeline(const ForwardParams& p, const QueryTile& q_tile, int32_t last,
                             ptx::SharedAddress base)
      : q_tile_(q_tile),
        rows_(p, q_tile, last),
        k_(p, p.problem.k, p.problem.head_dim, q_tile),
        v_(p, p.problem.v, p.problem.head_dim_v, q_tile),
        base_(base),
        read_(base),
        last_(last) {}

  // Loads the first kStages - 1 stages and the queries. The queries arrive with the first keys, and
  // are loaded before them where the pages of the keys are still being looked up.
  template <class Queries>
  TILEWISE_DEVICE void start(Queries&& load_queries) {
    constexpr bool kQueriesFirst = C::kPaged && !kPrefetchesPages;
    // With two stages the last values are loaded here as well, since they may be cut short.
    constexpr int kFills = max(2, kStages - 1);
    if (kQueriesFirst) load_queries();
#pragma unroll
    for (int i = 0; i < kFills; ++i) {
      const bool keys = i % 2 == 0;
      const int32_t tile = last_ - i / 2;
      TileCopy& tiles = keys ? k_ : v_;
      const ptx::SharedAddress stage = base_ + i * kStageBytes;
      if constexpr (C::kPaged) {
        if (keys) rows_.advance(q_tile_, tile, k_, v_);
        const bool wanted = rows_.has_tile(tile);
        tiles.copy_whole(stage, wanted ? q_tile_.tiles.keys - tile * C::kForward.keys : 0);
      } else {
        tiles.copy_whole(stage, tile);
      }
      if (i == 0 && !kQueriesFirst) load_queries();
      tile::commit<Arch>();
    }
  }

  // Waits for the queries and the first keys. Called before the first `consumer_wait`.
  TILEWISE_DEVICE void wait_for_queries() const { consumer_wait(); }

  // Waits until the stage to be read is full and no thread reads the stage to be written any more.
  TILEWISE_DEVICE void consumer_wait() const {
    tile::wait<Arch, kStages - 2>();
    ptx::sync_block();
  }
  TILEWISE_DEVICE ptx::SharedAddress keys() const { return read_; }
  TILEWISE_DEVICE ptx::SharedAddress values() const { return read_; }
  // Nothing to do: rows past the last key are copied as 0.
  TILEWISE_DEVICE void zero_values_past_end(const QueryTile&, int32_t) const {}
  // The stage that has been read is the next one to be written.
  TILEWISE_DEVICE void consumer_release(bool, int32_t) { read_ = after(read_); }

  // See WarpPipeline::pages_fit. All threads of the CTA call it.
  TILEWISE_DEVICE bool pages_fit(const QueryTile& q_tile) const {
    constexpr int kPagesBarrier = 1;
    return !ptx::bar_any(kPagesBarrier, C::kForward.threads(), !rows_.fit(q_tile));
  }

  // Copies part `part` of the stage that is loaded while the scores (`scores`) or the values of
  // `tile` are computed.
  TILEWISE_DEVICE void load_ahead(bool scores, int32_t tile, int part) {
    const bool keys = scores == kKeysFirst;
    const int32_t wanted = tile - (keys ? kKeysAhead : kValuesAhead);
    TileCopy& tiles = keys ? k_ : v_;
    if (kStages > 2 || keys || wanted != last_) {
      if constexpr (C::kPaged) {
        if (keys && part == 0) rows_.advance(saved_q_tile<C>(), wanted, k_, v_);
        tiles.copy(before(read_), rows_.has_tile(wanted), part);
      } else {
        tiles.copy(before(read_), wanted, part);
      }
    }
    if (part == kParts - 1) tile::commit<Arch>();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress after(ptx::SharedAddress stage) const {
    return stage == base_ + kLastStageAt ? base_ : stage + kStageBytes;
  }
  TILEWISE_DEVICE ptx::SharedAddress before(ptx::SharedAddress stage) const {
    return stage == base_ ? base_ + kLastStageAt : stage - kStageBytes;
  }
  const QueryTile& q_tile_;  // read before the loop only; the loop reads `saved_q_tile`
  Rows rows_;
  TileCopy k_;
  TileCopy v_;
  ptx::SharedAddress base_;
  ptx::SharedAddress read_;
  int32_t last_;
};

}  // namespace tilewise::cuda::mma_sync
