// The pipeline of a configuration, and the two matrix products of the forward.
#pragma once

#include <numeric>
#include <type_traits>

#include "cuda/mma_sync/forward_column_warps.h"
#include "cuda/mma_sync/forward_kv_pipeline.h"
#include "cuda/mma_sync/forward_latent_pipeline.h"
#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/mma_sync/forward_tf32_split.h"
#include "cuda/mma_sync/forward_warp_pipeline.h"

namespace tilewise::cuda::mma_sync {

template <class C>
auto pipeline_of() {
  if constexpr (C::kWarpPipeline)
    return std::type_identity<WarpPipeline<C>>{};
  else if constexpr (C::kLatent)
    return std::type_identity<LatentPipeline<C>>{};
  else if constexpr (C::kTf32SplitOnLoad)
    return std::type_identity<Tf32SplitPipeline<C>>{};
  else
    return std::type_identity<KvPipeline<C>>{};
}
template <class C>
using Pipeline = typename decltype(pipeline_of<C>())::type;

// The two matrix products of a warp, over its columns of q and k and of v. Each calls
// load_ahead(part) between its instructions to issue part `part` of the copies of a later tile.
template <class C>
struct Products {
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  static constexpr int kRows = C::kForward.warp_rows / 16;
  static constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  static constexpr int kStep = tile::kStep<Element>;
  static constexpr int kParts = Pipeline<C>::kParts;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr bool kOneSum = tile::kStepsInCore<Element> == 0;  // in one accumulator
  static constexpr int kInFlight = 8;  // accumulators; products into one wait for each other
  static constexpr int kPerLoad = C::kFloat8 ? 2 : 1;  // steps, or groups of 16 columns, per load

  tile::LaneOffsets<kRowBytes, tile::Lanes::rows_first> q_lanes{ptx::lane_index()};
  typename Pipeline<C>::KeyLanes k_lanes{ptx::lane_index()};
  typename Pipeline<C>::ValueLanes v_lanes{ptx::lane_index()};

  // s = q k^T, where q and k point to the first column of the warp
  template <class LoadAhead>
  TILEWISE_DEVICE void scores(Scores<C>& s, ptx::SharedAddress q, ptx::SharedAddress k,
                              LoadAhead&& load_ahead) const {
    constexpr int kSteps = C::kWarpColumns / kStep;
    constexpr int kInCore = kOneSum ? kSteps : std::gcd(kSteps, tile::kStepsInCore<Element>);
    constexpr int kKeysAtOnce = kOneSum ? 1 : min(kKeys / 16, max(1, kInFlight / (2 * kRows)));
    constexpr int kGroups = kOneSum ? 1 : max(1, kInFlight / (2 * kRows * kKeysAtOnce));
    constexpr int kStepsApart = kPerLoad > 1 ? 1 : kInCore;  // of neighbouring fragments
#pragma unroll
    for (int group = 0; group < kSteps / kInCore; group += kGroups) {
      const int begin = group * kInCore;
      Scores<C> partial[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) partial[g].fill(0.0f);
#pragma unroll
      for (int step = begin; step < begin + kInCore; step += kPerLoad) {
        tile::Fragment<Element> a[kGroups * kPerLoad][kRows];
#pragma unroll
        for (int g = 0; g < kGroups * kPerLoad; ++g) {
#pragma unroll
          for (int m = 0; m < kRows; ++m)
            a[g][m] =
                tile::load_presplit<Element>(q_lanes.address(q, 16 * m, step + g * kStepsApart));
        }
#pragma unroll
        for (int j = 0; j < kKeys / 16; j += kKeysAtOnce) {
          tile::Fragment<Element> b[kGroups * kPerLoad][kKeysAtOnce];
#pragma unroll
          for (int i = 0; i < kGroups * kKeysAtOnce; ++i) {
            load_keys(b, i,
                      k_lanes.address(k, 16 * (j + i % kKeysAtOnce),
                                      step / kPerLoad + i / kKeysAtOnce * kInCore));
          }
          // The loop over terms is outermost, since the terms of one accumulator wait for each
          // other.
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int g = 0; g < kGroups * kPerLoad; ++g) {
#pragma unroll
              for (int m = 0; m < kRows; ++m) {
#pragma unroll
                for (int n = 0; n < 2 * kKeysAtOnce; ++n) {
                  tile::multiply_term<Arch>(partial[g / kPerLoad].x[m][2 * j + n], a[g][m],
                                            b[g][n / 2], n % 2, term);
                }
              }
            }
          }
        }
        load_ahead_between(step, kSteps, load_ahead);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group + g == 0)
          s = partial[g];
        else
          s.add(partial[g], 0);
      }
    }
  }

  // s += q k^T over the columns of a latent cache that follow the values, where q and k point to
  // column 0. Column warps take different steps of them.
  TILEWISE_DEVICE void add_scores_after_values(Scores<C>& s, ptx::SharedAddress q,
                                               ptx::SharedAddress k) const {
    constexpr int kSteps = (C::kHeadDim - C::kHeadDimV) / (kStep * C::kColumnWarps);
    constexpr uint32_t kFirstByte = C::kHeadDimV * Element::kBytes;
    static_assert(kSteps * kStep * C::kColumnWarps == C::kHeadDim - C::kHeadDimV);
    const int32_t first_step = column_warp<C>() * kSteps;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      tile::Fragment<Element> a[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m)
        a[m] = tile::load<Element>(q_lanes.address(q + kFirstByte, 16 * m, first_step + i));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        const tile::Fragment<Element> b =
            tile::load<Element>(k_lanes.address(k + kFirstByte, 16 * j, first_step + i));
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int n = 0; n < 2; ++n) tile::multiply_term<Arch>(s.x[m][2 * j + n], a[m], b, n, 0);
        }
      }
    }
  }

  // o += p v, where v points to the first column of the warp
  template <class LoadAhead>
  TILEWISE_DEVICE void values(Outputs<C>& o, const Scores<C>& p, ptx::SharedAddress v,
                              LoadAhead&& load_ahead) const {
    constexpr int kSteps = kKeys / kStep;
    constexpr int kInCore = kOneSum ? 1 : std::gcd(kSteps, tile::kStepsInCore<Element>);
    constexpr int kColumns = C::kWarpColumns / 16;
    // Registers of o and p. `kFits` adds accumulators and operands of the columns in flight; a
    // thread has 255, and 47 are left for addresses, statistics and copies.
    constexpr int kLiveRegisters = kRows * C::kWarpColumns / 2 + kInCore * kRows * 8;
    constexpr int kMaxColumns = max(1, kInFlight / (2 * kRows));
    constexpr bool kFits = kLiveRegisters + kMaxColumns * (8 * kRows + 8) <= 208;
    constexpr int kColumnsAtOnce = kOneSum ? kPerLoad
                                   : kFits ? kMaxColumns
                                           : max(1, kMaxColumns / 2);
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += kInCore) {
      tile::Fragment<Element> a[kInCore][kRows];
#pragma unroll
      for (int i = 0; i < kInCore; ++i) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) a[i][m] = tile::operand_of<Element>(p.x[m], begin + i);
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += kColumnsAtOnce) {
        tile::Sums<kRows, 2 * kColumnsAtOnce> partial;
        partial.fill(0.0f);
#pragma unroll
        for (int i = 0; i < kInCore; ++i) {
          tile::Fragment<Element> b[kColumnsAtOnce];
          load_values(b, v, (begin + i) * kStep, j);
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
#pragma unroll
              for (int n = 0; n < 2 * kColumnsAtOnce; ++n) {
                float (&sum)[4] = kOneSum ? o.x[m][2 * j + n] : partial.x[m][n];
                tile::multiply_term<Arch>(sum, a[i][m], b[n / 2], n % 2, term);
              }
            }
          }
        }
        if (!kOneSum) {
          o.add(partial, 2 * j);
          load_ahead_between(begin * kColumns + j * kInCore, kSteps * kColumns, load_ahead);
        }
      }
      if (kOneSum) load_ahead_between(begin, kSteps, load_ahead);
    }
  }

 private:
  // Load `i` of a step; loads are ordered by group, then by keys.
  template <int kFragments, int kKeyGroups>
  TILEWISE_DEVICE static void load_keys(tile::Fragment<Element> (&b)[kFragments][kKeyGroups], int i,
                                        ptx::SharedAddress address) {
    tile::Fragment<Element>& first = b[i / kKeyGroups][i % kKeyGroups];
    if constexpr (C::kFloat8) {
      tile::load_float8<C::kConverts>(first, b[1][0], address);
    } else if constexpr (C::kTf32SplitOnLoad) {
      first = tile::load_split(address, Pipeline<C>::kTileBytes);
    } else {
      first = tile::load<Element>(address);
    }
  }

  // Loads kStep rows from `row` on; fragment c has the 16 columns from 16 * (column + c) on.
  template <int kFragments>
  TILEWISE_DEVICE void load_values(tile::Fragment<Element> (&b)[kFragments], ptx::SharedAddress v,
                                   int row, int column) const {
    if constexpr (C::kFloat8) {
      v_lanes.load(b, v, row, column / kPerLoad);
    } else {
#pragma unroll
      for (int c = 0; c < kFragments; ++c) b[c] = v_lanes.load_whole(v, row, column + c);
    }
  }

  template <class LoadAhead>
  TILEWISE_DEVICE static void load_ahead_between(int step, int steps, LoadAhead& load_ahead) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (step == part * steps / kParts) load_ahead(part);
    }
  }
};

}  // namespace tilewise::cuda::mma_sync
