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
//
// What comes in blocks of eight keys of a row, of which a lane needs one pair in four, each lane of
// a quad gets whole, for another block, before pairs are exchanged (tile::quad_transpose): of rows
// (m, 0) and (m, 1) those of row (m, block_row()), blocks 2 i + first_block(). Pair j then comes
// from row (m, j % 2), block 2 i + j / 2.
struct LanePlace {
  int32_t row0;
  int32_t column;

  // Of a thread, when warps hold `warp_rows` rows each.
  TILEWISE_DEVICE static LanePlace of(int thread, int warp_rows) {
    const int lane = thread % ptx::kWarpSize;
    return {thread / ptx::kWarpSize * warp_rows + lane / 4, lane % 4 * 2};
  }
  TILEWISE_DEVICE int32_t row(int m, int h) const { return row0 + m * 16 + h * 8; }
  TILEWISE_DEVICE int lane_of_quad() const { return column / 2; }
  TILEWISE_DEVICE int block_row() const { return lane_of_quad() % 2; }
  TILEWISE_DEVICE int first_block() const { return lane_of_quad() / 2; }
};

TILEWISE_DEVICE RowTerms row_terms(const Problem& p, const BlockWork& work, int32_t r) {
  return ScoreTerms::row(p, work.sequence, work.rows.first + work.rows.row(r), work.head(r));
}

// What ALiBi knows of the rows of a lane. Rows that do not exist stand for the last one.
template <int kRows>
struct AlibiRows {
  float slope[kRows][2];
  int32_t diagonal[kRows][2];

  TILEWISE_DEVICE static AlibiRows of(const Problem& p, const BlockWork& work,
                                      const LanePlace& place) {
    AlibiRows rows;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowTerms row = row_terms(p, work, min(place.row(m, h), work.rows.count - 1));
        rows.slope[m][h] = row.slope;
        rows.diagonal[m][h] = row.diagonal;
      }
    }
    return rows;
  }
};

// The weights of a tile that dropout keeps: element (m, n, 2 h + e) of Sums is bit
// 16 h + n - n % 2 + e of word[m][n % 2].
template <int kRows, int kColumns>
struct KeptBits {
  static_assert(kColumns % 2 == 0 && kColumns <= 16);

  uint32_t word[kRows][2];

  // Zeroes the others.
  TILEWISE_DEVICE void apply(tile::Sums<kRows, kColumns>& s) const {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int bit = 16 * (e / 2) + n - n % 2 + e % 2;
          if ((word[m][n % 2] >> bit & 1u) == 0) s.x[m][n][e] = 0.0f;
        }
      }
    }
  }
};

// Storage: that of q, k and v, which a bias may have.
template <class Storage>
struct GeneralTerms {
  using Math = std::conditional_t<sizeof(Storage) == 2, HalfMath, DeviceMath>;

  float scale;
  float softcap;
  typename Math::ScaledTanh tanh;
  Dropout dropout;

  TILEWISE_DEVICE GeneralTerms(const Problem& p, float scale_)
      : scale(scale_), softcap(p.softcap), tanh(scale_ / p.softcap), dropout(dropout_of(p)) {}

  // What the scores are in when all terms have been applied, in natural units.
  TILEWISE_DEVICE float unit(const Problem& p) const {
    return p.bias != nullptr ? 1.0f : unit_before_bias(p);
  }
  TILEWISE_DEVICE float unit_before_bias(const Problem& p) const {
    return p.alibi_slopes != nullptr ? 1.0f : softcap != 0.0f ? softcap : scale;
  }

  // Products become scores, in units of unit(). One pass over the scores per option, so that a
  // switch is asked once and not once per score.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void apply(const Problem& p, const BlockWork& work,
                             tile::Sums<kRows, kColumns>& s, int32_t tile,
                             const LanePlace& place) const {
    if (softcap != 0.0f) tanh.apply(s.flat());
    if (p.alibi_slopes != nullptr)
      add_alibi(AlibiRows<kRows>::of(p, work, place), s, tile * 8 * kColumns + place.column);
    if (p.bias == nullptr) return;
    if (p.bias_dtype == TILEWISE_FLOAT32)
      add_bias<float>(p, work, s, tile, place);
    else
      add_bias<Storage>(p, work, s, tile, place);
  }

  // key0: the lane's first one. Distances are whole numbers, and their sign costs no instruction.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void add_alibi(const AlibiRows<kRows>& rows, tile::Sums<kRows, kColumns>& s,
                                 int32_t key0) const {
    const float unit = softcap != 0.0f ? softcap : scale;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto distance = static_cast<float>(rows.diagonal[m][h] - key0);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s.x[m][n][2 * h + e];
            const float d = __builtin_fabsf(distance - static_cast<float>(8 * n + e));
            x = ptx::fma(x, unit, d * -rows.slope[m][h]);
          }
        }
      }
    }
  }

  // Loaded where it is used, element by element. Past the last key there is none.
  template <class T, int kRows, int kColumns>
  TILEWISE_DEVICE void add_bias(const Problem& p, const BlockWork& work,
                                tile::Sums<kRows, kColumns>& s, int32_t tile,
                                const LanePlace& place) const {
    const int32_t key0 = tile * 8 * kColumns + place.column;
    const int32_t keys = work.tiles.keys - key0;
    const float unit = unit_before_bias(p);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowTerms row = row_terms(p, work, min(place.row(m, h), work.rows.count - 1));
        const T* const bias = static_cast<const T*>(p.bias) + row.bias + key0;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s.x[m][n][2 * h + e];
            x *= unit;
            if (8 * n + e < keys) x += to_float(bias[8 * n + e]);
          }
        }
      }
    }
  }

  // Zeroes the weights that dropout drops.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void drop(const Problem& p, const BlockWork& work, tile::Sums<kRows, kColumns>& s,
                            int32_t tile, const LanePlace& place) const {
    draw<kRows, kColumns>(p, work, tile, place).apply(s);
  }
  template <int kRows, int kColumns>
  TILEWISE_DEVICE KeptBits<kRows, kColumns> draw(const Problem& p, const BlockWork& work,
                                                 int32_t tile, const LanePlace& place) const {
    const auto first = static_cast<uint32_t>(tile * kColumns + place.first_block());
    // 16 bits are at least the threshold: so they are in the upper half of a word, whatever the
    // lower half holds, and a threshold of 2^16 keeps nothing.
    const uint32_t below = (dropout.threshold << 16) - 1;
    KeptBits<kRows, kColumns> kept;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int32_t r = place.row(m, 0) + 8 * place.block_row();
      const auto row = static_cast<uint32_t>(work.rows.first + work.rows.row(r));
      const auto head = static_cast<uint32_t>(work.sequence.batch * p.heads_q + work.head(r));
      uint32_t pairs[4] = {};  // of bits: pair j of block i is bits 2 i and 2 i + 1 of word j
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        const auto block = first + static_cast<uint32_t>(2 * i);
        const PhiloxState<uint32_t> bits = dropout.block<DeviceMath>(block, row, head);
        const uint32_t word[4] = {bits.c0, bits.c1, bits.c2, bits.c3};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (word[j] << 16 > below) pairs[j] |= 1u << 2 * i;
          if (word[j] > below) pairs[j] |= 2u << 2 * i;
        }
      }
      tile::quad_transpose(pairs, place.lane_of_quad());
      kept.word[m][0] = pairs[0] | pairs[1] << 16;
      kept.word[m][1] = pairs[2] | pairs[3] << 16;
    }
    return kept;
  }
};

}  // namespace tilewise::cuda
