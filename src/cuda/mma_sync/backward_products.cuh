// The five products of the backward, as one warp computes its part of them.
#pragma once

#include "cuda/mma_sync/backward_plan.h"
#include "cuda/tile/operands.h"

namespace tilewise::cuda::mma_sync {

// d += a b of `kSteps` steps, fp32 in groups that the tensor cores sum. `step(part, k)` multiplies
// one step.
template <class Element, int kSteps, class Sums, class Step>
TILEWISE_DEVICE void add_in_groups(Sums& d, Step&& step) {
  constexpr int kInCore = tile::kStepsInCore<Element>;
  constexpr int kGroup = kInCore == 0 ? kSteps : min(kSteps, kInCore);
#pragma unroll
  for (int k = 0; k < kGroup; ++k) step(d, k);
#pragma unroll
  for (int group = kGroup; group < kSteps; group += kGroup) {
    Sums part;
    part.fill(0.0f);
#pragma unroll
    for (int k = group; k < min(group + kGroup, kSteps); ++k) step(part, k);
    d.add(part, 0);
  }
}

// d += a b^T: 32 rows of a (joined), the warp's queries of b, both rows of the head dimension.
// `between(k)` runs after step k: there the copies of a later tile are issued. Few steps: d starts
// near 0.
template <class C>
class RowProduct {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  static constexpr int kRowBytes = Plan::kRowBytes;
  static constexpr int kSteps = kRowBytes / 32;
  static constexpr bool kWide = Plan::kWarpQueries == 8;

 public:
  using Sums = tile::Sums<2, Plan::kWarpQueries / 8>;

  TILEWISE_DEVICE explicit RowProduct(int lane) : a_(lane), b_(lane) {}

  template <class Between>
  TILEWISE_DEVICE void add(Sums& d, ptx::SharedAddress a, ptx::SharedAddress b,
                           Between&& between) const {
    tile::Fragment<Element> eight;
    add_in_groups<Element, kSteps>(d, [&](Sums& sums, int k) {
      tile::Fragment<Element> rows[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) rows[m] = tile::load_joined<Element>(a + a_.at(16 * m, k));
      if constexpr (kWide) {
        if (k % 2 == 0) eight = tile::load<Element>(b + b_.at(0, k / 2));
#pragma unroll
        for (int m = 0; m < 2; ++m)
          tile::multiply_in_core<Arch>(sums.x[m][0], rows[m], eight, k % 2);
      } else {
#pragma unroll
        for (int j = 0; j < Plan::kWarpQueries / 16; ++j) {
          const auto columns = tile::load<Element>(b + b_.at(16 * j, k));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            tile::multiply_in_core<Arch>(sums.x[m][2 * j], rows[m], columns, 0);
            tile::multiply_in_core<Arch>(sums.x[m][2 * j + 1], rows[m], columns, 1);
          }
        }
      }
      between(k);
    });
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

// d += a b for kSteps steps of kStep queries: 32 keys of P^T or dS^T, rows `row` ... of dO or Q.
template <class C, int kSteps>
TILEWISE_DEVICE void add_steps(
    tile::Sums<2, BackwardPlan<C>::kColumns / 8>& d,
    const tile::Fragment<typename C::Element> (&a)[kSteps][2],
    const tile::TransposedB<typename C::Element, BackwardPlan<C>::kRowBytes>& offsets,
    ptx::SharedAddress b, int row) {
  using Element = typename C::Element;
  using Arch = typename C::Arch;
#pragma unroll
  for (int j = 0; j < BackwardPlan<C>::kColumns / 16; ++j) {
    constexpr bool kInPlace = tile::kStepsInCore<Element> == 0;
    tile::Sums<2, 2> part;
    if (!kInPlace) part.fill(0.0f);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const auto columns = offsets.load(b, row + k * BackwardPlan<C>::kStep, j);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tile::multiply_in_core<Arch>(kInPlace ? d.x[m][2 * j + half] : part.x[m][half], a[k][m],
                                       columns, half);
        }
      }
    }
    if (!kInPlace) d.add(part, 2 * j);
  }
}

// dQ = dS K, the part of a warp. K is joined.
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
    const auto ds_offsets = ds_.recent();
    const auto k_offsets = k_.recent();
    add_in_groups<Element, Plan::kKeys / Plan::kStep>(dq, [&](Sums& sums, int step) {
      tile::Fragment<Element> rows[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) rows[m] = ds_offsets.load(ds, step * Plan::kStep, m);
#pragma unroll
      for (int j = 0; j < Plan::kDqColumns / 16; ++j) {
        const auto columns = k_offsets.template load<true>(k, step * Plan::kStep, j);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          tile::multiply_in_core<typename C::Arch>(sums.x[m][2 * j], rows[m], columns, 0);
          tile::multiply_in_core<typename C::Arch>(sums.x[m][2 * j + 1], rows[m], columns, 1);
        }
      }
    });
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
