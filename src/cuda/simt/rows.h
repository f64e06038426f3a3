// The rows and keys of a tile, in shared memory: where they are, what they see, and what their
// scores take from the problem. Element by element, so that nothing is asked of strides, pages,
// packed heads or lengths.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/score_mod.h"
#include "cuda/params.h"
#include "cuda/simt/tile.h"

namespace tilewise::cuda::simt {

// Packed rows of the query heads from `head0` on, at most kTile of them.
struct RowTile {
  Packing packing;
  int64_t head0;
  Range packed;

  TILEWISE_DEVICE Range rows() const { return packing.rows(packed); }
  TILEWISE_DEVICE bool full() const { return packed.size() == kTile; }
};

struct Shared {
  // The same for all threads: here it costs no registers.
  Sequence sequence;
  ScoreMod score_mod;
  RowTile tile;
  Range keys;  // that the rows of the tile may see at most
  int64_t kv_head;
  int32_t splits;  // forward: of the keys of the sequence
  // Of the kernel of the keys: those of the tile, those of them that are being computed, the head.
  Range tile_keys;
  Range own_keys;
  int64_t own_head;

  // The search for flags (recompute_tiles.h): what each warp has found, and the tile it led to.
  uint32_t first_flagged[kThreads / ptx::kWarpSize];
  int32_t flagged;

  alignas(16) float stage[kTile * kPitch];    // operands on their way into a product
  alignas(16) float weights[kTile * kPitch];  // P or dS

  // Rows. Not in use: offsets kUnused, sees nothing.
  int64_t q[kTile];    // offsets of the row in q and dq,
  int64_t out[kTile];  // in out (forward) or dout (backward), and
  int64_t first_key[kTile];
  int64_t end_key[kTile];
  int64_t row[kTile];
  int32_t head[kTile];
  RowScoreMod row_score_mod[kTile];
  // Backward: lse in two parts, and delta.
  float lse[kTile];
  float lse_low[kTile];
  float delta[kTile];

  // Keys: offsets in k and v, kUnused past the last one.
  int64_t k[kTile];
  int64_t v[kTile];
};

template <class Config>
inline constexpr int32_t kSharedBytes = sizeof(Shared);
static_assert(sizeof(Shared) <= 48 * 1024, "more needs an opt-in that Pascal does not have");

TILEWISE_DEVICE Shared& shared() { return *reinterpret_cast<Shared*>(ptx::shared_memory()); }

// The first thing a block does with shared memory.
TILEWISE_DEVICE void load_sequence(const Problem& p, int64_t sequence) {
  if (ptx::thread_index() == 0) {
    shared().sequence = sequence_of(p, sequence);
    shared().score_mod = ScoreMod::of(p);
  }
  ptx::sync_block();
}

// Fills in the rows; `view` is out or dout, `keys` the keys they may see at most. Barriers around
// it are the caller's.
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

// Keys [first, first + kTile) of one head, as far as they are in use.
TILEWISE_DEVICE void load_key_table(const Problem& p, int64_t first) {
  const int t = ptx::thread_index() - kTile;  // beside the threads of the rows
  if (t < 0 || t >= 2 * kTile) return;
  const int64_t key = first + t % kTile;
  const tilewise_tensor& view = t < kTile ? p.k : p.v;
  int64_t* const to = t < kTile ? shared().k : shared().v;
  const Sequence& s = shared().sequence;
  to[t % kTile] =
      key < s.band.keys ? s.kv.offset(view, key) + shared().kv_head * view.stride_head : kUnused;
}

// Which of its four keys 4 x + j each of a thread's rows sees.
struct Visible {
  int32_t begin[4];
  int32_t end[4];

  TILEWISE_DEVICE static Visible of(const ThreadPosition& thread, int64_t first_key) {
    const Shared& from = shared();
    const int64_t own = first_key + thread.x * 4;
    Visible v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread.y * 4 + i;
      v.begin[i] = static_cast<int32_t>(clamp(from.first_key[r] - own, 0, 4));
      v.end[i] = static_cast<int32_t>(clamp(from.end_key[r] - own, 0, 4));
    }
    return v;
  }
  TILEWISE_DEVICE bool sees(int i, int j) const { return j >= begin[i] && j < end[i]; }
};

// A thread's own 4x4 block of the weights, as [key][row] (kKeysFirst) or as [row][key].
template <bool kKeysFirst>
struct OwnWeights {
  float* data;

  TILEWISE_DEVICE static OwnWeights of(const ThreadPosition& thread) {
    return of(thread, shared().weights);
  }
  TILEWISE_DEVICE static OwnWeights of(const ThreadPosition& thread, float* tile) {
    const int row = thread.y * 4;
    const int key = thread.x * 4;
    return {tile + (kKeysFirst ? key * kPitch + row : row * kPitch + key)};
  }
  TILEWISE_DEVICE float& at(int i, int j) const {
    return data[kKeysFirst ? j * kPitch + i : i * kPitch + j];
  }
  TILEWISE_DEVICE void store(const Block& from) const {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      *reinterpret_cast<Four*>(data + a * kPitch) =
          kKeysFirst ? Four{{from[0][a], from[1][a], from[2][a], from[3][a]}}
                     : Four{{from[a][0], from[a][1], from[a][2], from[a][3]}};
    }
  }
  TILEWISE_DEVICE void load(Block& to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = at(i, j);
    }
  }

  // Each weight becomes change(weight, row of the tile, key) where the row sees the key. One after
  // another: what the general form computes is long, and is to be in a kernel once.
  template <class Change>
  TILEWISE_DEVICE void change_visible(const ThreadPosition& thread, int64_t first_key,
                                      const Change& change) const {
#pragma unroll 1
    for (int element = 0; element < 16; ++element) {
      const int r = thread.y * 4 + element / 4;
      const int64_t key = first_key + thread.x * 4 + element % 4;
      if (key < shared().first_key[r] || key >= shared().end_key[r]) continue;
      float& weight = at(element / 4, element % 4);
      weight = change(weight, r, key);
    }
  }

  // Times the dropout factors: a thread's four keys are of one block of bits.
  TILEWISE_DEVICE void drop(const ThreadPosition& thread, int64_t first_key) const {
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

// kTile keys and the rows that meet them.
struct Step {
  int64_t first_key;  // a multiple of kTile
  bool exact;         // some pair is masked, by the band, the lengths or a bias of -inf

  TILEWISE_DEVICE static Step of(const Problem& p, int64_t first_key) {
    const RowTile& tile = shared().tile;
    const Range keys = shared().keys;
    const Range all = {first_key, first_key + kTile};
    const bool whole = tile.full() && keys.begin <= all.begin && all.end <= keys.end;
    return {first_key, !whole || is_general(p) || !shared().sequence.band.covers(tile.rows(), all)};
  }
};

}  // namespace tilewise::cuda::simt
