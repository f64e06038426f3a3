// Gradients of a loss of the results and of their tangents (Pass::second) on tensor cores, for
// 16-bit elements. simt/second.cuh has the formulas; without softcap, bias and dropout:
//
//   S = Q K^T   S' = scale (Q' K^T + Q K'^T) + scale' S   P = e^(scale S - lse)   Y = S' - lse'
//   E = dO' V^T - delta'                                  F = dO V^T + dO' V'^T - delta
//   dZ' = P E   dZ = P F + P Y E   G = scale dZ + scale' dZ'   H = scale dZ'
//
//   second_prepare   writes the statistics of rows: lse, lse', delta' and delta
//   second_keys      dK = G^T Q + H^T Q'   dV = P^T dO + (P Y)^T dO'
//   second_rows      dQ = G K + H K'
//
// Each CTA sums its gradients alone, in a fixed order, and so the results are deterministic. The
// scores are computed twice, once per kernel: 15 products of a tile instead of 10 where dout is
// absent (as in a double backward), but no warp needs the factors of another.
//
// A CTA owns a tile of rows or keys and walks all tiles of the other side (second_owner.h): keys
// walk the rows of all query heads of their group. No warp is specialised: each copies, and owns
// the same rows, or keys, in all products.
//
// What passes through shared memory: the four operands that the CTA owns, loaded once, and the
// statistics of rows; of a tile that is walked, the operands of S and S', and those of E and F,
// with one stage each. In the words of the kernel that owns rows:
//   wait K, K'   barrier   copy V, V'              S and S'
//   wait V, V'   barrier                           E and F, then P, P Y, G and H in registers
//                          dQ += G K + H K'
//                barrier   copy K, K' of the next tile         (OwnsKeys: dV += ...)
//
// Tangents and gradients that are absent are neither copied nor multiplied. G and H are rounded to
// 16 bits before they are multiplied by the scale, unless the scale has a tangent. Where sums are
// not finite, because of 0 * NaN of a pair that the band hides or because a factor overflows fp16,
// the CTA sets its flag (Flags).
#pragma once

#include "cuda/mma_sync/second_owner.h"
#include "cuda/mma_sync/tangent_products.cuh"

namespace tilewise::cuda::mma_sync {

// The layout of shared memory in bytes.
template <class C>
struct SecondLayout {
  using Statistics = typename C::Owner::template Statistics<C>;
  static constexpr int kOwned = 0;  // in the order of SecondOperands
  static constexpr int kWalked = kOwned + 4 * kQueryTileBytes<C>;
  static constexpr int kStatistics = kWalked + 4 * kStageBytes<C>;
  static constexpr int kTile = kStatistics + Statistics::kBytes;
  static constexpr int kBytes = kTile + static_cast<int>(sizeof(QueryTile));
  static_assert(kTile % alignof(QueryTile) == 0);
  static_assert(kBytes <= arch::limits_of(C::Arch::kTable).shared_bytes);
};
template <class C>
inline constexpr int kSecondSharedBytes = SecondLayout<C>::kBytes;

// The tile that the CTA owns, saved because registers are needed for sums.
template <class C>
TILEWISE_DEVICE QueryTile& owned_tile() {
  return *reinterpret_cast<QueryTile*>(ptx::shared_memory() +
                                       ptx::opaque(uint32_t{SecondLayout<C>::kTile}));
}

// The operands that the CTA owns.
template <class C>
class OwnedOperands {
 public:
  TILEWISE_DEVICE explicit OwnedOperands(ptx::SharedAddress shared)
      : at_(shared + SecondLayout<C>::kOwned) {}

  TILEWISE_DEVICE void copy(const SecondParams& p, const QueryTile& tile) const {
    const SecondOperands from = C::Owner::owned(p);
    copy(from.of_scores, p.problem.head_dim, tile, 0);
    copy(from.of_scores_tangent, p.problem.head_dim, tile, 1);
    copy(from.of_values, p.problem.head_dim_v, tile, 2);
    copy(from.of_values_tangent, p.problem.head_dim_v, tile, 3);
  }
  // The rows of this warp.
  TILEWISE_DEVICE TangentOperand of_scores(const SecondParams& p) const {
    return of_warp(0, C::Owner::owned(p).of_scores_tangent);
  }
  TILEWISE_DEVICE TangentOperand of_values(const SecondParams& p) const {
    return of_warp(2, C::Owner::owned(p).of_values_tangent);
  }
  // The tiles that the gradients leave through.
  TILEWISE_DEVICE ptx::SharedAddress scores_stage() const { return at_; }
  TILEWISE_DEVICE ptx::SharedAddress values_stage() const { return at_ + 2 * kQueryTileBytes<C>; }

 private:
  TILEWISE_DEVICE void copy(const tilewise_tensor& view, int64_t columns, const QueryTile& tile,
                            int index) const {
    if (view.data != nullptr)
      load_query_rows<C>(view, columns, tile, at_ + index * kQueryTileBytes<C>);
  }
  TILEWISE_DEVICE TangentOperand of_warp(int index, const tilewise_tensor& tangent) const {
    const ptx::SharedAddress value = at_ + index * kQueryTileBytes<C> + first_byte_of_warp<C>();
    return {value, value + kQueryTileBytes<C>, tangent.data != nullptr};
  }

  ptx::SharedAddress at_;
};

// The stages of the operands that the CTA walks.
template <class C>
class WalkedOperands {
 public:
  TILEWISE_DEVICE explicit WalkedOperands(ptx::SharedAddress shared)
      : at_(shared + SecondLayout<C>::kWalked) {}

  TILEWISE_DEVICE void copy_of_scores(const SecondParams& p, int32_t head, int32_t tile) const {
    const SecondOperands from = C::Owner::walked(p);
    copy(from.of_scores, p.problem.head_dim, head, tile, 0);
    copy(from.of_scores_tangent, p.problem.head_dim, head, tile, 1);
  }
  TILEWISE_DEVICE void copy_of_values(const SecondParams& p, int32_t head, int32_t tile) const {
    const SecondOperands from = C::Owner::walked(p);
    copy(from.of_values, p.problem.head_dim_v, head, tile, 2);
    copy(from.of_values_tangent, p.problem.head_dim_v, head, tile, 3);
  }
  TILEWISE_DEVICE TangentOperand of_scores(const SecondParams& p) const {
    return at(0, C::Owner::walked(p).of_scores_tangent);
  }
  TILEWISE_DEVICE TangentOperand of_values(const SecondParams& p) const {
    return at(2, C::Owner::walked(p).of_values_tangent);
  }

 private:
  // Copies a tile of `view`. Rows past the last become 0. Everything is computed anew for each
  // tile, since registers are scarce.
  TILEWISE_DEVICE void copy(const tilewise_tensor& view, int64_t columns, int32_t head,
                            int32_t tile, int index) const {
    using Lanes =
        tile::CopyLanes<C::kForward.threads(), C::kForward.keys, C::kHeadDim * C::Element::kBytes>;
    constexpr int kBytes = C::Element::kBytes;
    if (view.data == nullptr) return;
    const Lanes lanes(opaque_thread<C>());
    bool exists[Lanes::kColumns];
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column)
      exists[column] = lanes.chunk_of(column) * (16 / kBytes) < columns;
    const QueryTile& owned = owned_tile<C>();
    const int32_t row = tile * C::kForward.keys + lanes.row;
    const int64_t offset = head * view.stride_head + owned.sequence.kv.offset(view, row);
    copy_rows<C>(at_ + index * kStageBytes<C>, lanes,
                 static_cast<const char*>(view.data) + offset * kBytes + lanes.chunk * 16,
                 view.stride_row * kBytes, owned.tiles.keys - row, exists);
  }
  TILEWISE_DEVICE TangentOperand at(int index, const tilewise_tensor& tangent) const {
    const ptx::SharedAddress value = at_ + index * kStageBytes<C>;
    return {value, value + kStageBytes<C>, tangent.data != nullptr};
  }

  ptx::SharedAddress at_;
};

// G = of_score dZ + of_tangent dZ' and H = of_score dZ', and the sums over them are multiplied by
// `unit` when they are stored. Where the scale has no tangent, it multiplies the sums as `unit`
// instead of every G and H as `of_score`.
struct SecondScales {
  float scale;
  float scale_tangent;
  float of_score;
  float of_tangent;
  float unit;

  TILEWISE_DEVICE static SecondScales of(const SecondParams& p) {
    const float scale = score_of(p.problem).scale;
    if (p.tangents.scale == nullptr) return {scale, 0.0f, 1.0f, 0.0f, scale};
    return {scale, *p.tangents.scale, scale, *p.tangents.scale, 1.0f};
  }
};

// The factors of a tile. First the products S, S', E and F in the order of the members.
template <class C>
struct SecondFactors {
  Scores<C> weight;       // P
  Scores<C> moved;        // P Y
  Scores<C> of_tangents;  // H
  Scores<C> of_scores;    // G

  TILEWISE_DEVICE void combine(const typename SecondLayout<C>::Statistics& statistics,
                               const SecondScales& scales) {
    statistics.for_each_element([&](int m, int n, int e, const SecondStatistics& row) {
      const float score = weight.x[m][n][e];
      const float tangent = ptx::fma(moved.x[m][n][e], scales.scale, score * scales.scale_tangent);
      const float exponent = ptx::fma(score, scales.scale, row.minus_lse);
      const float p = ptx::ex2(ptx::fma(exponent, kLog2e, row.minus_low));
      const float p_moved = p * (tangent - row.lse_tangent);
      const float from_tangent = of_tangents.x[m][n][e] - row.delta;
      const float dz_tangent = p * from_tangent;
      const float dz = ptx::fma(p, of_scores.x[m][n][e] - row.second_delta, p_moved * from_tangent);
      weight.x[m][n][e] = p;
      moved.x[m][n][e] = p_moved;
      of_tangents.x[m][n][e] = dz_tangent * scales.of_score;
      of_scores.x[m][n][e] = ptx::fma(dz, scales.of_score, dz_tangent * scales.of_tangent);
    });
  }
};

// The walk over the tiles of the other side, from the last to the first, of one head after another.
struct SecondWalk {
  int32_t head;
  int32_t end_head;
  int32_t tile;
  int32_t first;
  int32_t last;

  TILEWISE_DEVICE static SecondWalk of(const KeyTiles& tiles, const HeadRange& heads) {
    const bool empty = tiles.last < tiles.first;
    return {ptx::uniform(empty ? heads.end : heads.begin), ptx::uniform(heads.end),
            ptx::uniform(tiles.last), ptx::uniform(tiles.first), ptx::uniform(tiles.last)};
  }
  TILEWISE_DEVICE bool done() const { return head == end_head; }
  TILEWISE_DEVICE void advance() {
    if (tile-- != first) return;
    tile = last;
    ++head;
  }
};

// The work of a CTA.
template <class C>
TILEWISE_DEVICE void compute_second(const SecondParams& p) {
  using Owner = typename C::Owner;
  const Flags& flags = Owner::flags(p);
  const int64_t index = Owner::tile_index(p);
  if (flags.data != nullptr && ptx::thread_index() == 0) flags.data[index] = 0;
  const QueryTile tile = Owner::template tile_at<C>(p, index);
  if (!tile.any()) return;

  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  const OwnedOperands<C> owned(shared);
  const WalkedOperands<C> walked(shared);
  const typename SecondLayout<C>::Statistics statistics(shared + SecondLayout<C>::kStatistics);
  if (ptx::thread_index() == 0) owned_tile<C>() = tile;
  owned.copy(p, tile);
  statistics.copy_owned(p, tile);
  SecondWalk walk =
      SecondWalk::of(tile.tiles, Owner::walked_heads(p.problem, tile.rows.first_head));
  ptx::sync_block();
  const QueryTile& saved = owned_tile<C>();

  // The operands of the scores of the next tile, with the statistics of its rows.
  const auto copy_next = [&] {
    if (!walk.done()) {
      walked.copy_of_scores(p, walk.head, walk.tile);
      statistics.copy_walked(p, saved, walk.head, walk.tile);
    }
    tile::commit<typename C::Arch>();
  };
  const auto nothing_to_load = [](int) {};
  const TangentProducts<C> score_products;
  const Products<C> products;
  typename Owner::template ValueSums<C> values;
  Outputs<C> sums;
  sums.fill(0.0f);
  copy_next();
#pragma unroll 1
  while (!walk.done()) {
    wait_for_all<C>();
    walked.copy_of_values(p, walk.head, walk.tile);
    tile::commit<typename C::Arch>();
    SecondFactors<C> factors;
    // S and S', without the scale
    score_products.compute(factors.weight, factors.moved, owned.of_scores(p), walked.of_scores(p));
    wait_for_all<C>();
    // E and F, without the deltas
    score_products.compute(factors.of_tangents, factors.of_scores, owned.of_values(p),
                           walked.of_values(p));
    factors.combine(statistics, SecondScales::of(p));  // P, P Y, H and G
    if (saved.tiles.masked(walk.tile))
      hide<C>(saved, walk.tile, factors.weight, factors.moved, factors.of_tangents,
              factors.of_scores);
    // dQ += G K + H K', or dK += G^T Q + H^T Q'
    const TangentOperand of_scores = walked.of_scores(p);
    products.values(sums, factors.of_scores, of_scores.value, nothing_to_load);
    if (of_scores.has_tangent)
      products.values(sums, factors.of_tangents, of_scores.tangent, nothing_to_load);
    ptx::sync_block();
    walk.advance();
    copy_next();
    values.add(products, factors.weight, factors.moved, walked.of_values(p));  // OwnsKeys: dV
  }

  wait_for_all<C>();  // without a walk, the copies of the owned operands may be in flight
  if (flags.data != nullptr && !(sums_are_finite<C>(saved, sums) && values.are_finite(saved)))
      [[unlikely]]
    flags.data[Owner::tile_index(p)] = 1;  // barriers order it after the 0 of the start
  QueryTile results = saved;
  Owner::move_to_gradients(p.problem, results);
  store_sums<C>(Owner::gradient(p), p.problem.head_dim, results, owned.scores_stage(), sums,
                SecondScales::of(p).unit);
  values.store(p, results, owned.values_stage());
}

// Grid: heads_q * rows.count / rows.tile.
template <class C>
TILEWISE_KERNEL(C::kForward.threads(), C::kForward.blocks_per_sm)
void second_rows(TILEWISE_PARAMETER SecondParams p) {
  static_assert(std::is_same_v<typename C::Owner, OwnsRows>);
  compute_second<C>(p);
}

// Grid: the key tiles of params.order.
template <class C>
TILEWISE_KERNEL(C::kForward.threads(), C::kForward.blocks_per_sm)
void second_keys(TILEWISE_PARAMETER SecondParams p) {
  static_assert(std::is_same_v<typename C::Owner, OwnsKeys>);
  compute_second<C>(p);
}

}  // namespace tilewise::cuda::mma_sync
