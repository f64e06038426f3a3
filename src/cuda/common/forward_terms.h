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

// Which blocks of eight keys of a row a lane draws the bits of dropout for.
template <int kRows>
struct DropoutRows {
  uint32_t row[kRows];
  uint32_t batch_head[kRows];

  TILEWISE_DEVICE static DropoutRows of(const Problem& p, const BlockWork& work,
                                        const LanePlace& place) {
    DropoutRows rows;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int32_t r = place.row(m, 0) + 8 * place.block_row();
      rows.row[m] = static_cast<uint32_t>(work.rows.first + work.rows.row(r));
      rows.batch_head[m] = static_cast<uint32_t>(work.sequence.batch * p.heads_q + work.head(r));
    }
    return rows;
  }
};

// The weights of a tile that dropout keeps, in the order of operands (tile::operand_of): the two
// keys of word e of step i are bits bit(i) and 16 + bit(i) of word[m][e].
template <int kRows, int kColumns>
struct KeptBits {
  static constexpr int kSteps = kColumns / 2;
  static_assert(kColumns % 2 == 0 && kSteps <= 8);

  // In the upper halves of bytes: few shifts bring them to the highest bit of one.
  static constexpr int bit(int i) { return 4 + i % 4 + i / 4 * 8; }

  uint32_t word[kRows][4];

  // Zeroes the others.
  TILEWISE_DEVICE void apply(tile::Sums<kRows, kColumns>& s) const {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((word[m][n % 2 * 2 + e / 2] >> (16 * (e % 2) + bit(n / 2)) & 1u) == 0)
            s.x[m][n][e] = 0.0f;
        }
      }
    }
  }
  // The same of operands of 16 bits: two at once.
  TILEWISE_DEVICE void apply(uint32_t (&operands)[kSteps][4]) const {
    static_assert(kRows == 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        operands[i][e] &= ptx::spread_byte_sign(word[0][e] << (7 - bit(i) % 8), bit(i) / 8);
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

  // What dropout, which is on, keeps of a tile.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE KeptBits<kRows, kColumns> draw(const DropoutRows<kRows>& rows, int32_t tile,
                                                 const LanePlace& place) const {
    using Kept = KeptBits<kRows, kColumns>;
    const auto first = static_cast<uint32_t>(tile * kColumns + place.first_block());
    // Halves of 16 bits become `least`, the threshold, where they are kept, and one less where they
    // are not. (A threshold of 2^16 keeps nothing.)
    const uint32_t below = (dropout.threshold - 1) * 0x10001u;
    const uint32_t least = min(dropout.threshold, 0xffffu) * 0x10001u;
    Kept kept;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      uint32_t (&sum)[4] = kept.word[m];  // of 2^bit(i) times what block i became
#pragma unroll
      for (uint32_t& each : sum) each = 0;
      uint32_t all = 0;
#pragma unroll
      for (int i = Kept::kSteps - 1; i >= 0; --i) {
        const PhiloxState<uint32_t> bits = dropout.block<DeviceMath>(
            first + static_cast<uint32_t>(2 * i), rows.row[m], rows.batch_head[m]);
        const uint32_t word[4] = {bits.c0, bits.c1, bits.c2, bits.c3};
        const uint32_t step = 1u << (Kept::bit(i + 1) - Kept::bit(i));
        all = step * all + 1;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sum[j] = step * sum[j] + ptx::clamp_u16x2(word[j], below, least);
      }
      constexpr uint32_t kFirst = 1u << Kept::bit(0);
#pragma unroll
      for (uint32_t& each : sum) each = kFirst * each - kFirst * all * below;
      tile::quad_transpose(sum, place.lane_of_quad());
    }
    return kept;
  }
};

}  // namespace tilewise::cuda
