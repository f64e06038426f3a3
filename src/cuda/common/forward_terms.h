// What the general form of a forward does to scores and weights: softcap, ALiBi, bias, dropout. The
// scores of a warp are tile::Sums: of mma and of wgmma alike.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/common/score_terms.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda {

// Which rows and columns of a tile of scores a lane holds: element (m, h) of Sums is packed row
// row(m, h), element (n, e) key 8 n + column + e.
struct LanePlace {
  int32_t row0;
  int32_t column;

  // Of a thread, when warps hold `warp_rows` rows each.
  TILEWISE_DEVICE static LanePlace of(int thread, int warp_rows) {
    const int lane = thread % ptx::kWarpSize;
    return {thread / ptx::kWarpSize * warp_rows + lane / 4, lane % 4 * 2};
  }
  TILEWISE_DEVICE int32_t row(int m, int h) const { return row0 + m * 16 + h * 8; }
};

// Storage: that of q, k and v, which a bias may have.
template <class Storage>
struct GeneralTerms {
  using Math = std::conditional_t<sizeof(Storage) == 2, HalfMath, DeviceMath>;

  ScoreTerms terms;
  bool on_scores;  // anything but the scale

  TILEWISE_DEVICE GeneralTerms(const Problem& p, float scale) : terms(ScoreTerms::of(p)) {
    terms.score.scale = scale;
    on_scores = p.softcap != 0.0f || p.alibi_slopes != nullptr || p.bias != nullptr;
  }

  // Products become scores in natural units. One pass over the scores per option, so that a switch
  // is asked once and not once per score.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void apply(const Problem& p, const BlockWork& work,
                             tile::Sums<kRows, kColumns>& s, int32_t tile,
                             const LanePlace& place) const {
    const int32_t key0 = tile * 8 * kColumns + place.column;
    const Score score = terms.score;
    if (score.softcap != 0.0f) {
      each(s, work, place, [&](int32_t) {
        return [&](float x, int) { return score.template cap<Math>(x).value; };
      });
    } else {
      each(s, work, place, [&](int32_t) { return [&](float x, int) { return x * score.scale; }; });
    }
    if (p.alibi_slopes != nullptr) {
      each(s, work, place, [&](int32_t r) {
        const RowTerms row = row_terms(p, work, r);
        const auto distance = static_cast<float>(row.diagonal - key0);  // of the lane's first key
        return [=](float x, int n) {
          const float d = distance - static_cast<float>(n);
          return x - row.slope * (d < 0.0f ? -d : d);
        };
      });
    }
    if (p.bias == nullptr) return;
    if (p.bias_dtype == TILEWISE_FLOAT32)
      add_bias<float>(p, work, s, key0, place);
    else
      add_bias<Storage>(p, work, s, key0, place);
  }

  // Zeroes the weights that are dropped. Eight keys of a row are one block of random words, and of
  // its four words each lane of a quad needs one: every lane computes one block of four, then words
  // are exchanged.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void drop(const Problem& p, const BlockWork& work, tile::Sums<kRows, kColumns>& s,
                            int32_t tile, const LanePlace& place) const {
    constexpr int kBlocks = kColumns;  // of a row
    constexpr int kAll = 2 * kRows * kBlocks;
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
      tile::quad_transpose(word, t);
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
  TILEWISE_DEVICE static RowTerms row_terms(const Problem& p, const BlockWork& work, int32_t r) {
    return ScoreTerms::row(p, work.sequence, work.rows.first + work.rows.row(r), work.head(r));
  }

  // Replaces every score x by of_row(packed row)(x, key - first key of the lane). Rows that do not
  // exist stand for the last one.
  template <int kRows, int kColumns, class OfRow>
  TILEWISE_DEVICE static void each(tile::Sums<kRows, kColumns>& s, const BlockWork& work,
                                   const LanePlace& place, OfRow&& of_row) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto change = of_row(min(place.row(m, h), work.rows.count - 1));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            s.x[m][n][2 * h + e] = change(s.x[m][n][2 * h + e], 8 * n + e);
        }
      }
    }
  }

  template <class T, int kRows, int kColumns>
  TILEWISE_DEVICE static void add_bias(const Problem& p, const BlockWork& work,
                                       tile::Sums<kRows, kColumns>& s, int32_t key0,
                                       const LanePlace& place) {
    const int32_t last = work.tiles.keys - 1 - key0;  // past the last key there is no bias
    each(s, work, place, [&](int32_t r) {
      const T* bias = static_cast<const T*>(p.bias) + row_terms(p, work, r).bias + key0;
      return [=](float x, int n) { return n > last ? x : x + to_float(bias[n]); };
    });
  }
};

}  // namespace tilewise::cuda
