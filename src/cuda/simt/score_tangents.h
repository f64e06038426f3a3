// The tangents of the scores of a tile, which the passes jvp and second compute alike. With x =
// q.k, x' = q'.k + q.k' and the softcap f:
//
//   z' = scale x' + scale' x        s' = f'(scale x) z' + bias'
#pragma once

#include "cuda/simt/rows.h"

namespace tilewise::cuda::simt {

// Shared memory of a pass with tangents. Shared has the offsets in the tensors themselves; these
// are the offsets in their tangents.
struct SharedTangents : Shared {
  int64_t q_tangent[kTile];
  int64_t k_tangent[kTile];
  int64_t v_tangent[kTile];
  int64_t bias_tangent[kTile];  // index of the tangent of the bias of key 0
};
static_assert(sizeof(SharedTangents) <= 48 * 1024, "more needs an opt-in that Pascal lacks");

inline constexpr int32_t kSharedBytesOfTangents = sizeof(SharedTangents);

TILEWISE_DEVICE SharedTangents& shared_tangents() { return static_cast<SharedTangents&>(shared()); }

// An operand of a product and its tangent. An absent tangent has no data.
template <class T>
struct Operand {
  Rows<T> value;
  Rows<T> tangent;
};

// X = A B^T, and its tangent A' B^T + A B'^T, which is 0 if both tangents are absent.
template <class T>
TILEWISE_DEVICE void products_with_tangent(Block& x, Block& x_tangent, const Operand<T>& a,
                                           const Operand<T>& b) {
  float* const stage = shared().stage;
  row_products(x, stage, a.value, b.value);
  clear(x_tangent);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Rows<T> rows = i == 0 ? a.tangent : a.value;
    const Rows<T> keys = i == 0 ? b.value : b.tangent;
    if (rows.data != nullptr && keys.data != nullptr)
      add_row_products(x_tangent, stage, rows, keys);
  }
}

// T is the element type of q, k and v; kKeysFirst is that of ThreadWeights.
template <class T, bool kKeysFirst>
struct ScoreTangents {
  using Weights = ThreadWeights<kKeysFirst>;

  const Problem& p;
  const Tangents& t;
  const ThreadPosition thread;

  // Whether q.k has a tangent, and whether any score has.
  TILEWISE_DEVICE bool of_products() const { return t.q.data != nullptr || t.k.data != nullptr; }
  TILEWISE_DEVICE bool any() const {
    return of_products() || t.scale != nullptr || t.bias != nullptr;
  }

  // Adds to the table of rows, in the threads that filled it in.
  TILEWISE_DEVICE void load_row_table() const {
    const int i = ptx::thread_index();
    if (i >= kTile) return;
    SharedTangents& to = shared_tangents();
    const Sequence& s = to.sequence;
    const bool exists = to.q[i] != kUnused;
    to.q_tangent[i] =
        exists ? s.row_offset(t.q, to.row[i]) + to.head[i] * t.q.stride_head : kUnused;
    to.bias_tangent[i] = s.batch * t.bias_stride_batch + to.head[i] * t.bias_stride_head +
                         to.row[i] * t.bias_stride_row;
  }

  // Adds to the table of keys, in the threads that filled it in (load_key_table).
  TILEWISE_DEVICE void load_key_table(int64_t first) const {
    const int thread_of_keys = ptx::thread_index() - kTile;
    if (thread_of_keys < 0 || thread_of_keys >= 2 * kTile) return;
    SharedTangents& to = shared_tangents();
    const int i = thread_of_keys % kTile;
    const bool of_k = thread_of_keys < kTile;
    const tilewise_tensor& view = of_k ? t.k : t.v;
    const bool exists = first + i < to.sequence.band.keys;
    (of_k ? to.k_tangent : to.v_tangent)[i] =
        exists ? to.sequence.kv.offset(view, first + i) + to.kv_head * view.stride_head : kUnused;
  }

  // A tensor's rows of the tile; `columns` is the head dimension.
  TILEWISE_DEVICE static Rows<T> rows_of(const tilewise_tensor& view, const int64_t* offsets,
                                         int64_t columns) {
    return {static_cast<const T*>(view.data), offsets, static_cast<int>(columns)};
  }

  TILEWISE_DEVICE Operand<T> q() const {
    return {rows_of(p.q, shared().q, p.head_dim),
            rows_of(t.q, shared_tangents().q_tangent, p.head_dim)};
  }
  TILEWISE_DEVICE Operand<T> k() const {
    return {rows_of(p.k, shared().k, p.head_dim),
            rows_of(t.k, shared_tangents().k_tangent, p.head_dim)};
  }
  TILEWISE_DEVICE Operand<T> v() const {
    return {rows_of(p.v, shared().v, p.head_dim_v),
            rows_of(t.v, shared_tangents().v_tangent, p.head_dim_v)};
  }

  // X and X' of the tile; X' is 0 if no product has a tangent.
  TILEWISE_DEVICE void products(Block& x, Block& x_tangent) const {
    products_with_tangent(x, x_tangent, q(), k());
  }

  // Turns X and X' into the weights P and the tangents s', both 0 where a row does not see a key.
  TILEWISE_DEVICE void weigh(Block& weight, Block& tangent, int64_t first_key) const {
    const float scale = shared().score_mod.score.scale;
    const float scale_tangent = t.scale != nullptr ? *t.scale : 0.0f;
    const bool general = is_general(p);
    if (general) change_scores(weight, tangent, first_key, scale_tangent);
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!general) {
          tangent[i][j] = tangent[i][j] * scale + weight[i][j] * scale_tangent;
          weight[i][j] = weight_of(ptx::mul(weight[i][j], scale), thread.y * 4 + i);
        }
        if (visible.sees(i, j)) continue;
        weight[i][j] = tangent[i][j] = 0.0f;
      }
    }
  }

 private:
  // `weigh` of the general form, for the pairs that are visible. Overwrites Shared::stage.
  TILEWISE_DEVICE void change_scores(Block& weight, Block& tangent, int64_t first_key,
                                     float scale_tangent) const {
    ptx::sync_block();  // the operands of the products have been read
    const Weights weights = Weights::of(thread);
    const Weights tangents = Weights::of(thread, shared().stage);
    weights.store(weight);
    tangents.store(tangent);
    weights.change_visible(thread, first_key, [&](float x, int r, int64_t key) {
      const ScoreMod& mod = shared().score_mod;
      const Score::Capped<float> score = mod.at(x, shared().row_score_mod[r], key);
      float& of_score = tangents.at(r % 4, static_cast<int>(key % 4));  // until here that of x
      of_score = score.derivative * (of_score * mod.score.scale + x * scale_tangent);
      if (t.bias != nullptr)
        of_score += bias_value(t.bias, p.bias_dtype, shared_tangents().bias_tangent[r] + key);
      return weight_of(score.value, r);
    });
    weights.load(weight);
    tangents.load(tangent);
  }
};

}  // namespace tilewise::cuda::simt
