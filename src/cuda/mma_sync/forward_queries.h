// The queries of a CTA in shared memory: how they are loaded, and how they are prepared for the
// first product.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_descales.h"
#include "cuda/mma_sync/forward_kv_pipeline.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/tile/float8.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda::mma_sync {

// Copies the rows of the tile in `view`, which is q or has its layout, to the Q tile at `q`.
template <class C>
TILEWISE_DEVICE void load_query_rows(const tilewise_tensor& view, int64_t head_dim,
                                     const QueryTile& q_tile, ptx::SharedAddress q) {
  using Element = typename C::Element;
  constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  const int columns = static_cast<int>(head_dim);
  if (!C::kGeneral && !C::kWarpPipeline && !q_tile.rows.packed()) {
    using Lanes = tile::CopyLanes<C::kForward.threads(), C::kForward.rows(), kRowBytes>;
    const Lanes lanes(row_thread<C>());
    bool exists[Lanes::kColumns];
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column)
      exists[column] = lanes.chunk_of(column) * (16 / Element::kBytes) < columns;
    const char* row = static_cast<const char*>(view.data) +
                      q_tile.offset_unpacked(view, lanes.row) * Element::kBytes + lanes.chunk * 16;
    copy_rows<C>(q, lanes, row, view.stride_row * Element::kBytes, q_tile.rows.count - lanes.row,
                 exists);
    return;
  }
  using Rows = PackedRows<C>;
  const Rows rows(q_tile, view);
  const ptx::SharedAddress q_of_warp = q + rows.first() * kRowBytes;
  const bool aligned = !C::kGeneral || rows_are_aligned<Element>(view, columns);
#pragma unroll Rows::kPassesInFlight
  for (int pass = 0; pass < Rows::Lanes::kPasses; ++pass) {
    const int64_t offset = rows.offset(pass);
    if (!rows.lanes.has(pass)) continue;
    const char* const row =
        rows.exists(pass) ? static_cast<const char*>(view.data) + offset : nullptr;
#pragma unroll
    for (int column = 0; column < Rows::Lanes::kColumns; ++column) {
      copy_row_chunk<C, Element>(q_of_warp + rows.lanes.offset(pass, column), row,
                                 rows.lanes.chunk_of(column), columns, aligned);
    }
  }
}

template <class C>
TILEWISE_DEVICE void load_queries(const Problem& p, const QueryTile& q_tile, ptx::SharedAddress q) {
  load_query_rows<C>(p.q, p.head_dim, q_tile, q);
}

// With a float8 cache, queries become F16 in the column order of the cache. BF16 has a wider range
// of exponents than F16, so its rows are multiplied by powers of two that give their largest number
// the highest exponent of F16; what F16 cannot hold then is below 2^-40 of that number. A quad
// prepares the rows that its accumulators belong to.
template <class C>
class Float8Queries {
 public:
  static constexpr int kRows = C::kForward.warp_rows / 16;

  TILEWISE_DEVICE Float8Queries(const Problem& p, ptx::SharedAddress q_of_warp, bool negate)
      : q_(q_of_warp), bf16_(p.dtype == TILEWISE_BFLOAT16), negate_(negate) {}

  TILEWISE_DEVICE RowDescales<kRows> prepare() const {
    RowDescales<kRows> descales;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        descales.x[m][h] = prepare(16 * m + 8 * h + ptx::lane_index() / 4) * C::kKvUnit;
    }
    ptx::sync_warp();
    return descales;
  }

 private:
  static constexpr int kSteps = C::kHeadDim / 64;  // steps of 64 columns, 16 per lane of a quad
  static_assert(C::kHeadDim % 64 == 0);
  using Swizzle = tile::Swizzle<C::kHeadDim * 2>;
  using Words = uint32_t[kSteps][2][4];  // the columns of a row that a lane holds

  TILEWISE_DEVICE ptx::SharedAddress chunk(int row, int step, int half) const {
    const int pair = ptx::lane_index() % 4 + 4 * step;
    return q_ + Swizzle::offset(row, 2 * pair + half);
  }

  // Prepares a row and returns its descale.
  TILEWISE_DEVICE float prepare(int row) const {
    Words x;
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i)
      ptx::ld_shared_v4_b32(x[i / 2][i % 2], chunk(row, i / 2, i % 2));
    float descale = 1.0f;
    if (bf16_)
      descale = narrow(x);
    else if (negate_)
      change(x, [](uint32_t pair) { return pair ^ 0x80008000u; });
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      tile::pair_words(x[step][0], x[step][1]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::st_shared_v4_b32(chunk(row, step, half), x[step][half]);
    }
    return descale;
  }

  // Converts BF16 to F16 and returns the descale. Magnitudes of BF16 are ordered like their bits.
  TILEWISE_DEVICE float narrow(Words& x) const {
    uint32_t highs = 0;
    uint32_t lows = 0;
    change(x, [&](uint32_t pair) {
      highs = max(highs, pair & 0x7fffffffu);
      lows = max(lows, pair << 16 & 0x7fffffffu);
      return pair;
    });
    // Exponents of fp32. Factor and descale are normal numbers; infinity gets the factor of the
    // largest finite number.
    constexpr uint32_t kHighest = 127 + 15;
    const uint32_t exponent =
        min(max(tile::quad_max(max(highs, lows)) >> 23, kHighest - 126), kHighest + 112);
    const uint32_t sign = negate_ ? 0x80000000u : 0;
    const float factor = ptx::float_of((127 + kHighest - exponent) << 23 | sign);
    change(x, [&](uint32_t pair) {
      return ptx::cvt_f16x2(tile::low_of<BF16>(pair) * factor, tile::high_of<BF16>(pair) * factor);
    });
    return ptx::float_of((127 - kHighest + exponent) << 23);
  }

  template <class Change>
  TILEWISE_DEVICE static void change(Words& x, const Change& change) {
#pragma unroll
    for (auto& step : x) {
#pragma unroll
      for (auto& words : step) {
#pragma unroll
        for (uint32_t& pair : words) pair = change(pair);
      }
    }
  }

  ptx::SharedAddress q_;
  bool bf16_;
  bool negate_;
};

// Prepares a warp's own rows: they change sign when the scale of the scores is negative, fp32 is
// presplit, and with a float8 cache they are converted to F16. Returns the descales of a lane's
// rows.
template <class C>
TILEWISE_DEVICE auto prepare_queries(const Problem& p, ptx::SharedAddress q, bool negate) {
  constexpr int kBytes = kOwnRows<C> * C::kHeadDim * C::Element::kBytes;
  const ptx::SharedAddress own_rows = q + row_thread<C>() / ptx::kWarpSize * kBytes;
  if constexpr (C::kFloat8) {
    return Float8Queries<C>(p, own_rows, negate).prepare();
  } else {
    constexpr bool kPresplit = std::is_same_v<typename C::Element, F32>;
    if (!kPresplit && !negate) return NoDescale{};
    const uint32_t signs = !negate ? 0 : C::Element::kBytes == 2 ? 0x80008000u : 0x80000000u;
    for (int at = ptx::lane_index() * 16; at < kBytes; at += ptx::kWarpSize * 16) {
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, own_rows + at);
      for (uint32_t& word : x) word = kPresplit ? tile::presplit(word ^ signs) : word ^ signs;
      ptx::st_shared_v4_b32(own_rows + at, x);
    }
    ptx::sync_warp();
    return NoDescale{};
  }
}

}  // namespace tilewise::cuda::mma_sync
