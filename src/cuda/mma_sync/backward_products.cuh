// The five products of the backward, as one warp computes its share of them.
#pragma once

#include <numeric>

#include "cuda/mma_sync/backward_plan.h"
#include "cuda/tile/operands.h"

namespace tilewise::cuda::mma_sync {

// For fp32, the tensor cores sum groups of tile::kStepsInCore steps, and the group sums are added
// outside of them; other elements have one group. Products into the same accumulator wait for each
// other, so the products of kMaxInFlight groups or columns are interleaved, where each group or
// column has kSums accumulators.
template <class Element>
inline constexpr bool kOneGroup = tile::kStepsInCore<Element> == 0;
template <class Element, int kSums>
inline constexpr int kMaxInFlight = kOneGroup<Element> ? 1 : max(1, 8 / kSums);

// d += a b^T: 32 rows of a (presplit) and the warp's queries of b, over the columns of the head
// dimension. `between(k)` runs after step k and issues the copies of a later tile. The first group
// is summed in d itself, since there are few steps and d starts near 0. The absolute error of a
// score is the relative error of its weight, so for fp32 a group is one step, or the two of a load.
template <class C>
class RowProduct {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  static constexpr int kRowBytes = Plan::kRowBytes;
  static constexpr int kSteps = kRowBytes / 32 / Plan::kColumnWarps;
  static constexpr bool kStepPairs = Plan::kWarpQueries == 8;

 public:
  using Sums = tile::Sums<2, Plan::kWarpQueries / 8>;

  // The product of one column warp is over its share of the columns.
  TILEWISE_DEVICE explicit RowProduct(int lane, int column_warp = 0)
      : a_(lane, column_warp * kSteps), b_(lane, column_warp * kSteps) {
    static_assert(Plan::kColumnWarps == 1 || kSteps % 4 == 0, "the swizzle permutes four steps");
  }

  template <class Between>
  TILEWISE_DEVICE void add(Sums& d, ptx::SharedAddress a, ptx::SharedAddress b,
                           Between&& between) const {
    // A fragment of b holds 16 queries at one step, or 8 queries at two steps (kStepPairs).
    constexpr int kColumns = max(1, Plan::kWarpQueries / 16);
    constexpr int kColumnsAtOnce = min(kColumns, kMaxInFlight<Element, 4>);
    constexpr int kGroups = kMaxInFlight<Element, 4 * kColumnsAtOnce>;
    constexpr int kInCore = kOneGroup<Element> ? kSteps : kStepPairs ? 2 : 1;
    static_assert(kSteps % (kGroups * kInCore) == 0 && kColumns % kColumnsAtOnce == 0);
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroups * kInCore) {
      Sums partials[kGroups];
      tile::Fragment<Element> columns[kGroups][kColumnsAtOnce];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) partials[g].fill(0.0f);
#pragma unroll
      for (int i = 0; i < kInCore; ++i) {
        tile::Fragment<Element> rows[kGroups][2];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int m = 0; m < 2; ++m)
            rows[g][m] = tile::load_presplit<Element>(a + a_.at(16 * m, first + g * kInCore + i));
        }
#pragma unroll
        for (int j = 0; j < kColumns; j += kColumnsAtOnce) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const int step = first + g * kInCore + i;
#pragma unroll
            for (int c = 0; c < kColumnsAtOnce; ++c) {
              if (!kStepPairs)
                columns[g][c] = tile::load<Element>(b + b_.at(16 * (j + c), step));
              else if (step % 2 == 0)
                columns[g][c] = tile::load<Element>(b + b_.at(0, step / 2));
            }
          }
          // The loop over terms is outermost, since the terms of one accumulator wait for each
          // other.
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
              Sums& sums = first + g == 0 ? d : partials[g];
#pragma unroll
              for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int n = 0; n < (kStepPairs ? 1 : 2 * kColumnsAtOnce); ++n) {
                  tile::multiply_term<Arch>(sums.x[m][2 * j + n], rows[g][m], columns[g][n / 2],
                                            kStepPairs ? i % 2 : n % 2, term);
                }
              }
            }
          }
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) between(first + g * kInCore + i);
      }
#pragma unroll
      for (int g = first == 0 ? 1 : 0; g < kGroups; ++g) d.add(partials[g], 0);
    }
  }

 private:
  template <bool kPairs, int = 0>
  struct Choose {
    using Type = tile::LaneOffsets<kRowBytes, tile::Lanes::chunks_first>;
  };
  template <int kUnused>
  struct Choose<true, kUnused> {
    using Type = tile::StepPairOffsets<kRowBytes>;
  };

  tile::LaneOffsets<kRowBytes, tile::Lanes::rows_first> a_;
  typename Choose<kStepPairs>::Type b_;
};

// d += a b for kSteps steps of kStep queries: a holds 32 keys of P^T or dS^T, b the rows of dO or Q
// from `row` on.
template <class C, int kSteps>
TILEWISE_DEVICE void add_steps(
    tile::Sums<2, BackwardPlan<C>::kColumns / 8>& d,
    const tile::Fragment<typename C::Element> (&a)[kSteps][2],
    const tile::TransposedB<typename C::Element, BackwardPlan<C>::kRowBytes>& offsets,
    ptx::SharedAddress b, int row) {
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  constexpr bool kInPlace = kOneGroup<Element>;
  constexpr int kColumnTiles = BackwardPlan<C>::kColumns / 16;
  constexpr int kColumnsAtOnce = min(kColumnTiles, kMaxInFlight<Element, 4>);
  static_assert(kColumnTiles % kColumnsAtOnce == 0);
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += kColumnsAtOnce) {
    tile::Sums<2, 2 * kColumnsAtOnce> partial;
    if (!kInPlace) partial.fill(0.0f);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      tile::Fragment<Element> columns[kColumnsAtOnce];
#pragma unroll
      for (int c = 0; c < kColumnsAtOnce; ++c)
        columns[c] = offsets.load(b, row + k * BackwardPlan<C>::kStep, j + c);
#pragma unroll
      for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < 2 * kColumnsAtOnce; ++n) {
            float (&sum)[4] = kInPlace ? d.x[m][2 * j + n] : partial.x[m][n];
            tile::multiply_term<Arch>(sum, a[k][m], columns[n / 2], n % 2, term);
          }
        }
      }
    }
    if (!kInPlace) d.add(partial, 2 * j);
  }
}

// A warp's share of dQ = dS K. K is presplit.
template <class C>
class DqProduct {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  static constexpr int kRows = Plan::kDqRows / 16;

 public:
  TILEWISE_DEVICE DqProduct(int lane, int warp)
      : ds_(lane, warp / Plan::kDqWarpsPerRow * kRows),
        k_(lane, warp % Plan::kDqWarpsPerRow * (Plan::kDqColumns / 16)) {}

  using Sums = tile::Sums<kRows, Plan::kDqPassColumns / 8>;

  // The columns of pass `pass`.
  TILEWISE_DEVICE void add(Sums& dq, ptx::SharedAddress ds, ptx::SharedAddress k, int pass) const {
    const auto ds_offsets = ds_.opaque();
    const auto k_offsets = k_.opaque();
    constexpr int kSteps = Plan::kKeys / Plan::kStep;
    constexpr int kInCore = kOneGroup<Element> ? kSteps : min(kSteps, tile::kStepsInCore<Element>);
    constexpr int kColumnTiles = Plan::kDqPassColumns / 16;
    constexpr int kColumnsAtOnce = std::gcd(kColumnTiles, kMaxInFlight<Element, 2 * kRows>);
    static_assert(kSteps % kInCore == 0);
#pragma unroll
    for (int first = 0; first < kSteps; first += kInCore) {
      Sums partial;
      partial.fill(0.0f);
#pragma unroll
      for (int step = first; step < first + kInCore; ++step) {
        tile::Fragment<Element> rows[kRows];
#pragma unroll
        for (int m = 0; m < kRows; ++m) rows[m] = ds_offsets.load(ds, step * Plan::kStep, m);
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += kColumnsAtOnce) {
          tile::Fragment<Element> columns[kColumnsAtOnce];
#pragma unroll
          for (int c = 0; c < kColumnsAtOnce; ++c)
            columns[c] =
                k_offsets.template load<true>(k, step * Plan::kStep, pass * kColumnTiles + j + c);
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
#pragma unroll
              for (int n = 0; n < 2 * kColumnsAtOnce; ++n) {
                tile::multiply_term<typename C::Arch>((first == 0 ? dq : partial).x[m][2 * j + n],
                                                      rows[m], columns[n / 2], n % 2, term);
              }
            }
          }
        }
      }
      if (first != 0) dq.add(partial, 0);
    }
  }

  // Adds dq to the sums over all key tiles, in the order of dq_index.
  TILEWISE_DEVICE static void reduce(const Sums& dq, float* tile, int pass, int warp, int lane) {
    const int first = pass * (Plan::kDqPassColumns / 8);
    float* to = tile + warp * (Plan::kDqRows * Plan::kDqColumns) + dq_index<C>(0, 0, 0, lane);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < Plan::kDqPassColumns / 8; ++n) {
        if constexpr (C::Arch::kVectorReduction) {
          ptx::red_add_v4_f32(to + dq_index<C>(m, first + n, 0, 0), dq.x[m][n]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ptx::red_add_f32(to + dq_index<C>(m, first + n, e, 0), dq.x[m][n][e]);
        }
      }
    }
  }

 private:
  tile::TransposedA<Element, Plan::kScoreRowBytes> ds_;
  tile::TransposedB<Element, Plan::kRowBytes> k_;
};

}  // namespace tilewise::cuda::mma_sync
