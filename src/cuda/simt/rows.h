// Tables in shared memory of the rows and keys of a tile: where each one lies in its tensor, which
// keys it sees, and its score modifications. Offsets are per row and key, so strides, pages, packed
// heads and lengths may be anything.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/score_mod.h"
#include "cuda/common/tile_mask.h"
#include "cuda/params.h"
#include "cuda/simt/tile.h"

namespace tilewise::cuda::simt {

// Packed rows of the query heads from `head0` on, at most kTile of them.
struct RowTile {
  Packing packing;
  int64_t head0;
  Range packed;

  TILEWISE_DEVICE Range rows() const { return packing.rows(packed); }
  TILEWISE_DEVICE Range heads() const { return {head0, head0 + packing.group}; }
  TILEWISE_DEVICE bool full() const { return packed.size() == kTile; }
};

struct Shared {
  // Values that all threads share are kept here instead of in registers.
  Sequence sequence;
  ScoreMod score_mod;
  RowTile tile;
  Range keys;  // upper bound of the keys that the rows of the tile see
  int64_t kv_head;
  int32_t splits;  // forward: number of splits of the sequence
  // backward_keys: the keys and the key/value head of the work tile, and the kTile keys that are
  // being computed.
  Range tile_keys;
  Range current_keys;
  int64_t tile_head;

  common::TileMask mask;

  // The search for flagged tiles (recompute_tiles.h): the result of each warp, and the tile found.
  uint32_t first_flagged[kThreads / ptx::kWarpSize];
  int32_t flagged;

  alignas(16) float stage[kTile * kRowStride];    // operands of a product
  alignas(16) float weights[kTile * kRowStride];  // P or dS

  // Rows. A row that is not in use has the offset kUnused and sees no key.
  int64_t q[kTile];          // offset in q and dq
  int64_t out[kTile];        // offset in out (forward) or dout (backward)
  int64_t first_key[kTile];  // it sees the keys [first_key, end_key)
  int64_t end_key[kTile];
  int64_t row[kTile];
  int32_t head[kTile];
  RowScoreMod row_score_mod[kTile];
  float max_logit[kTile];  // forward: written and read by the threads of column 0 alone
  // Not in the forward: lse, the remainder that its rounding to fp32 left, and delta (backward).
  float lse[kTile];
  float lse_low[kTile];
  float delta[kTile];

  // Keys: offsets in k and v, kUnused past the last key.
  int64_t k[kTile];
  int64_t v[kTile];
};

template <class Config>
inline constexpr int32_t kSharedBytes = sizeof(Shared);
static_assert(sizeof(Shared) <= 48 * 1024, "more needs an opt-in that Pascal does not have");

TILEWISE_DEVICE Shared& shared() { return *reinterpret_cast<Shared*>(ptx::shared_memory()); }

static_assert(common::TileMask::kTile == kTile && common::TileMask::kWindow == kThreads);

// Must precede every other use of shared memory for a tile.
template <class Params>
TILEWISE_DEVICE void load_sequence(const Params& params, int64_t sequence) {
  if (ptx::thread_index() == 0) {
    shared().sequence = tilewise::sequence_of(params.problem, sequence);
    shared().score_mod = ScoreMod::of(params.problem);
    shared().mask.begin(params.mask, sequence);
  }
  ptx::sync_block();
}

// Fills in the table of rows. `view` is out or dout; rows see no keys outside `keys`. The caller
// provides the barriers before and after.
TILEWISE_DEVICE void load_row_table(const Problem& p, const RowTile& tile,
                                    const tilewise_tensor& view, Range keys) {
  const int t = ptx::thread_index();
  Shared& to = shared();
  if (t == kTile) {
    to.tile = tile;
    to.keys = keys;
    to.kv_head = tile.head0 / group_size(p);
  }
  if (t >= kTile) return;
  const int64_t packed = tile.packed.begin + t;
  if (packed >= tile.packed.end) {
    to.q[t] = to.out[t] = kUnused;
    to.first_key[t] = to.end_key[t] = to.row[t] = 0;
    to.head[t] = 0;
    to.row_score_mod[t] = {};
    return;
  }
  const Sequence& s = to.sequence;
  const int64_t row = tile.packing.row(packed);
  const int64_t head = tile.head0 + tile.packing.head(packed);
  const Range seen = intersect(s.band.keys_of(row), keys);
  to.q[t] = s.row_offset(p.q, row) + head * p.q.stride_head;
  to.out[t] = s.row_offset(view, row) + head * view.stride_head;
  to.first_key[t] = seen.begin;
  to.end_key[t] = seen.end;
  to.row[t] = row;
  to.head[t] = static_cast<int32_t>(head);
  to.row_score_mod[t] = ScoreMod::row(p, s, row, head);
}

// Adds lse to the table of rows, in the threads that filled it in.
TILEWISE_DEVICE void load_lse(const Problem& p) {
  const int t = ptx::thread_index();
  if (t >= kTile || shared().q[t] == kUnused) return;
  const int64_t at = shared().sequence.lse_offset(p.lse_stride_batch, shared().row[t]) +
                     shared().head[t] * p.lse_stride_head;
  shared().lse[t] = exponent_base(p.lse[at]);
  shared().lse_low[t] = p.lse_low != nullptr ? p.lse_low[at] : 0.0f;
}

// The weight of a score of row r of the tile.
TILEWISE_DEVICE float weight_of(float score, int r) {
  const float exponent = (score - shared().lse[r]) - shared().lse_low[r];
  // lse is rounded, so a weight could exceed 1 by that rounding: clamp it.
  return ptx::exp2_accurate(exponent > 0.0f ? 0.0f : exponent * kLog2e);
}

// Fills in the table of the keys [first, first + kTile) of one head. The caller provides barriers.
TILEWISE_DEVICE void load_key_table(const Problem& p, int64_t first) {
  const int t = ptx::thread_index() - kTile;  // the first kTile threads fill in the row table
  if (t < 0 || t >= 2 * kTile) return;
  const int64_t key = first + t % kTile;
  const tilewise_tensor& view = t < kTile ? p.k : p.v;
  int64_t* const to = t < kTile ? shared().k : shared().v;
  const Sequence& s = shared().sequence;
  to[t % kTile] =
      key < s.band.keys ? s.kv.offset(view, key) + shared().kv_head * view.stride_head : kUnused;
}

// Starts the walk of the rows of a tile over the tiles of kTile keys that touch `keys`. Barriers
// must precede and follow the call.
TILEWISE_DEVICE void begin_key_walk(const RowTile& tile, Range keys) {
  common::TileMask& mask = shared().mask;
  if (ptx::warp_index() != kThreads / ptx::kWarpSize - 1) return;  // the others fill in tables
  if (mask.on()) mask.list(tile.rows(), keys);
  if (ptx::lane_index() == 0) mask.begin_walk(Tiling{keys.end, kTile}.touching(keys));
}

// The first key tile of the walk from `tile` on.
TILEWISE_DEVICE int64_t next_key_tile(int64_t tile) {
  return shared().mask.next(tile, [](int64_t at) {
    const RowTile& rows = shared().tile;
    const Range keys = Tiling{shared().sequence.band.keys, kTile}.at(at);
    return shared().mask.coverage_of(rows.heads(), rows.rows(), keys);
  });
}

// Reads the bits of the mask for the rows in the table and kTile keys; tile `walked` of the walk.
// The caller provides barriers.
TILEWISE_DEVICE void load_mask_bits(int64_t walked, int64_t first_key) {
  Shared& from = shared();
  from.mask.load_bits(
      from.mask.window.of(walked, 0), first_key, [&](int r) { return from.row[r]; },
      [&](int r) { return from.head[r]; });
}

// Visibility inside a thread's 4x4 block: bit 4 i + j says whether row i sees key j.
struct Visible {
  uint32_t bits;

  TILEWISE_DEVICE static Visible of(const ThreadPosition& thread, int64_t first_key) {
    const Shared& from = shared();
    const int64_t block_key = first_key + thread.x * 4;
    Visible v = {0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread.y * 4 + i;
      const auto begin = static_cast<uint32_t>(clamp(from.first_key[r] - block_key, 0, 4));
      const auto end = static_cast<uint32_t>(clamp(from.end_key[r] - block_key, 0, 4));
      const uint32_t of_band = ((1u << end) - 1) & ~((1u << begin) - 1);
      v.bits |= (of_band & from.mask.four_keys(r, thread.x)) << (4 * i);
    }
    return v;
  }
  TILEWISE_DEVICE bool sees(int i, int j) const { return sees(4 * i + j); }
  TILEWISE_DEVICE bool sees(int element) const { return (bits >> element & 1u) != 0; }
};

// A thread's own 4x4 block of the weights in shared memory, stored as [key][row] (kKeysFirst) or as
// [row][key].
template <bool kKeysFirst>
struct ThreadWeights {
  float* data;

  TILEWISE_DEVICE static ThreadWeights of(const ThreadPosition& thread) {
    return of(thread, shared().weights);
  }
  TILEWISE_DEVICE static ThreadWeights of(const ThreadPosition& thread, float* tile) {
    const int row = thread.y * 4;
    const int key = thread.x * 4;
    return {tile + (kKeysFirst ? key * kRowStride + row : row * kRowStride + key)};
  }
  TILEWISE_DEVICE float& at(int i, int j) const {
    return data[kKeysFirst ? j * kRowStride + i : i * kRowStride + j];
  }
  TILEWISE_DEVICE void store(const Block& from) const {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      *reinterpret_cast<Float4*>(data + a * kRowStride) =
          kKeysFirst ? Float4{{from[0][a], from[1][a], from[2][a], from[3][a]}}
                     : Float4{{from[a][0], from[a][1], from[a][2], from[a][3]}};
    }
  }
  TILEWISE_DEVICE void load(Block& to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = at(i, j);
    }
  }

  // Replaces each weight whose row sees its key by change(weight, row of the tile, key). The loop
  // is not unrolled: the code of the general form is long, and a kernel should contain it only
  // once.
  template <class Change>
  TILEWISE_DEVICE void change_visible(const ThreadPosition& thread, int64_t first_key,
                                      const Change& change) const {
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll 1
    for (int element = 0; element < 16; ++element) {
      if (!visible.sees(element)) continue;
      const int r = thread.y * 4 + element / 4;
      const int64_t key = first_key + thread.x * 4 + element % 4;
      float& weight = at(element / 4, element % 4);
      weight = change(weight, r, key);
    }
  }

  // Multiplies by the dropout factors. A thread's four keys lie in one block of dropout bits.
  TILEWISE_DEVICE void apply_dropout(const ThreadPosition& thread, int64_t first_key) const {
    const int64_t key = first_key + thread.x * 4;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      KeepFactors keep = shared().score_mod.keep(shared().row_score_mod[thread.y * 4 + i], key);
      keep.kept >>= key % Dropout::kKeysPerBlock;
#pragma unroll
      for (int j = 0; j < 4; ++j) at(i, j) *= keep.at(j);
    }
  }
};

// One step of a walk: the rows of the tile and kTile keys.
struct Step {
  int64_t first_key;  // a multiple of kTile
  // Some pairs of row and key may be hidden, by the band, the mask, the lengths or a bias of -inf.
  // Always true for the general form. Needs the bits of the mask for this step.
  bool masked;

  TILEWISE_DEVICE static Step of(const Problem& p, int64_t first_key) {
    const RowTile& tile = shared().tile;
    const Range keys = shared().keys;
    const Range all = {first_key, first_key + kTile};
    const bool whole = tile.full() && keys.begin <= all.begin && all.end <= keys.end;
    return {first_key, !whole || is_general(p) || shared().mask.partial ||
                           !shared().sequence.band.covers(tile.rows(), all)};
  }
};

}  // namespace tilewise::cuda::simt
