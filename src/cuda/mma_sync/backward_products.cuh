// The five products of the backward, as one warp computes its part of them.
#pragma once

#include "cuda/mma_sync/backward_plan.h"
#include "cuda/tile/operands.h"

namespace tilewise::cuda::mma_sync {

// d += a b^T: 32 rows of a, the warp's queries of b, both rows of the head dimension. `between(k)`
// runs after step k: there the copies of a later tile are issued.
template <class C>
class RowProduct {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  static constexpr int kRowBytes = Plan::kRowBytes;
  static constexpr int kSteps = kRowBytes / 32;
  static constexpr bool kWide = Plan::kWarpQueries == 8;

 public:
  TILEWISE_DEVICE explicit RowProduct(int lane) : a_(lane), b_(lane) {}

  template <class Between>
  TILEWISE_DEVICE void add(tile::Sums<2, Plan::kWarpQueries / 8>& d, ptx::SharedAddress a,
                           ptx::SharedAddress b, Between&& between) const {
    tile::Fragment<Element> eight;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      tile::Fragment<Element> rows[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) rows[m] = tile::load<Element>(a + a_.at(16 * m, k));
      if constexpr (kWide) {
        if (k % 2 == 0) eight = tile::load<Element>(b + b_.at(0, k / 2));
#pragma unroll
        for (int m = 0; m < 2; ++m)
          tile::multiply_add<typename C::Arch>(d.x[m][0], rows[m], eight, k % 2);
      } else {
#pragma unroll
        for (int j = 0; j < Plan::kWarpQueries / 16; ++j) {
          const auto columns = tile::load<Element>(b + b_.at(16 * j, k));
#pragma unroll
          for (int m = 0; m < 2; ++m)
            tile::multiply_add_pair<typename C::Arch>(d.x[m], j, rows[m], columns);
        }
      }
      between(k);
    }
  }

 private:
  template <bool kIsWide, int = 0>
  struct Choose {
    using Type = tile::LaneOffsets<kRowBytes, tile::Lanes::chunks_first>;
  };
  template <int kUnused>
  struct Choose<true, kUnused> {
    using Type = tile::WideOffsets<kRowBytes>;
  };

  tile::LaneOffsets<kRowBytes, tile::Lanes::rows_first> a_;
  typename Choose<kWide>::Type b_;
};

// d += a b for one step of kStep queries: 32 keys of P^T or dS^T, rows `row` ... of dO or Q.
template <class C>
TILEWISE_DEVICE void add_step(
    tile::Sums<2, BackwardPlan<C>::kColumns / 8>& d,
    const tile::Fragment<typename C::Element> (&a)[2],
    const tile::TransposedB<typename C::Element, BackwardPlan<C>::kRowBytes>& offsets,
    ptx::SharedAddress b, int row) {
#pragma unroll
  for (int j = 0; j < BackwardPlan<C>::kColumns / 16; ++j) {
    const auto columns = offsets.load(b, row, j);
#pragma unroll
    for (int m = 0; m < 2; ++m) tile::multiply_add_pair<typename C::Arch>(d.x[m], j, a[m], columns);
  }
}

// dQ = dS K, the part of a warp.
template <class C>
class DqProduct {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  static constexpr int kRows = Plan::kDqRows / 16;

 public:
  TILEWISE_DEVICE DqProduct(int lane, int warp)
      : ds_(lane, warp / Plan::kDqAcross * kRows),
        k_(lane, warp % Plan::kDqAcross * (Plan::kDqColumns / 16)) {}

  using Sums = tile::Sums<kRows, Plan::kDqColumns / 8>;

  TILEWISE_DEVICE void add(Sums& dq, ptx::SharedAddress ds, ptx::SharedAddress k) const {
#pragma unroll
    for (int step = 0; step < Plan::kKeys / Plan::kStep; ++step) {
      tile::Fragment<Element> rows[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) rows[m] = ds_.load(ds, step * Plan::kStep, m);
#pragma unroll
      for (int j = 0; j < Plan::kDqColumns / 16; ++j) {
        const auto columns = k_.load(k, step * Plan::kStep, j);
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          tile::multiply_add_pair<typename C::Arch>(dq.x[m], j, rows[m], columns);
      }
    }
  }

  // Adds them to the sums of all key tiles, in the private order of dq_index.
  TILEWISE_DEVICE static void reduce(const Sums& dq, float* tile, int warp, int lane) {
    float* own = tile + warp * (Plan::kDqRows * Plan::kDqColumns) + dq_index<C>(0, 0, 0, lane);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < Plan::kDqColumns / 8; ++n) {
        if constexpr (C::Arch::kVectorReduction) {
          ptx::red_add_v4_f32(own + dq_index<C>(m, n, 0, 0), dq.x[m][n]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ptx::red_add_f32(own + dq_index<C>(m, n, e, 0), dq.x[m][n][e]);
        }
      }
    }
  }

 private:
  tile::TransposedA<Element, Plan::kScoreRowBytes> ds_;
  tile::TransposedB<Element, Plan::kRowBytes> k_;
};

}  // namespace tilewise::cuda::mma_sync
