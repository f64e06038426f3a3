// The correction role of the forward: four warps, a row of each tile per thread. They scale the
// sums of the output when a maximum has grown, and store the results.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/common/report.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/tcgen05/forward_shared.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tcgen05 {

template <class C>
class ForwardCorrection {
 public:
  using Element = typename C::Element;
  using Shared = ForwardShared<C>;

  TILEWISE_DEVICE ForwardCorrection(const ForwardParams& p, const Shared& shared, int row)
      : p_(p), shared_(shared), row_(row) {}

  TILEWISE_DEVICE void run() const {
    const KeyTiles& tiles = shared_.work_tile().tiles;
    const int32_t steps = tiles.last - tiles.first + 1;
    if (steps > 0) {
      for (int t = 0; t < Shared::kQTiles; ++t)
        shared_.weights_full(t).arrive_as_warp();  // the first product overwrites the sums
    }
#pragma unroll 1
    for (int32_t step = 1; step < steps; ++step) {
#pragma unroll 1
      for (int t = 0; t < Shared::kQTiles; ++t) {
        shared_.factors_full(t).wait((step - 1) & 1);
        ptx::tcgen05_fence_after();
        const float factor = ptx::float_of(ptx::ld_shared_b32(shared_.factor(t, row_)));
        if (ptx::any(factor != 1.0f)) scale_sums(t, factor);
        ptx::tcgen05_fence_before();
        shared_.weights_full(t).arrive_as_warp();
      }
    }
#pragma unroll 1
    for (int t = 0; t < Shared::kQTiles; ++t) store(t, steps > 0);
  }

 private:
  static constexpr int kColumns = 16;  // that are loaded together

  struct Row {
    float factor;
    LogSum sum;
    bool exact;  // otherwise the row has to be recomputed
  };

  TILEWISE_DEVICE ptx::TensorAddress sums(int t) const {
    return shared_.out(t) + Shared::lanes_of(row_);
  }

  TILEWISE_DEVICE void scale_sums(int t, float factor) const {
#pragma unroll 1
    for (uint32_t c = 0; c < C::kHeadDim; c += kColumns) {
      uint32_t o[kColumns];
      ptx::tcgen05_ld(o, sums(t) + c);
      ptx::tcgen05_wait_ld(o);
#pragma unroll
      for (uint32_t& x : o) x = ptx::bits_of(ptx::float_of(x) * factor);
      ptx::tcgen05_st(sums(t) + c, o);
    }
    ptx::tcgen05_wait_st();
  }

  // The factor of the output and the log-sum of row `r` of the work tile.
  TILEWISE_DEVICE Row finish_row(int t, int32_t r, bool has_keys) const {
    const Problem& p = p_.problem;
    const QueryTile& work_tile = shared_.work_tile();
    RowNormaliser row{kNoKey, 0.0f};
    if (has_keys) {
      row.m = ptx::float_of(ptx::ld_shared_b32(shared_.row_m(t, row_)));
      row.l = ptx::float_of(ptx::ld_shared_b32(shared_.row_l(t, row_)));
    }
    Row result;
    result.exact =
        !has_keys || !needs_recompute<C::kForward.keys, false>(p, work_tile, r, row.m, row.l);
    float factor = 1.0f;
    if (p.sinks != nullptr) factor = row.add_sink(p.sinks[work_tile.rows.first_head]);
    result.factor = row.l == 0.0f ? 0.0f : factor * ptx::rcp_approximate(row.l);
    result.sum.lse = row.lse<Element>();
    result.sum.low = 0.0f;
    if (p.lse_low != nullptr)
      result.sum.low = row.low<Element>(result.sum.lse, positive_scale(score_of(p).scale));
    if (!work_tile.sequence.fits) [[unlikely]] {
      result.factor = result.sum.lse = ptx::float_of(0x7fc00000u);
      result.exact = true;
    }
    return result;
  }

  TILEWISE_DEVICE void store(int t, bool has_keys) const {
    const Problem& p = p_.problem;
    const QueryTile& work_tile = shared_.work_tile();
    if (has_keys) {
      shared_.rows_full(t).wait(0);
      shared_.out_full(t).wait(0);
      ptx::tcgen05_fence_after();
    }
    const int32_t r = t * Shared::kRows + row_;
    const bool exists = r < work_tile.rows.count;
    const Row row = finish_row(t, exists ? r : 0, has_keys);
    char* const out = static_cast<char*>(p.out.data) +
                      work_tile.offset_unpacked(p.out, exists ? r : 0) * Element::kBytes;
    float zero = 0.0f;  // becomes NaN with any infinity or NaN
#pragma unroll 1
    for (int c = 0; c < C::kHeadDim; c += kColumns) {
      uint32_t o[kColumns] = {};
      if (has_keys) {
        ptx::tcgen05_ld(o, sums(t) + static_cast<uint32_t>(c));
        ptx::tcgen05_wait_ld(o);
      }
#pragma unroll
      for (int chunk = 0; chunk < kColumns / 8; ++chunk) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float low = ptx::float_of(o[8 * chunk + 2 * w]);
          const float high = ptx::float_of(o[8 * chunk + 2 * w + 1]);
          zero = ptx::fma(low, 0.0f, ptx::fma(high, 0.0f, zero));
          words[w] = tile::pack<Element>(low * row.factor, high * row.factor);
        }
        if (exists && c + 8 * chunk < p.head_dim_v)
          ptx::st_global_v4_b32(out + (c + 8 * chunk) * Element::kBytes, words);
      }
    }
    if (!exists) return;
    store_log_sum(p, lse_index(p, work_tile, r), row.sum);
    if (!row.exact || !(zero == 0.0f)) [[unlikely]]
      p_.flags.data[ptx::block_index()] = 1;
  }

  const ForwardParams& p_;
  const Shared& shared_;
  int row_;
};

}  // namespace tilewise::cuda::tcgen05
