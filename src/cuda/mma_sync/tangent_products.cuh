// The products of a warp that the passes jvp and second share: those of two operands and of their
// tangents.
#pragma once

#include "cuda/mma_sync/forward.cuh"

namespace tilewise::cuda::mma_sync {

// Waits until all copies have arrived, and all warps have read what is overwritten next.
template <class C>
TILEWISE_DEVICE void wait_for_all() {
  tile::wait<typename C::Arch, 0>();
  ptx::sync_block();
}

// The first row of the warp in a tile of queries, in bytes. Computed where it is used, as is
// `lane_position`.
template <class C>
TILEWISE_DEVICE uint32_t first_byte_of_warp() {
  constexpr int kWarpBytes = C::kForward.warp_rows * C::kHeadDim * C::Element::kBytes;
  return static_cast<uint32_t>(opaque_thread<C>() / ptx::kWarpSize * kWarpBytes);
}

// Where an operand and its tangent lie. A tangent that is not given is not multiplied.
struct TangentOperand {
  ptx::SharedAddress value;
  ptx::SharedAddress tangent;
  bool has_tangent;
};

template <class C>
struct TangentProducts {
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  static constexpr int kRows = C::kForward.warp_rows / 16;
  static constexpr int kRowBytes = C::kHeadDim * Element::kBytes;

  tile::LaneOffsets<kRowBytes, tile::Lanes::rows_first> q_lanes{ptx::lane_index()};
  tile::LaneOffsets<kRowBytes, tile::Lanes::chunks_first> k_lanes{ptx::lane_index()};

  // s = q k^T and s_tangent = q' k^T + q k'^T, where q has the warp's own rows.
  TILEWISE_DEVICE void compute(Scores<C>& s, Scores<C>& s_tangent, const TangentOperand& q,
                               const TangentOperand& k) const {
    if (q.has_tangent && k.has_tangent)
      compute_given<true, true>(s, s_tangent, q, k);
    else if (q.has_tangent)
      compute_given<true, false>(s, s_tangent, q, k);
    else if (k.has_tangent)
      compute_given<false, true>(s, s_tangent, q, k);
    else
      compute_given<false, false>(s, s_tangent, q, k);
  }

 private:
  template <bool kOfQ, bool kOfK>
  TILEWISE_DEVICE void compute_given(Scores<C>& s, Scores<C>& s_tangent, const TangentOperand& q,
                                     const TangentOperand& k) const {
    s.fill(0.0f);
    s_tangent.fill(0.0f);
#pragma unroll
    for (int step = 0; step < C::kHeadDim / tile::kStep<Element>; ++step) {
      tile::Fragment<Element> a[kRows];
      tile::Fragment<Element> a_tangent[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        a[m] = tile::load<Element>(q_lanes.address(q.value, 16 * m, step));
        if constexpr (kOfQ)
          a_tangent[m] = tile::load<Element>(q_lanes.address(q.tangent, 16 * m, step));
      }
#pragma unroll
      for (int j = 0; j < C::kForward.keys / 16; ++j) {
        const auto b = tile::load<Element>(k_lanes.address(k.value, 16 * j, step));
        multiply(s, a, b, j);
        if constexpr (kOfQ) multiply(s_tangent, a_tangent, b, j);
        if constexpr (kOfK)
          multiply(s_tangent, a, tile::load<Element>(k_lanes.address(k.tangent, 16 * j, step)), j);
      }
    }
  }

  // Adds the products with keys 16 j to 16 j + 15.
  TILEWISE_DEVICE static void multiply(Scores<C>& s, const tile::Fragment<Element> (&a)[kRows],
                                       const tile::Fragment<Element>& b, int j) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tile::multiply_term<Arch>(s.x[m][2 * j + half], a[m], b, half, 0);
    }
  }
};

// Sets the weights and the other factors of pairs outside of the band to 0, even if they are NaN.
template <class C, class... Factors>
TILEWISE_DEVICE void hide(const QueryTile& q_tile, int32_t tile, Scores<C>& weight,
                          Factors&... factors) {
  mask<C>(weight, q_tile, tile);  // no weight is -inf otherwise
#pragma unroll
  for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
    for (int n = 0; n < C::kForward.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (weight.x[m][n][e] != kMinusInfinity) continue;
        weight.x[m][n][e] = 0.0f;
        ((factors.x[m][n][e] = 0.0f), ...);
      }
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
