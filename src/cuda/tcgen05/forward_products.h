// The product role of the forward: one thread issues all products of the CTA.
#pragma once

#include "cuda/tcgen05/forward_shared.h"

namespace tilewise::cuda::tcgen05 {

template <class C>
class ForwardProducts {
 public:
  using Shared = ForwardShared<C>;
  using Tile = typename Shared::Tile;

  // With a negative scale the scores are -q k^T, so that the largest one has the largest weight.
  TILEWISE_DEVICE ForwardProducts(const ForwardParams& p, const Shared& shared)
      : shared_(shared), scores_kind_(scores_kind(score_of(p.problem).scale < 0.0f)) {}

  // For each key tile: O0 S0' O1 S1', where ' marks the next one. The weights of a tile lie over
  // its scores, so S' must follow O in the queue. The ISA does not promise this order for products
  // of different shapes; FlashAttention-4 relies on it as well.
  TILEWISE_DEVICE void run() {
    const int32_t tiles = shared_.work_tile().tiles.last - shared_.work_tile().tiles.first + 1;
    shared_.kv_full(state_.stage()).wait(state_.phase());
#pragma unroll
    for (int t = 0; t < Shared::kQTiles; ++t) {
      shared_.q_full(t).wait(0);
      issue_scores(t);
    }
    release_stage();
#pragma unroll 1
    for (int32_t i = 1; i <= tiles; ++i) {
      const int v = state_.stage();
      shared_.kv_full(v).wait(state_.phase());
      state_.next();
#pragma unroll
      for (int t = 0; t < Shared::kQTiles; ++t) {
        shared_.weights_full(t).wait((i - 1) & 1);
        ptx::tcgen05_fence_after();
        issue_values(t, v, i > 1);
        if (t + 1 == Shared::kQTiles) shared_.kv_empty(v).arrive_after_products();
        if (i == tiles) {
          shared_.out_full(t).arrive_after_products();
        } else {
          if (t == 0) shared_.kv_full(state_.stage()).wait(state_.phase());
          issue_scores(t);
        }
      }
      if (i < tiles) release_stage();
    }
  }

 private:
  TILEWISE_DEVICE static uint32_t scores_kind(bool negate) {
    constexpr tile::ProductShape kShape = {Shared::kRows, C::kForward.keys, C::kBf16, false, false,
                                           false};
    constexpr tile::ProductShape kNegated = {
        Shared::kRows, C::kForward.keys, C::kBf16, false, false, true};
    constexpr uint32_t kScores = tile::tcgen05_kind(kShape);
    constexpr uint32_t kNegativeScores = tile::tcgen05_kind(kNegated);
    return negate ? kNegativeScores : kScores;
  }

  TILEWISE_DEVICE void release_stage() {
    shared_.kv_empty(state_.stage()).arrive_after_products();
    state_.next();
  }

  // s = q k^T. Without opaque_u64, ptxas computes the descriptors of all steps ahead and spills.
  TILEWISE_DEVICE void issue_scores(int t) const {
    const uint64_t q = ptx::opaque_u64(tile::tcgen05_operand(shared_.q(t).by_columns()));
    const uint64_t k =
        ptx::opaque_u64(tile::tcgen05_operand(shared_.kv(state_.stage()).by_columns()));
    const ptx::TensorAddress s = shared_.scores(t);
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 16; ++i)
      ptx::tcgen05_mma_f16(s, q + Tile::column_step(i), k + Tile::column_step(i), scores_kind_,
                           i > 0);
    shared_.scores_full(t).arrive_after_products();
  }

  // o += p v
  TILEWISE_DEVICE void issue_values(int t, int stage, bool add) const {
    constexpr uint32_t kKind =
        tile::tcgen05_kind({Shared::kRows, C::kHeadDim, C::kBf16, false, true});
    const uint64_t v = ptx::opaque_u64(tile::tcgen05_operand(shared_.kv(stage).by_rows()));
    const ptx::TensorAddress p = shared_.scores(t);
    const ptx::TensorAddress o = shared_.out(t);
#pragma unroll
    for (int i = 0; i < C::kForward.keys / 16; ++i)
      ptx::tcgen05_mma_f16_tensor_a(o, p + static_cast<uint32_t>(8 * i), v + Tile::row_step(i),
                                    kKind, add || i > 0);
  }

  const Shared& shared_;
  uint32_t scores_kind_;
  typename Shared::Pipeline state_;
};

}  // namespace tilewise::cuda::tcgen05
