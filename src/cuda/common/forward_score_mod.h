// The score modifications of a forward in the general form, on the scores of a whole warp: softcap,
// ALiBi, bias, and dropout of the weights. The scores are tile::Sums, for mma.sync and for wgmma.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/common/score_mod.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda {

// The rows and columns of a tile of scores that a lane holds: element (m, h) of Sums is packed row
// row(m, h), element (n, e) is key 8 n + column + e.
//
// Dropout bits are drawn for blocks of 16 keys of a row, of which a lane holds four keys. So the
// lanes of a quad share the work. A lane draws whole blocks for only one of its two rows (m, 0) and
// (m, 1): the blocks 2 i + drawn_block() of row (m, drawn_row()).
struct LanePosition {
  int32_t row0;
  int32_t column;

  // The position of a thread when each warp holds `warp_rows` rows.
  TILEWISE_DEVICE static LanePosition of(int thread, int warp_rows) {
    const int lane = thread & (ptx::kWarpSize - 1);  // % would allow for negative numbers
    return {thread / ptx::kWarpSize * warp_rows + lane / 4, lane % 4 * 2};
  }
  TILEWISE_DEVICE int32_t row(int m, int h) const { return row0 + m * 16 + h * 8; }
  TILEWISE_DEVICE int lane_of_quad() const { return column / 2; }
  TILEWISE_DEVICE int drawn_row() const { return lane_of_quad() % 2; }
  TILEWISE_DEVICE int drawn_block() const { return lane_of_quad() / 2; }
};

TILEWISE_DEVICE RowScoreMod row_score_mod(const Problem& p, const QueryTile& q_tile, int32_t r) {
  return ScoreMod::row(p, q_tile.sequence, q_tile.rows.first + q_tile.rows.row(r), q_tile.head(r));
}

// ALiBi's slope and diagonal for each row of a lane. Rows past the last one repeat the last one.
template <int kRows>
struct AlibiRows {
  float slope[kRows][2];
  int32_t diagonal[kRows][2];

  TILEWISE_DEVICE static AlibiRows of(const Problem& p, const QueryTile& q_tile,
                                      const LanePosition& position) {
    AlibiRows rows;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowScoreMod row =
            row_score_mod(p, q_tile, min(position.row(m, h), q_tile.rows.count - 1));
        rows.slope[m][h] = row.slope;
        rows.diagonal[m][h] = row.diagonal;
      }
    }
    return rows;
  }
};

// The rows that a lane draws dropout bits for.
template <int kRows>
struct DropoutRows {
  uint32_t row[kRows];
  uint32_t batch_head[kRows];

  TILEWISE_DEVICE static DropoutRows of(const Problem& p, const QueryTile& q_tile,
                                        const LanePosition& position) {
    DropoutRows rows;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int32_t r = position.row(m, 0) + 8 * position.drawn_row();
      rows.row[m] = static_cast<uint32_t>(q_tile.rows.first + q_tile.rows.row(r));
      rows.batch_head[m] = dropout_head(p, q_tile.sequence.batch, q_tile.head(r));
    }
    return rows;
  }
};

// The dropout bits of a tile of weights, as the lanes of a quad have drawn them. A weight is kept
// if its bit is 1.
template <int kRows, int kColumns>
struct KeptBits {
  static constexpr int kSteps = kColumns / 2;      // blocks of 16 keys per row
  static constexpr int kDrawn = (kSteps + 1) / 2;  // blocks that a lane draws for a row
  static constexpr int kWords = (kDrawn + 1) / 2;  // two blocks per word
  static_assert(kColumns % 2 == 0);

  uint32_t word[kRows][kWords];

  // Sets the weights that are not kept to 0.
  TILEWISE_DEVICE void apply(tile::Sums<kRows, kColumns>& s, const LanePosition& position) const {
    for_each([&](int m, int i, int h, int half, uint32_t drawn, int byte) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((drawn >> position.column >> (8 * byte + e) & 1u) == 0)
          s.x[m][2 * i + half][2 * h + e] = 0.0f;
    });
  }
  // The same for weights as 16-bit operands (tile::operand_of), two at a time.
  TILEWISE_DEVICE void apply(uint32_t (&operands)[kSteps][4], const LanePosition& position) const {
    static_assert(kRows == 1);
    // Multiplications by these powers of 2 are shifts on a pipe that has less to do.
    const uint32_t first = 0x80u >> position.column;
    const uint32_t second = 0x40u >> position.column;
    for_each([&](int, int i, int h, int half, uint32_t drawn, int byte) {
      operands[i][2 * half + h] &= ptx::spread_signs(drawn * first, drawn * second, byte);
    });
  }

 private:
  // Calls visit(m, step, h, half, drawn, byte) for each half, 8 keys, of the 16 keys of each step
  // in row (m, h). Bits `column` and column + 1 of byte `byte` of `drawn` decide on the lane's two
  // keys.
  template <class Visit>
  TILEWISE_DEVICE void for_each(const Visit& visit) const {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
          const uint32_t drawn = ptx::shuffle_within<4>(word[m][w], lane);
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            const int step = 4 * w + byte / 2 * 2 + lane / 2;
            if (step < kSteps) visit(m, step, lane % 2, byte % 2, drawn, byte);
          }
        }
      }
    }
  }
};

// Storage is the type of q; a bias has this type or is fp32.
template <class Storage>
struct ForwardScoreMod {
  using Math = std::conditional_t<sizeof(Storage) == 2, HalfMath, DeviceMath>;

  float scale;
  float softcap;
  typename Math::ScaledTanh tanh;
  Dropout dropout;

  TILEWISE_DEVICE ForwardScoreMod(const Problem& p, float scale_)
      : scale(scale_), softcap(p.softcap), tanh(scale_ / p.softcap), dropout(dropout_of(p)) {}

  // The unit of the scores after apply(), in natural units.
  TILEWISE_DEVICE float unit(const Problem& p) const {
    return p.bias != nullptr ? 1.0f : unit_before_bias(p);
  }
  TILEWISE_DEVICE float unit_before_bias(const Problem& p) const {
    return p.alibi_slopes != nullptr ? 1.0f : softcap != 0.0f ? softcap : scale;
  }

  // Turns products into scores, in units of unit(). Each option is one pass over the scores, so
  // that its condition is tested once instead of once per score.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE void apply(const Problem& p, const QueryTile& q_tile,
                             tile::Sums<kRows, kColumns>& s, int32_t tile,
                             const LanePosition& position) const {
    if (softcap != 0.0f) tanh.apply(s.flat());
    if (p.alibi_slopes != nullptr)
      add_alibi(AlibiRows<kRows>::of(p, q_tile, position), s,
                tile * 8 * kColumns + position.column);
    if (p.bias == nullptr) return;
    if (p.bias_dtype == TILEWISE_FLOAT32)
      add_bias<float>(p, q_tile, s, tile, position);
    else
      add_bias<Storage>(p, q_tile, s, tile, position);
  }

  // key0: the lane's first key. Distances are computed as floats, where |x| costs no instruction.
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

  template <class T>
  TILEWISE_DEVICE static float bias_of(const Problem&, T x) {
    return to_float(x);
  }
  TILEWISE_DEVICE static float bias_of(const Problem& p, EitherHalf x) {
    return p.bias_dtype == TILEWISE_BFLOAT16 ? to_float(BFloat16{x.bits})
                                             : ptx::cvt_f32_f16(x.bits);
  }

  // Loads bias where it is used, element by element; none is loaded past the last key.
  template <class T, int kRows, int kColumns>
  TILEWISE_DEVICE void add_bias(const Problem& p, const QueryTile& q_tile,
                                tile::Sums<kRows, kColumns>& s, int32_t tile,
                                const LanePosition& position) const {
    const int32_t key0 = tile * 8 * kColumns + position.column;
    const int32_t keys = q_tile.tiles.keys - key0;
    const float unit = unit_before_bias(p);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowScoreMod row =
            row_score_mod(p, q_tile, min(position.row(m, h), q_tile.rows.count - 1));
        const T* const bias = static_cast<const T*>(p.bias) + row.bias + key0;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s.x[m][n][2 * h + e];
            x *= unit;
            if (8 * n + e < keys) x += bias_of(p, bias[8 * n + e]);
          }
        }
      }
    }
  }

  // Draws the bits of a tile. Dropout must be on.
  template <int kRows, int kColumns>
  TILEWISE_DEVICE KeptBits<kRows, kColumns> draw(const DropoutRows<kRows>& rows, int32_t tile,
                                                 const LanePosition& position) const {
    using Kept = KeptBits<kRows, kColumns>;
    const auto first = static_cast<uint32_t>(tile * Kept::kSteps + position.drawn_block());
    Kept kept;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const auto counter = [&](int i) {
        return dropout.counter(first + static_cast<uint32_t>(2 * i), rows.row[m],
                               rows.batch_head[m]);
      };
#pragma unroll
      for (int w = 0; w < Kept::kWords; ++w) {
        kept.word[m][w] = 2 * w + 1 < Kept::kDrawn
                              ? dropout.kept_keys<DeviceMath>(counter(2 * w), counter(2 * w + 1))
                              : dropout.kept_keys<DeviceMath>(counter(2 * w));
      }
    }
    return kept;
  }
};

}  // namespace tilewise::cuda
