// The consumer role of the forward for operands of float8: a warpgroup computes 64 rows of a work
// tile.
//
// The steps are those of forward_consumer.h without the options of the general form, and with two
// differences (FlashAttention-3, arXiv 2407.08608, section 3.3; two levels of sums as in
// DeepSeek-V3, arXiv 2412.19437, section 3.3.2):
//
//   - Weights are rounded to float8, which has numbers from 2^-9 to 448 (Float8Softmax).
//   - Tensor cores keep some 14 bits of a sum of float8 products. So the PV product of a key tile
//     has an accumulator of its own, which is added to o in fp32: one fma per sum, which also
//     rescales o where m has moved.
#pragma once

#include "cuda/ptx/wgmma_float8.h"
#include "cuda/tile/float8.h"
#include "cuda/wgmma/forward_epilogue.h"
#include "cuda/wgmma/forward_ping_pong.h"
#include "cuda/wgmma/forward_shared.h"

namespace tilewise::cuda::wgmma {

// The softmax of weights that are rounded to float8. The largest weight so far is 2^8 in every
// step, which rounding does not change: where one weight outweighs all others, the error of out is
// half of that with any other largest weight (deviation of the scores 3; with 5, a quarter). Other
// than in RowSoftmax::update the exponentials do not wait for the maximum of the scores. They are
// computed with the m of the step before, and the few steps in which a weight exceeds 2^8 multiply
// them.
template <int kKeys>
struct Float8Softmax : RowSoftmax<kKeys / 8, false, false, 8> {
  using Base = RowSoftmax<kKeys / 8, false, false, 8>;
  using Scores = typename Base::Scores;
  // A little above 2^8, because the exponent of the largest weight has been rounded.
  static constexpr float kLargest = 257.0f;

  float top[2];  // the largest of the lane's weights of a tile

  // Turns scores into weights with m as it is. Returns whether m has to move.
  TILEWISE_DEVICE bool weigh(Scores& s) {
    this->exponentiate(s, LinearExponent{this->scale});
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2] = {s.x[0][0][2 * h], s.x[0][0][2 * h + 1]};
#pragma unroll
      for (int n = 1; n < kKeys / 8; ++n) {
        x[0] = ptx::fmax(x[0], s.x[0][n][2 * h]);
        x[1] = ptx::fmax(x[1], s.x[0][n][2 * h + 1]);
      }
      top[h] = ptx::fmax(x[0], x[1]);
      this->shrink[h] = 1.0f;
    }
    return top[0] > kLargest || top[1] > kLargest;
  }

  // Raises m so that no weight of the tile exceeds 2^8. Weights that have overflowed stay: such
  // rows are recomputed.
  TILEWISE_DEVICE void raise(Scores& s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = tile::quad_max(top[h]);
      const bool grown = largest > kLargest && largest <= FLT_MAX;
      const float before = this->m[0][h];
      this->m[0][h] += grown ? ptx::lg2(largest) - 8.0f : 0.0f;
      this->shrink[h] = ptx::ex2(before - this->m[0][h]);
      this->l[0][h] *= this->shrink[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        s.x[0][n][2 * h] *= this->shrink[h];
        s.x[0][n][2 * h + 1] *= this->shrink[h];
      }
    }
  }
};

template <class C>
class Float8Consumer {
 public:
  using Shared = ForwardShared<C>;
  using WorkTile = typename Shared::WorkTile;
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kStep = 32;  // k of a product
  using RowMath = Float8Softmax<kKeys>;
  static_assert(!kTile.overlap_tiles);

  TILEWISE_DEVICE Float8Consumer(const TmaForwardParams& params, const Shared& shared,
                                 int warpgroup)
      : p_(params), shared_(shared), warpgroup_(warpgroup) {}

  // Returns the head of the warp's recompute list: its last work tile with rows to recompute.
  TILEWISE_DEVICE int32_t run() {
    if (kTile.ping_pong && warpgroup_ == 0) PingPong<C>::arrive(0);
    int stage = next_tile();
#pragma unroll 1
    while (tiles_.kind != TileKind::end) {
      const WorkTile& work_tile = shared_.work_tile(stage);
      const bool keys = tiles_.kind == TileKind::keys;
      o_.fill(0.0f);
      if (keys) {
        first_step(stage);
#pragma unroll 1
        for (int32_t tile = tiles_.last - 1; tile >= tiles_.first; --tile) step(stage, tile);
      } else {
        shared_.q_full(q_state_.stage()).wait(q_state_.phase());
        softmax_.clear();
      }
      release(shared_.q_empty(q_state_.stage()));
      q_state_.next();
      EpilogueState<C> epilogue;
      if (keys) {
        issue_values();
        epilogue = begin_epilogue(work_tile);
        add_values();
        skip_key_tiles(tiles_.skip_after);
      } else {
        epilogue = begin_epilogue(work_tile);
      }
      store_tile<C, RowMath>(p_, work_tile, position(), o_, epilogue, recompute_head_);
      ptx::sync_warp();
      release(shared_.tile_empty(stage));
      stage = next_tile();
    }
    return recompute_head_;
  }

 private:
  // --- the work tile ---

  // Waits for the next work tile, copies its key tiles to `tiles_` and returns its stage. About
  // uniform() see ForwardConsumer::next_tile.
  TILEWISE_DEVICE int next_tile() {
    const int stage = tile_state_.stage();
    shared_.tile_full(stage).wait(tile_state_.phase());
    tile_state_.next();
    const WarpgroupTiles& from = shared_.work_tile(stage).warpgroup_tiles[warpgroup_];
    tiles_.kind = static_cast<TileKind>(ptx::uniform(static_cast<int32_t>(from.kind)));
    tiles_.first = ptx::uniform(from.first);
    tiles_.last = ptx::uniform(from.last);
    tiles_.full_begin = ptx::uniform(from.full_begin);
    tiles_.full_end = ptx::uniform(from.full_end);
    tiles_.skip_before = ptx::uniform(from.skip_before);
    tiles_.skip_after = ptx::uniform(from.skip_after);
    return stage;
  }

  TILEWISE_DEVICE static void release(Barrier barrier) {
    if (ptx::lane_index() == 0) barrier.arrive();
  }

  // If the scale is negative, flips the sign of Q, because the scale of the softmax is positive.
  TILEWISE_DEVICE void wait_for_queries(float scale) {
    shared_.q_full(q_state_.stage()).wait(q_state_.phase());
    if (!(scale < 0.0f)) return;
    negate<typename C::Element>(shared_.q(q_state_.stage(), warpgroup_),
                                consumer_thread() % ptx::kWarpgroupSize);
    ptx::fence_proxy_async();
    ptx::bar_sync(PingPong<C>::kWarpgroupBarrier + warpgroup_, ptx::kWarpgroupSize);
  }

  // Skips key tiles that were loaded for other warpgroups.
  TILEWISE_DEVICE void skip_key_tiles(int32_t count) {
#pragma unroll 1
    for (; count > 0; --count) {
      PingPong<C>::sync(warpgroup_);
      PingPong<C>::arrive_at_next(warpgroup_);
      shared_.k_full(k_state_.stage()).wait(k_state_.phase());
      release(shared_.k_empty(k_state_.stage()));
      k_state_.next();
      shared_.v_full(v_state_.stage()).wait(v_state_.phase());
      release(shared_.v_empty(v_state_.stage()));
      v_state_.next();
    }
  }

  // --- the products ---

  // s = q k^T
  TILEWISE_DEVICE void issue_scores() {
    const uint64_t q = shared_.q(q_state_.stage(), warpgroup_).by_columns();
    const uint64_t k = shared_.k(k_state_.stage()).by_columns();
    using Product = ptx::WgmmaFloat8<kKeys>;
    shared_.k_full(k_state_.stage()).wait(k_state_.phase());
    ptx::wgmma_fence();
    Product::start(s_.flat(), q, k);
#pragma unroll
    for (int i = 1; i < C::kHeadDim / kStep; ++i)
      Product::add(s_.flat(), q + Shared::QTile::column_step(i), k + Shared::KTile::column_step(i));
    ptx::wgmma_commit_group();
  }

  // pv = p v, where v is transposed
  TILEWISE_DEVICE void issue_values() {
    const uint64_t v = shared_.v(v_state_.stage()).by_columns();
    using Product = ptx::WgmmaFloat8<C::kHeadDimV>;
    shared_.v_full(v_state_.stage()).wait(v_state_.phase());
    ptx::wgmma_fence();
    Product::start(pv_.flat(), weights_[0], v);
#pragma unroll
    for (int i = 1; i < kKeys / kStep; ++i)
      Product::add(pv_.flat(), weights_[i], v + Shared::VTile::column_step(i));
    ptx::wgmma_commit_group();
  }

  template <int kPending>
  TILEWISE_DEVICE void wait_for_scores() {
    ptx::wgmma_wait_group<kPending>();
    ptx::fence_register(s_.flat());
    release(shared_.k_empty(k_state_.stage()));
    k_state_.next();
  }

  // Waits for the PV product: o = o * shrink + pv.
  TILEWISE_DEVICE void add_values() {
    ptx::fence_register(s_.flat());
    ptx::wgmma_wait_group<0>();
    ptx::fence_register(pv_.flat());
    release(shared_.v_empty(v_state_.stage()));
    v_state_.next();
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        o_.x[0][n][e] = ptx::fma(o_.x[0][n][e], shrink_[e / 2], pv_.x[0][n][e]);
    }
    ptx::fence_register(o_.flat());  // so that pv ends here, and not after the next wait
  }

  TILEWISE_DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / kStep; ++i) tile::float8_operand_of(weights_[i], s_.x[0], i);
    shrink_[0] = softmax_.shrink[0];
    shrink_[1] = softmax_.shrink[1];
  }

  // --- the main loop ---

  TILEWISE_DEVICE bool is_cut(int32_t tile) const {
    return tile >= tiles_.full_end || tile < tiles_.full_begin;
  }

  // For tiles that the band may cut, and so for the first tiles of all rows.
  template <bool kFirst>
  TILEWISE_DEVICE void weigh_with_maximum(int stage, int32_t tile) {
    if (is_cut(tile)) mask(s_, shared_.work_tile(stage), position(), tile);
    softmax_.template update<kFirst>(s_, LinearExponent{softmax_.scale});
  }

  // The last key tile of the rows.
  TILEWISE_DEVICE void first_step(int stage) {
    const float scale = shared_.work_tile(stage).scale;
    softmax_.scale = positive_scale(scale) * kLog2e;
    wait_for_queries(scale);
    skip_key_tiles(tiles_.skip_before);
    issue_scores();
    wait_for_scores<0>();
    weigh_with_maximum<true>(stage, tiles_.last);
    pack_weights();
  }

  // Computes S of `tile` beside the PV product of the previous step.
  TILEWISE_DEVICE void step(int stage, int32_t tile) {
    PingPong<C>::sync(warpgroup_);
    issue_scores();
    issue_values();
    PingPong<C>::arrive_at_next(warpgroup_);
    wait_for_scores<1>();
    if (is_cut(tile)) {
      weigh_with_maximum<false>(stage, tile);
    } else if (ptx::any(softmax_.weigh(s_))) [[unlikely]] {
      softmax_.raise(s_);
    }
    add_values();
    pack_weights();
  }

  TILEWISE_DEVICE EpilogueState<C> begin_epilogue(const WorkTile& work_tile) const {
    return wgmma::begin_epilogue<C>(p_, work_tile, position(), softmax_, work_tile.values,
                                    [&] { return positive_scale(work_tile.scale); });
  }

  TILEWISE_DEVICE static LanePosition position() { return LanePosition::of(consumer_thread(), 16); }

  const TmaForwardParams& p_;
  Shared shared_;
  int warpgroup_;
  int32_t recompute_head_ = NanRecompute<C>::kNone;
  WarpgroupTiles tiles_;
  typename Shared::TilePipeline tile_state_;
  typename Shared::QPipeline q_state_;
  PipelineState<kTile.stages> k_state_;
  PipelineState<kTile.stages> v_state_;
  tile::Sums<1, kKeys / 8> s_;
  tile::Sums<1, C::kHeadDimV / 8> pv_;
  tile::Sums<1, C::kHeadDimV / 8> o_;
  uint32_t weights_[kKeys / kStep][4];  // p of the previous step, as operand of its PV product
  float shrink_[2];                     // factor of o when that product is added
  RowMath softmax_;
};

}  // namespace tilewise::cuda::wgmma
