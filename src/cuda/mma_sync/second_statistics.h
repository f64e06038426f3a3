// The statistics of query rows in the second derivatives, in shared memory: of the rows that a CTA
// owns, or of the tile of rows that it walks.
#pragma once

#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/params.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

// The statistics of one row, in the order in which they lie in shared memory (SecondParams).
struct SecondStatistics {
  static constexpr int kCount = 5;

  float minus_lse;
  float minus_low;
  float lse_tangent;
  float delta;
  float second_delta;
};

// Tables of kRows rows each, one per statistic.
template <class C, int kRows>
class StatisticsTable {
 public:
  static constexpr int kBytes = SecondStatistics::kCount * kRows * 4;

  TILEWISE_DEVICE explicit StatisticsTable(ptx::SharedAddress at) : at_(at) {}

  // Copies the statistics of rows, which start at index `first` of the arrays.
  TILEWISE_DEVICE void copy(const SecondParams& p, int64_t first) const {
    const int thread = opaque_thread<C>();
    if (thread >= kRows / 4) return;
    const float* const from[SecondStatistics::kCount] = {
        p.row_minus_lse, p.row_minus_low, p.row_lse_tangent, p.row_delta, p.row_second_delta};
#pragma unroll
    for (int i = 0; i < SecondStatistics::kCount; ++i)
      tile::copy_chunk<typename C::Arch>(at_ + static_cast<uint32_t>(i * kRows * 4 + thread * 16),
                                         from[i] + first + thread * 4, 16);
  }

  TILEWISE_DEVICE SecondStatistics row(int row) const {
    float x[SecondStatistics::kCount];
#pragma unroll
    for (int i = 0; i < SecondStatistics::kCount; ++i)
      x[i] =
          ptx::float_of(ptx::ld_shared_b32(at_ + static_cast<uint32_t>(i * kRows * 4 + row * 4)));
    return {x[0], x[1], x[2], x[3], x[4]};
  }
  // Those of an even row and the next one.
  TILEWISE_DEVICE void pair(SecondStatistics (&to)[2], int row) const {
    uint32_t x[SecondStatistics::kCount][2];
#pragma unroll
    for (int i = 0; i < SecondStatistics::kCount; ++i)
      ptx::ld_shared_v2_b32(x[i], at_ + static_cast<uint32_t>(i * kRows * 4 + row * 4));
#pragma unroll
    for (int e = 0; e < 2; ++e)
      to[e] = {ptx::float_of(x[0][e]), ptx::float_of(x[1][e]), ptx::float_of(x[2][e]),
               ptx::float_of(x[3][e]), ptx::float_of(x[4][e])};
  }

 private:
  ptx::SharedAddress at_;
};

// Index of row `row` of a sequence in the arrays of statistics.
TILEWISE_DEVICE int64_t statistics_index(const SecondParams& p, int64_t batch, int32_t head,
                                         int32_t row) {
  return head * p.rows.count(p.problem) + p.rows.first(p.problem, batch) + row;
}

// The statistics of the rows that the CTA owns, which are loaded once.
template <class C>
class OwnedStatistics {
  using Table = StatisticsTable<C, C::kForward.rows()>;

 public:
  static constexpr int kBytes = Table::kBytes;

  TILEWISE_DEVICE explicit OwnedStatistics(ptx::SharedAddress at) : table_(at) {}

  TILEWISE_DEVICE void copy_owned(const SecondParams& p, const QueryTile& tile) const {
    table_.copy(p, statistics_index(p, tile.sequence.batch, tile.rows.first_head, tile.rows.first));
  }
  TILEWISE_DEVICE void copy_walked(const SecondParams&, const QueryTile&, int32_t, int32_t) const {}

  // Calls with(m, n, e, statistics) for each element of a lane's Scores.
  template <class With>
  TILEWISE_DEVICE void for_each_element(const With& with) const {
    const LanePosition position = lane_position<C>();
#pragma unroll
    for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const SecondStatistics row = table_.row(position.row(m, h));
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) with(m, n, 2 * h + e, row);
        }
      }
    }
  }

 private:
  Table table_;
};

// The statistics of the rows that are walked, which are the columns of a lane's Scores.
template <class C>
class WalkedStatistics {
  using Table = StatisticsTable<C, C::kForward.keys>;

 public:
  static constexpr int kBytes = Table::kBytes;

  TILEWISE_DEVICE explicit WalkedStatistics(ptx::SharedAddress at) : table_(at) {}

  TILEWISE_DEVICE void copy_owned(const SecondParams&, const QueryTile&) const {}
  TILEWISE_DEVICE void copy_walked(const SecondParams& p, const QueryTile& tile, int32_t head,
                                   int32_t walked) const {
    table_.copy(p, statistics_index(p, tile.sequence.batch, head, walked * C::kForward.keys));
  }

  template <class With>
  TILEWISE_DEVICE void for_each_element(const With& with) const {
    const int column = lane_position<C>().column;
#pragma unroll
    for (int n = 0; n < C::kForward.keys / 8; ++n) {
      SecondStatistics rows[2];
      table_.pair(rows, 8 * n + column);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) with(m, n, 2 * h + e, rows[e]);
        }
      }
    }
  }

 private:
  Table table_;
};

}  // namespace tilewise::cuda::mma_sync
