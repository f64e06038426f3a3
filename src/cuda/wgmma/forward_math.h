// The math role of the forward: a warpgroup computes 64 rows of a tile of queries.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/wgmma/forward_shared.h"
#include "cuda/wgmma/forward_softmax.h"
#include "cuda/wgmma/forward_store.h"
#include "cuda/wgmma/forward_terms.h"
#include "cuda/wgmma/nan_recompute.h"

namespace tilewise::cuda::wgmma {

template <class C, Option kOption>
class ForwardMath {
 public:
  using Element = typename C::Element;
  using Shared = ForwardShared<C>;
  using Work = typename Shared::Work;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  static constexpr int kKeys = kTile.keys;
  // Capped scores are not large.
  static constexpr bool kBounded = kOption == Option::softcap;
  static constexpr bool kLowest = kOption == Option::bias || kOption == Option::any;
  using RowMath = RowSoftmax<kKeys / 8, kBounded, kLowest>;
  static constexpr bool kWide = kHasWideRange<Element>;

  TILEWISE_DEVICE ForwardMath(const TmaForwardParams& params, const Shared& shared, int warpgroup)
      : p_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        negative_(score_of(params.problem).scale < 0.0f),
        terms_(params.problem, positive(score_of(params.problem).scale), shared) {
    softmax_.scale = terms_.unit() * kLog2e;
  }

  // The last work with rows that are to be computed again.
  TILEWISE_DEVICE int32_t run() {
    if (kTile.ping_pong && warpgroup_ == 0) pass_turn(0);
    int slot = next_work();
    bool joined = false;
    o_.fill(0.0f);
#pragma unroll 1
    while (tiles_.what != Walk::end) {
      const bool keys = tiles_.what == Walk::keys;
      if (keys) {
        if (!joined) first_step(slot);
        walk(slot);
      } else {
        shared_.q_full(qs_.slot()).wait(qs_.phase());
        softmax_.clear();
        o_.fill(0.0f);
      }
      release(shared_.q_free(qs_.slot()));
      qs_.next();
      const int done = slot;
      const int32_t skip_after = tiles_.skip_after;
      slot = next_work();
      joined = kTile.overlap_tiles && keys && tiles_.what == Walk::keys &&
               tiles_.skip_before == 0 && skip_after == 0;
      Ending ending;
      if (joined) {
        join(slot, done, ending);
      } else if (keys) {
        issue_last_values();
        ending = end_rows(done);
        wait_for_values();
        skip(skip_after);
      } else {
        ending = end_rows(done);
      }
      // In one place: instructions that run once a tile are fetched first.
      store_tile(done, ending);
      o_is_begun_ = 0;
    }
    return spoilt_;
  }

 private:
  // What the last values of a work do not have to have come for.
  struct Ending {
    float l[1][2];  // of whole rows
    RowResults<1> rows;
    OutRows<C> out;
  };

  // -inf stays -inf when it is multiplied by it.
  TILEWISE_DEVICE static float positive(float scale) {
    return scale == 0.0f ? FLT_MIN : scale < 0.0f ? -scale : scale;
  }

  // --- the work ---

  // Its slot; tiles_ says what is to be walked.
  TILEWISE_DEVICE int next_work() {
    const int slot = works_.slot();
    shared_.work_full(slot).wait(works_.phase());
    works_.next();
    // Not warpgroup_, which D192 and D256 have no register for across a work.
    const WarpgroupTiles& mine = shared_.work(slot).parts[thread() / ptx::kWarpgroupSize];
    // ptxas is told that all lanes agree: it keeps descriptors in uniform registers only then, and
    // 48 moves and a barrier of the warp out of the main loop (4 %). It loses track when the loops
    // of `run` are nested.
    tiles_.what = static_cast<Walk>(uniform(static_cast<int32_t>(mine.what)));
    tiles_.first = uniform(mine.first);
    tiles_.last = uniform(mine.last);
    tiles_.full_begin = uniform(mine.full_begin);
    tiles_.full_end = uniform(mine.full_end);
    if constexpr (kOption == Option::alibi) {  // which only lowers scores left of the diagonal
      tiles_.full_end = min(tiles_.full_end, uniform(left_end(shared_.work(slot))));
    }
    tiles_.skip_before = uniform(mine.skip_before);
    tiles_.skip_after = uniform(mine.skip_after);
    return slot;
  }

  // Key tiles below it lie left of the diagonal of all rows of the warpgroup.
  TILEWISE_DEVICE static int32_t left_end(const Work& work) {
    const int32_t row0 = work.rows.row(64 * (thread() / ptx::kWarpgroupSize));
    const int64_t diagonal = work.rows.first + row0 + work.sequence.band.shift();
    return static_cast<int32_t>(clamp(diagonal + 1, 0, work.tiles.keys)) / kKeys;
  }

  TILEWISE_DEVICE static void release(Barrier barrier) {
    if (ptx::lane_index() == 0) barrier.arrive();
  }

  // --- turns: only one warpgroup at a time issues products ---

  static constexpr int kTurnBarrier = 1;
  static constexpr int kRowsBarrier = kTurnBarrier + 4;  // of the four warps of a warpgroup
  static constexpr int kTurnThreads = 2 * ptx::kWarpgroupSize;

  TILEWISE_DEVICE void wait_for_turn() const {
    if constexpr (kTile.ping_pong) ptx::bar_sync(kTurnBarrier + warpgroup_, kTurnThreads);
  }
  TILEWISE_DEVICE void pass_turn(int to) const {
    if constexpr (kTile.ping_pong) ptx::bar_arrive(kTurnBarrier + to, kTurnThreads);
  }
  TILEWISE_DEVICE void pass_turn() const {
    pass_turn(warpgroup_ + 1 == kTile.math_warpgroups ? 0 : warpgroup_ + 1);
  }

  // --- the products ---

  // Where the operands of the next products are.
  TILEWISE_DEVICE uint64_t queries() const {
    return shared_.q(qs_.slot(), warpgroup_).by_columns();
  }
  TILEWISE_DEVICE uint64_t keys() const { return shared_.k(ks_.slot()).by_columns(); }
  TILEWISE_DEVICE uint64_t values() const { return shared_.v(vs_.slot()).by_rows(); }

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

  // o += p v. The first product of a work writes o: zeros for it took ptxas twice 32 instructions
  // (D64 and D128 causal up to 1k rows, D256: 1 to 2 %).
  TILEWISE_DEVICE void issue_values(uint64_t v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      using Product = ptx::Wgmma<C::kHeadDimV, C::kHalf>;
      const uint64_t b = v + VTile::row_step(i);
      if (i == 0)
        Product::template add_if<true>(o_is_begun_, o_.flat(), weights_[i], b);
      else
        Product::template add<true>(o_.flat(), weights_[i], b);
    }
    ptx::wgmma_commit_group();
    o_is_begun_ = 1;
  }

  template <int kPending>
  TILEWISE_DEVICE void wait_for_scores() {
    ptx::wgmma_wait_group<kPending>();
    ptx::keep(s_.flat());
    release(shared_.k_free(ks_.slot()));
    ks_.next();
  }
  TILEWISE_DEVICE void wait_for_values() {
    ptx::keep(s_.flat());
    ptx::wgmma_wait_group<0>();
    ptx::keep(o_.flat());
    ptx::keep(s_.flat());
    release(shared_.v_free(vs_.slot()));
    vs_.next();
  }

  TILEWISE_DEVICE void take_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const auto a = tile::operand_of<Element>(s_.x[0], i);
#pragma unroll
      for (int e = 0; e < 4; ++e) weights_[i][e] = a.r[e];
    }
    terms_.drop(weights_, place());
  }
  TILEWISE_DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o_.x[0][n][e] *= factor[e / 2];
    }
    ptx::keep(o_.flat());  // here, and not after the next wait
  }

  // --- the walk ---

  // kMasked: the band may cut the tile, and m may have to rise.
  template <bool kFirst, bool kMasked>
  TILEWISE_DEVICE void take_scores(int slot, int32_t tile) {
    const Work& work = shared_.work(slot);
    const bool cut = kMasked && (tile >= tiles_.full_end || tile < tiles_.full_begin);
    if constexpr (kOption == Option::softcap) {
      if (!cut && terms_.are_small(s_))
        return weigh<kFirst, kMasked>(terms_.small_exponent(softmax_.scale));
    }
    terms_.apply(work, s_, tile, place(), tile > tiles_.first);
    if (cut) mask(s_, work, place(), tile);
    weigh<kFirst, kMasked>(LinearExponent{softmax_.scale});
    terms_.finish(tile, place());
  }

  template <bool kFirst, bool kMasked, class Exponent>
  TILEWISE_DEVICE void weigh(const Exponent& exponent) {
    if constexpr (kFirst || kMasked)
      softmax_.template update<kFirst>(s_, exponent);
    else
      has_grown_ = softmax_.template weigh<kWide>(s_, exponent);
  }

  // Beside the products of the first tile of a work: what is loaded for it leaves, and is here.
  TILEWISE_DEVICE void begin_terms(int slot) {
    terms_.take_rows(shared_.work(slot), place(), tiles_.last);
  }
  TILEWISE_DEVICE void end_terms() {
    terms_.receive();
    terms_.prepare(tiles_.last, tiles_.last > tiles_.first);
  }

  // The last key tile of the rows, which an edge of the band may cut.
  TILEWISE_DEVICE void first_step(int slot) {
    await_queries();
    skip(tiles_.skip_before);
    const uint64_t q = queries();
    const uint64_t k = keys();
    shared_.k_full(ks_.slot()).wait(ks_.phase());
    if (kTile.overlap_tiles) wait_for_turn();  // as in `join`: every key tile takes a turn
    issue_scores(q, k);
    if (kTile.overlap_tiles) pass_turn();
    begin_terms(slot);
    end_terms();
    wait_for_scores<0>();
    take_scores<true, true>(slot, tiles_.last);
    take_weights();
  }

  // The scores of a key tile beside the values of the one after it. Whether sums have grown.
  template <bool kMasked>
  TILEWISE_DEVICE bool step(int slot, int32_t tile) {
    terms_.receive();
    issue_both();
    terms_.prepare(tile, tile > tiles_.first);
    wait_for_scores<1>();
    take_scores<false, kMasked>(slot, tile);
    wait_for_values();
    if constexpr (!kMasked && !kWide) {
      if (ptx::any(has_grown_)) [[unlikely]]
        raise();
    }
    take_weights();
    if constexpr (!kMasked) return kWide && ptx::any(has_grown_);
    rescale(softmax_.shrink);
    return false;
  }

  // Of a warp, when none of its products is under way. kWide: p is an operand by then.
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
    shared_.k_full(ks_.slot()).wait(ks_.phase());
    wait_for_turn();
    issue_scores(q, k);
    shared_.v_full(vs_.slot()).wait(vs_.phase());
    issue_values(v);
    pass_turn();
  }

  TILEWISE_DEVICE void walk(int slot) {
    int32_t tile = tiles_.last - 1;
    if constexpr (kOption == Option::any) {
#pragma unroll 1
      for (; tile >= tiles_.first; --tile) step<true>(slot, tile);
    } else {
      // Parts of a shared work have nobody who computes their rows again.
      const bool whole = shared_.work(slot).splits == 1;
      bool hidden = kOption == Option::bias;
#pragma unroll 1
      while (tile >= tiles_.first) {
        if (hidden && whole && tile < tiles_.full_end) hidden = some_rows_are_hidden();
        if (tile < tiles_.full_end && whole && !hidden) {
          bool grown = false;
#pragma unroll 1
          for (; tile >= tiles_.full_begin && !grown; --tile) grown = step<false>(slot, tile);
          if (grown) {
            raise();
            continue;
          }
        }
        if (tile >= tiles_.first) step<true>(slot, tile--);
      }
    }
  }

  // Of the warpgroup, whose warps multiply together.
  TILEWISE_DEVICE bool some_rows_are_hidden() const {
    const int barrier = kRowsBarrier + thread() / ptx::kWarpgroupSize;
    return uniform(ptx::bar_any(barrier, ptx::kWarpgroupSize, softmax_.is_hidden()) ? 1 : 0) != 0;
  }

  TILEWISE_DEVICE void issue_last_values() {
    const uint64_t v = values();
    shared_.v_full(vs_.slot()).wait(vs_.phase());
    issue_values(v);
  }

  // The first scores of the next work beside the last values of this one: the tensor cores go on
  // while the results are stored (D128: +5 % at 1k, +3 % at 4k).
  TILEWISE_DEVICE void join(int slot, int done, Ending& ending) {
    await_queries();
    issue_both();
    begin_terms(slot);
    ending = end_rows(done);
    end_terms();
    wait_for_scores<1>();
    take_scores<true, true>(slot, tiles_.last);
    wait_for_values();
    take_weights();
  }

  // Key tiles that were loaded for other warpgroups.
  TILEWISE_DEVICE void skip(int32_t count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_for_turn();
      pass_turn();
      shared_.k_full(ks_.slot()).wait(ks_.phase());
      release(shared_.k_free(ks_.slot()));
      ks_.next();
      shared_.v_full(vs_.slot()).wait(vs_.phase());
      release(shared_.v_free(vs_.slot()));
      vs_.next();
    }
  }

  // Rows change sign where the scale is negative: that of the softmax is positive.
  TILEWISE_DEVICE void await_queries() {
    shared_.q_full(qs_.slot()).wait(qs_.phase());
    if (!negative_) return;
    const ptx::SharedAddress q = shared_.q(qs_.slot(), warpgroup_).base;
#pragma unroll 1
    for (int at = thread() % ptx::kWarpgroupSize * 16; at < QTile::kBytes;
         at += ptx::kWarpgroupSize * 16) {
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, q + static_cast<uint32_t>(at));
      for (uint32_t& each : x) each ^= 0x80008000u;
      ptx::st_shared_v4_b32(q + static_cast<uint32_t>(at), x);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kRowsBarrier + warpgroup_, ptx::kWarpgroupSize);
  }

  // --- results ---

  // Of a work whose last values are under way: what does not depend on them.
  TILEWISE_DEVICE Ending end_rows(int slot) const {
    const Work& work = shared_.work(slot);
    const LanePlace at = place();
    Ending ending;
    ending.l[0][0] = softmax_.l[0][0];
    ending.l[0][1] = softmax_.l[0][1];
    ending.rows = finish_rows<Element, !kBounded>(
        p_, work, at, softmax_.m, ending.l, terms_.keep_scale(), [&] { return terms_.unit(); });
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kBounded ? ending.l[0][h] > kOverflow
                   : is_lost<kKeys, kLowest>(p_.problem, work, at.row(0, h), softmax_.m[0][h],
                                             ending.l[0][h])) {
        // The marks of a row to be computed again, by this block or from the parts of a shared
        // work.
        ending.l[0][h] = -kMinusInfinity;
        ending.rows.factor[0][h] = ending.rows.lse[0][h] = common::lost_lse();
      }
    }
    if (!work.sequence.fits) [[unlikely]]
      ending.rows.spoil();
    ending.out = OutRows<C>::of(p_.problem, work, at.row0);
    if (work.splits == 1) store_row_sums<C>(p_.problem, work, at, ending.rows);
    return ending;
  }

  TILEWISE_DEVICE void store_tile(int slot, const Ending& ending) {
    const Work& work = shared_.work(slot);
    const LanePlace at = place();
    const bool grown = ptx::fmax(ending.l[0][0], ending.l[0][1]) > RowMath::kHigh;
    const bool repairs = C::kGeneral || work.splits == 1;
    if (repairs && (p_.nan_may_leak || ptx::any(grown)) &&
        ptx::any(!outputs_are_finite(work, at, o_, ending.l)) && work.sequence.fits) [[unlikely]]
      NanRecompute<C>::note(p_, thread() / ptx::kWarpSize, work.index, spoilt_);
    if (work.splits > 1) [[unlikely]] {
      if constexpr (C::kGeneral)
        store_partial(p_, work, at, o_, ending.rows);
      else
        store_part<C>(p_, work, at, o_, ending.rows);
    } else {
      store_outputs<C>(p_.problem, work, at, o_, ending.rows, ending.out);
    }
    ptx::sync_warp();
    release(shared_.work_free(slot));
  }

  // Computed where they are asked for: registers are for sums.
  TILEWISE_DEVICE static int thread() {
    return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index()))) -
           ptx::kWarpgroupSize;
  }
  TILEWISE_DEVICE static LanePlace place() { return LanePlace::of(thread(), 16); }

  const TmaForwardParams& p_;
  Shared shared_;
  int warpgroup_;
  int32_t spoilt_ = NanRecompute<C>::kNone;
  bool negative_;
  ForwardTerms<C, kOption> terms_;
  WarpgroupTiles tiles_;
  int32_t o_is_begun_ = 0;  // it has values of this work
  typename Shared::WorkPlace works_;
  typename Shared::QPlace qs_;
  RingWalk<kTile.stages> ks_;
  RingWalk<kTile.stages> vs_;
  tile::Sums<1, kKeys / 8> s_;
  tile::Sums<1, C::kHeadDimV / 8> o_;
  uint32_t weights_[kKeys / 16][4];  // p of the step before, as operand of its values
  RowMath softmax_;
  bool has_grown_ = false;  // l of a row of this lane
};

}  // namespace tilewise::cuda::wgmma
