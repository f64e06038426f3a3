// The sums of the second derivatives in registers, and how they reach memory.
#pragma once

#include "cuda/mma_sync/tangent_products.cuh"

namespace tilewise::cuda::mma_sync {

// Stores the sums of a warp, times `unit`, to the rows of `view`, through the warp's own rows of
// the tile at `stage`, which only this warp has read.
template <class C>
TILEWISE_DEVICE void store_sums(const tilewise_tensor& view, int64_t columns, const QueryTile& tile,
                                ptx::SharedAddress stage, const Outputs<C>& sums, float unit) {
  if (view.data == nullptr) return;
  const OutputLane<C> lane(stage, lane_position<C>());
  ptx::sync_warp();
#pragma unroll
  for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
        ptx::st_shared_b32(lane.at(m, h, n),
                           tile::pack<typename C::Element>(sums.x[m][n][2 * h] * unit,
                                                           sums.x[m][n][2 * h + 1] * unit));
      }
    }
  }
  ptx::sync_warp();
  store_rows<C>(view, columns, tile, stage);
}

template <class C>
TILEWISE_DEVICE bool sums_are_finite(const QueryTile& tile, const Outputs<C>& sums) {
  const float none[C::kForward.warp_rows / 16][2] = {};
  return outputs_are_finite(tile, lane_position<C>(), sums, none);
}

// dV, of a CTA that owns keys.
template <class C>
class SumsOfValues {
 public:
  TILEWISE_DEVICE SumsOfValues() { sums_.fill(0.0f); }

  // Adds P dO + (P Y) dO', where `dout` has dO' as its value and dO as its tangent.
  TILEWISE_DEVICE void add(const Products<C>& products, const Scores<C>& weight,
                           const Scores<C>& moved, const TangentOperand& dout) {
    const auto nothing_to_load = [](int) {};
    products.values(sums_, moved, dout.value, nothing_to_load);
    if (dout.has_tangent) products.values(sums_, weight, dout.tangent, nothing_to_load);
  }
  TILEWISE_DEVICE bool are_finite(const QueryTile& tile) const {
    return sums_are_finite<C>(tile, sums_);
  }
  TILEWISE_DEVICE void store(const SecondParams& p, const QueryTile& tile,
                             ptx::SharedAddress stage) const {
    store_sums<C>(p.gradients.dv, p.problem.head_dim_v, tile, stage, sums_, 1.0f);
  }

 private:
  Outputs<C> sums_;
};

// Rows have no such gradient.
template <class C>
struct NoValueSums {
  TILEWISE_DEVICE void add(const Products<C>&, const Scores<C>&, const Scores<C>&,
                           const TangentOperand&) {}
  TILEWISE_DEVICE bool are_finite(const QueryTile&) const { return true; }
  TILEWISE_DEVICE void store(const SecondParams&, const QueryTile&, ptx::SharedAddress) const {}
};

}  // namespace tilewise::cuda::mma_sync
