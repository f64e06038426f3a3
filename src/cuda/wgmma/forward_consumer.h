// The consumer role of the forward: a warpgroup computes 64 rows of a work tile.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/wgmma/forward_epilogue.h"
#include "cuda/wgmma/forward_mask.h"
#include "cuda/wgmma/forward_ping_pong.h"
#include "cuda/wgmma/forward_score_mod.h"

namespace tilewise::cuda::wgmma {

template <class C, Option kOption>
class ForwardConsumer {
 public:
  using Element = typename C::Element;
  using Shared = ForwardShared<C>;
  using WorkTile = typename Shared::WorkTile;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  static constexpr int kKeys = kTile.keys;
  // Capped scores are bounded.
  static constexpr bool kBounded = kOption == Option::softcap;
  static constexpr bool kClampExponents =  // a bias or a mask may hide all keys of a row
      C::kMasked || kOption == Option::bias || kOption == Option::any;
  using RowMath = RowSoftmax<kKeys / 8, kBounded, kClampExponents>;
  static constexpr bool kWide = kHasWideRange<Element>;

  TILEWISE_DEVICE ForwardConsumer(const TmaForwardParams& params, const Shared& shared,
                                  int warpgroup)
      : p_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        negative_(score_of(params.problem).scale < 0.0f),
        mask_(shared),
        score_mod_(params.problem, positive_scale(score_of(params.problem).scale), shared) {
    softmax_.scale = score_mod_.unit() * kLog2e;
  }

  // Returns the head of the warp's recompute list: its last work tile with rows to recompute.
  TILEWISE_DEVICE int32_t run() {
    if (kTile.ping_pong && warpgroup_ == 0) PingPong<C>::arrive(0);
    int stage = next_tile();
    bool overlapped = false;
    o_.fill(0.0f);
#pragma unroll 1
    while (tiles_.kind != TileKind::end) {
      const bool keys = tiles_.kind == TileKind::keys;
      if (keys) {
        if (!overlapped) first_step(stage);
        mainloop(stage);
      } else {
        shared_.q_full(q_state_.stage()).wait(q_state_.phase());
        softmax_.clear();
        o_.fill(0.0f);
      }
      release(shared_.q_empty(q_state_.stage()));
      q_state_.next();
      const int done = stage;
      const int32_t skip_after = tiles_.skip_after;
      stage = next_tile();
      overlapped = kTile.overlap_tiles && keys && tiles_.kind == TileKind::keys &&
                   tiles_.skip_before == 0 && skip_after == 0;
      EpilogueState<C> epilogue;
      if (overlapped) {
        overlap_next_tile(stage, done, epilogue);
      } else if (keys) {
        issue_last_values();
        epilogue = begin_epilogue(done);
        wait_for_values();
        skip_key_tiles(skip_after);
      } else {
        epilogue = begin_epilogue(done);
      }
      // Called at a single place, because code that runs once per tile waits until its instructions
      // have been fetched.
      store_tile(done, epilogue);
      o_is_initialised_ = 0;
    }
    return recompute_head_;
  }

 private:
  // --- the work tile ---

  // Waits for the next work tile, copies its key tiles to `tiles_` and returns its stage.
  TILEWISE_DEVICE int next_tile() {
    const int stage = tile_state_.stage();
    shared_.tile_full(stage).wait(tile_state_.phase());
    tile_state_.next();
    // Not warpgroup_: D192 and D256 have no register to hold it across a work tile.
    const WarpgroupTiles& warpgroup_tiles =
        shared_.work_tile(stage).warpgroup_tiles[thread() / ptx::kWarpgroupSize];
    // uniform() tells ptxas that all lanes agree. Only then does it keep descriptors in uniform
    // registers, which saves 48 moves and a warp barrier in the main loop (4 %). ptxas loses track
    // of this if the loops of `run` are nested.
    tiles_.kind = static_cast<TileKind>(ptx::uniform(static_cast<int32_t>(warpgroup_tiles.kind)));
    if constexpr (C::kMasked) {
      tiles_ = {mask_.kind_of(tiles_.kind), 0, 0, 0, 0, 0, 0};
      return stage;
    }
    tiles_.first = ptx::uniform(warpgroup_tiles.first);
    tiles_.last = ptx::uniform(warpgroup_tiles.last);
    tiles_.full_begin = ptx::uniform(warpgroup_tiles.full_begin);
    tiles_.full_end = ptx::uniform(warpgroup_tiles.full_end);
    // Steps without a mask keep m, so scores should not rise from one to the next. The loop goes
    // from right to left, where ALiBi lowers scores only from the diagonal on.
    if constexpr (kOption == Option::alibi) {
      const int32_t left_end = WarpgroupTiles::left_of_diagonal(
          shared_.work_tile(stage), thread() / ptx::kWarpgroupSize, kKeys);
      tiles_.full_end = min(tiles_.full_end, ptx::uniform(left_end));
    }
    tiles_.skip_before = ptx::uniform(warpgroup_tiles.skip_before);
    tiles_.skip_after = ptx::uniform(warpgroup_tiles.skip_after);
    return stage;
  }

  TILEWISE_DEVICE static void release(Barrier barrier) {
    if (ptx::lane_index() == 0) barrier.arrive();
  }

  // --- the products ---

  // Descriptors of the operands of the next products.
  TILEWISE_DEVICE uint64_t queries() const {
    return shared_.q(q_state_.stage(), warpgroup_).by_columns();
  }
  TILEWISE_DEVICE uint64_t keys() const { return shared_.k(k_state_.stage()).by_columns(); }
  TILEWISE_DEVICE uint64_t values() const { return shared_.v(v_state_.stage()).by_rows(); }

  // s = q k^T
  TILEWISE_DEVICE void issue_scores(uint64_t q, uint64_t k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 16; ++i) {
      using Product = ptx::Wgmma<kKeys, C::kHalf>;
      const uint64_t a = q + QTile::column_step(i);
      const uint64_t b = k + KTile::column_step(i);
      if (i == 0)
        Product::template start<false, false>(s_.flat(), a, b);
      else
        Product::template add<false, false>(s_.flat(), a, b);
    }
    ptx::wgmma_commit_group();
  }

  // o += p v. The first product of a work tile overwrites o: with zeros in o instead, ptxas emitted
  // 2 x 32 more instructions (1 to 2 % at D64 and D128 causal up to 1k rows, and at D256).
  TILEWISE_DEVICE void issue_values(uint64_t v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      using Product = ptx::Wgmma<C::kHeadDimV, C::kHalf>;
      const uint64_t b = v + VTile::row_step(i);
      if (i == 0)
        Product::template add_if<true>(o_is_initialised_, o_.flat(), weights_[i], b);
      else
        Product::template add<true>(o_.flat(), weights_[i], b);
    }
    ptx::wgmma_commit_group();
    o_is_initialised_ = 1;
  }

  template <int kPending>
  TILEWISE_DEVICE void wait_for_scores() {
    ptx::wgmma_wait_group<kPending>();
    ptx::fence_register(s_.flat());
    release(shared_.k_empty(k_state_.stage()));
    k_state_.next();
  }
  TILEWISE_DEVICE void wait_for_values() {
    ptx::fence_register(s_.flat());
    ptx::wgmma_wait_group<0>();
    ptx::fence_register(o_.flat());
    ptx::fence_register(s_.flat());
    release(shared_.v_empty(v_state_.stage()));
    v_state_.next();
  }

  TILEWISE_DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const auto a = tile::operand_of<Element>(s_.x[0], i);
#pragma unroll
      for (int e = 0; e < 4; ++e) weights_[i][e] = a.r[e];
    }
    score_mod_.apply_dropout(weights_, position());
  }
  TILEWISE_DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o_.x[0][n][e] *= factor[e / 2];
    }
    ptx::fence_register(o_.flat());  // so that o is scaled here, and not after the next wait
  }

  // --- the main loop ---

  // kMasked: the band may cut the tile, and m may have to rise.
  template <bool kFirst, bool kMasked>
  TILEWISE_DEVICE void apply_softmax(int stage, int32_t tile) {
    const WorkTile& work_tile = shared_.work_tile(stage);
    if constexpr (C::kMasked) {
      if (kMasked && !mask_.tiles.next_is_full()) mask_.hide(s_, position());
      mask_.tiles.take();
      return weigh<kFirst, kMasked>(LinearExponent{softmax_.scale});
    }
    const bool cut = kMasked && (tile >= tiles_.full_end || tile < tiles_.full_begin);
    if constexpr (kOption == Option::softcap) {
      if (!cut && score_mod_.are_small(s_))
        return weigh<kFirst, kMasked>(score_mod_.small_exponent(softmax_.scale));
    }
    score_mod_.apply(work_tile, s_, tile, position(), tile > tiles_.first);
    if (cut) mask(s_, work_tile, position(), tile);
    weigh<kFirst, kMasked>(LinearExponent{softmax_.scale});
    score_mod_.draw_dropout(tile, position());
  }

  template <bool kFirst, bool kMasked, class Exponent>
  TILEWISE_DEVICE void weigh(const Exponent& exponent) {
    if constexpr (kFirst || kMasked)
      softmax_.template update<kFirst>(s_, exponent);
    else
      has_grown_ = softmax_.template weigh<kWide>(s_, exponent);
  }

  // Beside the products of the first key tile of a work tile: issues the loads of the score_mod,
  // and then waits for them.
  TILEWISE_DEVICE void begin_score_mod(int stage) {
    score_mod_.begin_tile(shared_.work_tile(stage), position(), tiles_.last);
  }
  TILEWISE_DEVICE void finish_score_mod_loads() {
    score_mod_.read_bias();
    score_mod_.prefetch_bias(tiles_.last, tiles_.last > tiles_.first);
  }

  // The last key tile of the rows, which an edge of the band may cut.
  TILEWISE_DEVICE void first_step(int stage) {
    wait_for_queries();
    skip_key_tiles(tiles_.skip_before);
    const uint64_t q = queries();
    const uint64_t k = keys();
    shared_.k_full(k_state_.stage()).wait(k_state_.phase());
    if (kTile.overlap_tiles)
      PingPong<C>::sync(warpgroup_);  // as in overlap_next_tile: once per key tile
    issue_scores(q, k);
    if (kTile.overlap_tiles) PingPong<C>::arrive_at_next(warpgroup_);
    begin_score_mod(stage);
    finish_score_mod_loads();
    wait_for_scores<0>();
    apply_softmax<true, true>(stage, tiles_.last);
    pack_weights();
  }

  // Computes S of `tile` beside the PV product of the previous step. If row sums are so large that
  // m has to move, the step moves it or, with kWide, returns true so that the caller does.
  template <bool kMasked>
  TILEWISE_DEVICE bool step(int stage, int32_t tile) {
    score_mod_.read_bias();
    issue_both();
    score_mod_.prefetch_bias(tile, tile > tiles_.first);
    wait_for_scores<1>();
    apply_softmax<false, kMasked>(stage, tile);
    wait_for_values();
    if constexpr (!kMasked && !kWide) {
      if (ptx::any(has_grown_)) [[unlikely]]
        raise();
    }
    pack_weights();
    if constexpr (!kMasked) return kWide && ptx::any(has_grown_);
    rescale(softmax_.shrink);
    return false;
  }

  // Raises m and rescales o and the weights accordingly. Called by a warp that has no product in
  // flight. With kWide, the weights are already packed as operands.
  TILEWISE_DEVICE void raise() {
    float factor[2];
    softmax_.raise(factor);
    rescale(factor);
    if constexpr (!kWide) {
#pragma unroll
      for (float (&x)[4] : s_.x[0]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= factor[e / 2];
      }
      return;
    }
#pragma unroll
    for (auto& operand : weights_) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        operand[e] = tile::pack<Element>(tile::low_of<Element>(operand[e]) * factor[e % 2],
                                         tile::high_of<Element>(operand[e]) * factor[e % 2]);
    }
  }

  TILEWISE_DEVICE void issue_both() {
    const uint64_t q = queries();
    const uint64_t k = keys();
    const uint64_t v = values();
    shared_.k_full(k_state_.stage()).wait(k_state_.phase());
    PingPong<C>::sync(warpgroup_);
    issue_scores(q, k);
    shared_.v_full(v_state_.stage()).wait(v_state_.phase());
    issue_values(v);
    PingPong<C>::arrive_at_next(warpgroup_);
  }

  TILEWISE_DEVICE void mainloop(int stage) {
    int32_t tile = tiles_.last - 1;
    if constexpr (C::kMasked) {
      masked_mainloop(stage);
    } else if constexpr (kOption == Option::any) {
#pragma unroll 1
      for (; tile >= tiles_.first; --tile) step<true>(stage, tile);
    } else {
      // Stream-K partials cannot be recomputed after an overflow.
      const bool whole = shared_.work_tile(stage).splits == 1;
      bool hidden = kOption == Option::bias;
#pragma unroll 1
      while (tile >= tiles_.first) {
        if (hidden && whole && tile < tiles_.full_end) hidden = some_rows_are_hidden();
        if (tile < tiles_.full_end && whole && !hidden) {
          bool grown = false;
#pragma unroll 1
          for (; tile >= tiles_.full_begin && !grown; --tile) grown = step<false>(stage, tile);
          if (grown) {
            raise();
            continue;
          }
        }
        if (tile >= tiles_.first) step<true>(stage, tile--);
      }
    }
  }

  // The loop over the tiles that the mask shows. A full tile takes the fast step once each row of
  // the warpgroup has seen a key.
  TILEWISE_DEVICE void masked_mainloop(int stage) {
    bool hidden = true;
#pragma unroll 1
    while (mask_.tiles.any()) {
      if (hidden && mask_.tiles.next_is_full()) hidden = some_rows_are_hidden();
      bool grown = false;
      if (!hidden) {
#pragma unroll 1
        while (mask_.tiles.next_is_full() && !grown) grown = step<false>(stage, 0);
      }
      if (grown)
        raise();
      else if (mask_.tiles.in_window())
        step<true>(stage, 0);
    }
  }

  // Whether bias or mask have hidden all keys that some row of the warpgroup has processed so far.
  // The warps decide together because they issue products together.
  TILEWISE_DEVICE bool some_rows_are_hidden() const {
    const int barrier = PingPong<C>::kWarpgroupBarrier + thread() / ptx::kWarpgroupSize;
    return ptx::uniform(ptx::bar_any(barrier, ptx::kWarpgroupSize, softmax_.is_hidden()) ? 1 : 0) !=
           0;
  }

  TILEWISE_DEVICE void issue_last_values() {
    const uint64_t v = values();
    shared_.v_full(v_state_.stage()).wait(v_state_.phase());
    issue_values(v);
  }

  // The first S of the next work tile is issued beside the last PV product of this one: the tensor
  // cores stay busy while the results are stored (D128: +5 % at 1k, +3 % at 4k).
  TILEWISE_DEVICE void overlap_next_tile(int stage, int done, EpilogueState<C>& epilogue) {
    wait_for_queries();
    issue_both();
    begin_score_mod(stage);
    epilogue = begin_epilogue(done);
    finish_score_mod_loads();
    wait_for_scores<1>();
    apply_softmax<true, true>(stage, tiles_.last);
    wait_for_values();
    pack_weights();
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

  // If the scale is negative, flips the sign of Q, because the scale of the softmax is positive.
  TILEWISE_DEVICE void wait_for_queries() {
    shared_.q_full(q_state_.stage()).wait(q_state_.phase());
    if (!negative_) return;
    negate<Element>(shared_.q(q_state_.stage(), warpgroup_), thread() % ptx::kWarpgroupSize);
    ptx::fence_proxy_async();
    ptx::bar_sync(PingPong<C>::kWarpgroupBarrier + warpgroup_, ptx::kWarpgroupSize);
  }

  // --- the epilogue ---

  TILEWISE_DEVICE EpilogueState<C> begin_epilogue(int stage) const {
    return wgmma::begin_epilogue<C>(p_, shared_.work_tile(stage), position(), softmax_,
                                    score_mod_.dropout_scale(), [&] { return score_mod_.unit(); });
  }

  TILEWISE_DEVICE void store_tile(int stage, const EpilogueState<C>& epilogue) {
    wgmma::store_tile<C, RowMath>(p_, shared_.work_tile(stage), position(), o_, epilogue,
                                  recompute_head_);
    ptx::sync_warp();
    release(shared_.tile_empty(stage));
  }

  TILEWISE_DEVICE static int thread() { return consumer_thread(); }
  TILEWISE_DEVICE static LanePosition position() { return LanePosition::of(thread(), 16); }

  const TmaForwardParams& p_;
  Shared shared_;
  int warpgroup_;
  int32_t recompute_head_ = NanRecompute<C>::kNone;
  bool negative_;
  ForwardMask<C> mask_;
  OverlappedScoreMod<C, kOption> score_mod_;
  WarpgroupTiles tiles_;
  int32_t o_is_initialised_ = 0;  // o has products of this work tile
  typename Shared::TilePipeline tile_state_;
  typename Shared::QPipeline q_state_;
  PipelineState<kTile.stages> k_state_;
  PipelineState<kTile.stages> v_state_;
  tile::Sums<1, kKeys / 8> s_;
  tile::Sums<1, C::kHeadDimV / 8> o_;
  uint32_t weights_[kKeys / 16][4];  // p of the previous step, as operand of its PV product
  RowMath softmax_;
  bool has_grown_ = false;  // l of a row of this lane is large
};

}  // namespace tilewise::cuda::wgmma
