// What the general form of the forward does to scores and weights: softcap, ALiBi, bias, dropout.
#pragma once

#include "cuda/common/score_terms.h"
#include "cuda/mma_sync/forward_softmax.h"

namespace tilewise::cuda::mma_sync {

template <class C>
struct GeneralTerms {
  ScoreTerms terms;
  bool on_scores;  // anything but the scale

  TILEWISE_DEVICE GeneralTerms(const Problem& p, float scale) : terms(ScoreTerms::of(p)) {
    terms.score.scale = scale;
    on_scores = p.softcap != 0.0f || p.alibi_slopes != nullptr || p.bias != nullptr;
  }

  // Products become scores in natural units.
  TILEWISE_DEVICE void apply(const Problem& p, const BlockWork& work, Scores<C>& s, int32_t tile,
                             const LanePlace<C>& place) const {
    const int32_t key0 = tile * C::kForward.keys + place.column;
#pragma unroll
    for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t r = min(place.row(m, h), work.rows.count - 1);
        const RowTerms row =
            ScoreTerms::row(p, work.sequence, work.rows.first + work.rows.row(r), work.head(r));
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s.x[m][n][2 * h + e];
            // Past the last key there is no bias; the mask follows.
            x = terms.at(x, row, min(key0 + 8 * n + e, work.tiles.keys - 1)).value;
          }
        }
      }
    }
  }

  // Zeroes the weights that are dropped. Eight keys of a row are one block of random words, and of
  // its four words each lane of a quad needs one: every lane computes one block of four, then words
  // are exchanged.
  TILEWISE_DEVICE void drop(const Problem& p, const BlockWork& work, Scores<C>& s, int32_t tile,
                            const LanePlace<C>& place) const {
    constexpr int kBlocks = C::kForward.keys / 8;  // of a row
    constexpr int kAll = C::kForward.warp_rows / 8 * kBlocks;
    const int t = place.column / 2;
#pragma unroll
    for (int first = 0; first < kAll; first += 4) {
      const int mine = first + t;
      const int32_t r = place.row0 + mine / kBlocks * 8;
      const auto block = static_cast<uint32_t>(tile * kBlocks + mine % kBlocks);
      const auto row = static_cast<uint32_t>(work.rows.first + work.rows.row(r));
      const auto head = static_cast<uint32_t>(work.sequence.batch * p.heads_q + work.head(r));
      const PhiloxState<uint32_t> bits = terms.dropout.block<DeviceMath>(block, row, head);
      uint32_t word[4] = {bits.c0, bits.c1, bits.c2, bits.c3};
      exchange(word, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of = first + i;
        float* x = &s.x[of / kBlocks / 2][of % kBlocks][of / kBlocks % 2 * 2];
        if ((word[i] & 0xffffu) < terms.dropout.threshold) x[0] = 0.0f;
        if ((word[i] >> 16) < terms.dropout.threshold) x[1] = 0.0f;
      }
    }
  }

 private:
  // Lane t of a quad gives word j to lane j and receives into word[i] that of lane i.
  TILEWISE_DEVICE static void exchange(uint32_t (&word)[4], int t) {
    permute(word, t);
#pragma unroll
    for (int d = 1; d < 4; ++d) word[d] = ptx::shuffle_xor(word[d], d);
    permute(word, t);
  }
  // word[i] = word[i ^ t]
  TILEWISE_DEVICE static void permute(uint32_t (&word)[4], int t) {
    const uint32_t a[4] = {t & 1 ? word[1] : word[0], t & 1 ? word[0] : word[1],
                           t & 1 ? word[3] : word[2], t & 1 ? word[2] : word[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = t & 2 ? a[i ^ 2] : a[i];
  }
};

}  // namespace tilewise::cuda::mma_sync
