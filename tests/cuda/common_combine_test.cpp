// The combine kernel compared with sums in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "cuda/common/kernels.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::Call;
using cuda_test::kNaN;
using tilewise::Sequence;
using tilewise::to_float;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Partial results, one after the other, each with its columns and lse. Splits that saw no key have
// lse -inf and uninitialised columns.
struct Partials {
  int64_t columns;
  std::vector<float> out, lse;

  template <class SeesNoKey>
  Partials(cuda_test::Random& random, int64_t rows, int64_t columns_, const SeesNoKey& sees_no_key)
      : columns(columns_) {
    for (int64_t i = 0; i < rows; ++i) {
      const bool no_key = random.rarely() || sees_no_key(i);
      lse.push_back(no_key ? kMinusInfinity : 8.0f * random.normal());
      for (int64_t c = 0; c < columns; ++c) out.push_back(no_key ? kNaN : random.normal());
    }
  }

  void give_to(tilewise::cuda::ForwardParams& params) {
    params.partial_out = out.data();
    params.partial_lse = lse.data();
  }
};

template <class T>
class CommonCombine : public testing::Test {};
using Types = testing::Types<float, tilewise::Half, tilewise::BFloat16>;
TYPED_TEST_SUITE(CommonCombine, Types);

template <class T>
class CommonCombineShares : public testing::Test {};
using HalfTypes = testing::Types<tilewise::Half, tilewise::BFloat16>;
TYPED_TEST_SUITE(CommonCombineShares, HalfTypes);

// Compares one row of one head, whose partial results are at `partial_rows`.
template <class T>
void compare(const Call<T>& call, const Partials& partials, const Sequence& s, int64_t i,
             int64_t head, const std::vector<size_t>& partial_rows) {
  const tilewise::Problem& p = call.p;
  double sum = p.sinks != nullptr ? std::exp(static_cast<double>(p.sinks[head])) : 0.0;
  for (const size_t partial : partial_rows)
    sum += std::exp(static_cast<double>(partials.lse[partial]));
  if (p.lse != nullptr) {
    const auto at =
        static_cast<size_t>(s.lse_offset(p.lse_stride_batch, i) + head * p.lse_stride_head);
    if (sum == 0.0)
      ASSERT_EQ(call.lse[at], kMinusInfinity);
    else
      ASSERT_NEAR(call.lse[at], std::log(sum), 1e-6 * std::max(1.0, std::abs(std::log(sum))));
  }
  for (int64_t c = 0; c < p.head_dim_v; ++c) {
    double expected = 0.0;
    for (const size_t partial : partial_rows) {
      if (partials.lse[partial] == kMinusInfinity) continue;
      expected +=
          std::exp(static_cast<double>(partials.lse[partial])) / sum *
          partials.out[partial * static_cast<size_t>(partials.columns) + static_cast<size_t>(c)];
    }
    const auto at = static_cast<size_t>(s.row_offset(p.out, i) + head * p.out.stride_head + c);
    const double tolerance = std::max(cuda_test::Type<T>::kEpsilon, 0x1p-20);
    ASSERT_NEAR(to_float(call.out[at]), expected, tolerance * std::max(1.0, std::abs(expected)));
  }
}

template <class T>
int64_t written(const Call<T>& call) {
  return std::count_if(call.out.begin(), call.out.end(),
                       [](T x) { return !std::isnan(to_float(x)); });
}

TYPED_TEST(CommonCombine, IsTheSoftmaxOfAllSplits) {
  int32_t with_groups = 0;  // number of problems whose rows have several groups of warps
  for (uint32_t seed = 0; seed < 160; ++seed) {
    Call<TypeParam> call(
        seed, seed % 4 == 3 ? cuda_test::Limits{3, 10, 140, 3} : cuda_test::Limits{30, 10, 140, 3});
    const tilewise::Problem& p = call.p;
    const int32_t splits = call.random.template pick<int32_t>({2, 3, 7, 32, 33, 80, 128, 200});
    const int64_t all = tilewise::total_rows(p) * p.heads_q;  // rows of a split
    const bool empty_rows = call.random.coin();
    Partials partials(call.random, splits * all, p.head_dim_v,
                      [&](int64_t i) { return empty_rows && i % all % 3 == 0; });
    if (seed % 7 == 0) call.p.lse = nullptr;
    tilewise::cuda::ForwardParams params{};
    params.problem = p;
    params.order.splits = splits;
    params.split_rule = {0, splits};
    partials.give_to(params);
    const common::TensorKernels& kernels = common::tensor_kernels(p.dtype);
    const int64_t rows = common::combined_rows(params);
    // A launch chooses between the two kernels by the number of rows.
    if (seed % 2 == 0 && splits <= 32 && p.head_dim_v % 4 == 0)
      tilewise::cuda::launch(kernels.combine_splits_by_warps,
                             tilewise::ceil_div(rows, common::kCombineRowsPerBlock), nullptr,
                             params);
    else
      tilewise::cuda::launch(kernels.combine(params), common::combine_blocks(params), nullptr,
                             params);
    if (common::combine_groups(params) > 1) ++with_groups;
    int64_t used = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = tilewise::sequence_of(p, b);
      used += s.band.rows;
      for (int64_t i = 0; i < s.band.rows; ++i) {
        for (int64_t head = 0; head < p.heads_q; ++head) {
          std::vector<size_t> partial_rows;
          for (int64_t split = 0; split < splits; ++split)
            partial_rows.push_back(static_cast<size_t>(
                split * all + tilewise::cuda::flat_row(p, s, i) * p.heads_q + head));
          compare(call, partials, s, i, head, partial_rows);
        }
      }
    }
    // The kernel must not write rows that are not in use.
    ASSERT_EQ(written(call), used * p.heads_q * p.head_dim_v) << "seed " << seed;
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
  ASSERT_GT(with_groups, 10);
}

// Rows of Stream-K tiles get the softmax of their shares; rows of earlier tiles are not written.
TYPED_TEST(CommonCombineShares, AreTheSoftmaxOfTheirTile) {
  constexpr int32_t kRowTile = 16;
  int32_t problems = 0;
  for (uint32_t seed = 0; seed < 1200; ++seed) {
    Call<TypeParam> call(seed, {50, 10, 140, 3});
    const tilewise::Problem& p = call.p;
    const bool rows_follow_from_shape = p.cu_seqlens_q == nullptr && p.seqused_q == nullptr;
    if (!rows_follow_from_shape || p.head_dim_v % 8 != 0 || p.batch * p.seqlen_q == 0) continue;
    ++problems;
    if (problems % 7 == 0) call.p.lse = nullptr;
    tilewise::cuda::ForwardParams params{};
    params.problem = p;
    params.row_tile = kRowTile;
    params.order.tiles = static_cast<int32_t>(tilewise::ceil_div(p.seqlen_q, int64_t{kRowTile}));
    params.order.heads = static_cast<int32_t>(p.heads_q);
    params.order.sequences = static_cast<int32_t>(p.batch);
    const int32_t tiles = params.order.tiles * params.order.heads * params.order.sequences;
    tilewise::cuda::StreamKTail& tail = params.stream_k;
    tail.tiles = static_cast<int32_t>(call.random.between(1, tiles));
    tail.first = tiles - tail.tiles;
    const auto key_tiles = static_cast<int32_t>(call.random.between(1, 90));
    tail.key_tiles = key_tiles;
    tail.key_tiles_per_cta = static_cast<int32_t>(
        call.random.between(tilewise::ceil_div(key_tiles, tail.kMaxShares - 1), key_tiles));
    tail.columns = static_cast<int32_t>(p.head_dim_v + call.random.pick({0, 8, 64}));
    Partials partials(call.random, tail.num_results() * kRowTile, tail.columns,
                      [](int64_t) { return false; });
    partials.give_to(params);
    tilewise::cuda::launch(common::tensor_kernels(p.dtype).combine(params),
                           common::combine_blocks(params), nullptr, params);
    int64_t used = 0;
    for (int32_t tile = 0; tile < tail.tiles; ++tile) {
      const tilewise::cuda::TileOrder::WorkTile work_tile = params.order.at(tail.first + tile);
      const Sequence s = tilewise::sequence_of(p, work_tile.sequence);
      const int64_t first = int64_t{work_tile.tile} * kRowTile;
      const int64_t rows = std::min<int64_t>(kRowTile, p.seqlen_q - first);
      used += rows;
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<size_t> partial_rows;
        for (int32_t partial = 0; partial < tail.shares_of(tile); ++partial)
          partial_rows.push_back(static_cast<size_t>(
              tail.result_index(tail.first_block(tile) + partial, tile) * kRowTile + r));
        compare(call, partials, s, first + r, work_tile.head, partial_rows);
      }
    }
    ASSERT_EQ(written(call), used * p.head_dim_v) << "seed " << seed;
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
  ASSERT_GT(problems, 30);
}

}  // namespace
