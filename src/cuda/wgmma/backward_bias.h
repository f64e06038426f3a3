// A bias in the dtype of q, k and v, in the backward by keys.
#pragma once

#include "cuda/common/score_mod.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"
#include "cuda/wgmma/backward_consumer.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

// A row of S^T is a key and a row of the bias is a query. So pairs of keys are loaded, one query
// tile before their use, and transposed.
template <class C>
class BiasOfKeys {
  using Storage = typename C::Element::Storage;
  static constexpr int kGroups = BackwardPlan<C>::kQueries / 8;

 public:
  // `key`: the warp's first key.
  TILEWISE_DEVICE BiasOfKeys(const Problem& p, const TileDescriptor& work_tile, int32_t key)
      : p_(p),
        work_tile_(work_tile),
        key_(key),
        in_pairs_(bias_rows_are_aligned(p, 4) && key + 16 <= work_tile.keys) {}

  // Loads the bias of a query tile. Rows past the last one read the bias of the last one; keys past
  // the last one have a bias of 0.
  TILEWISE_DEVICE void prefetch(int32_t first_row, int32_t head) {
    const int32_t row = first_row + ptx::lane_index() / 4;
    const int32_t column = key_ + ptx::lane_index() % 4 * 2;
    const Storage* const bias = static_cast<const Storage*>(p_.bias) +
                                work_tile_.batch * p_.bias_stride_batch +
                                head * p_.bias_stride_head + column;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const Storage* const at = bias + min(row + 8 * j, work_tile_.rows - 1) * p_.bias_stride_row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (in_pairs_) {
          pairs_[j][half] = ptx::ld_global_b32(at + 8 * half);
        } else {
          const int32_t keys = work_tile_.keys - column - 8 * half;
          const uint32_t low = keys > 0 ? at[8 * half].bits : 0u;
          const uint32_t high = keys > 1 ? at[8 * half + 1].bits : 0u;
          pairs_[j][half] = low | high << 16;
        }
      }
    }
  }

  // The bias of key g + 8 half, g = lane / 4, and of two queries of group j: 2 t and 2 t + 1,
  // t = lane % 4.
  TILEWISE_DEVICE uint32_t pair(int j, int half) const {
    return ptx::movmatrix_trans(pairs_[j][half]);
  }

 private:
  const Problem& p_;
  const TileDescriptor& work_tile_;
  int32_t key_;
  bool in_pairs_;
  uint32_t pairs_[kGroups][2];
};

}  // namespace tilewise::cuda::wgmma
