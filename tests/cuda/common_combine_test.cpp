// The merge of splits, against sums in double.
#include <gtest/gtest.h>

#include "call.h"
#include "cuda/common/kernels.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::Call;
using cuda_test::kNaN;
using tilewise::Sequence;
using tilewise::to_float;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Partials {
  int64_t rows;  // of all sequences
  int64_t heads;
  int64_t columns;
  int32_t splits;
  std::vector<float> out, lse;

  // Splits that saw nothing have lse -inf and whatever was in memory.
  template <class T>
  Partials(Call<T>& call, int32_t count)
      : rows(tilewise::cuda::total_rows(call.p)),
        heads(call.p.heads_q),
        columns(call.p.head_dim_v),
        splits(count) {
    const bool empty_rows = call.random.coin();
    for (int64_t i = 0; i < splits * rows * heads; ++i) {
      const bool nothing = call.random.rarely() || (empty_rows && i % (rows * heads) % 3 == 0);
      lse.push_back(nothing ? kNothing : 8.0f * call.random.normal());
      for (int64_t c = 0; c < columns; ++c) out.push_back(nothing ? kNaN : call.random.normal());
    }
  }
  size_t at(int32_t split, int64_t row, int64_t head) const {
    return static_cast<size_t>((split * rows + row) * heads + head);
  }
};

template <class T>
class CommonCombine : public testing::Test {};
using Types = testing::Types<float, tilewise::Half, tilewise::BFloat16>;
TYPED_TEST_SUITE(CommonCombine, Types);

// One row of one head.
template <class T>
void compare(const Call<T>& call, const Partials& part, const Sequence& s, int64_t i,
             int64_t head) {
  const tilewise::Problem& p = call.p;
  const int64_t row = tilewise::cuda::flat_row(p, s, i);
  double sum = p.sinks != nullptr ? std::exp(static_cast<double>(p.sinks[head])) : 0.0;
  for (int32_t split = 0; split < part.splits; ++split)
    sum += std::exp(static_cast<double>(part.lse[part.at(split, row, head)]));
  const auto lse_at =
      static_cast<size_t>(s.lse_offset(p.lse_stride_batch, i) + head * p.lse_stride_head);
  if (sum == 0.0)
    ASSERT_EQ(call.lse[lse_at], kNothing);
  else
    ASSERT_NEAR(call.lse[lse_at], std::log(sum), 1e-6 * std::max(1.0, std::abs(std::log(sum))));
  for (int64_t c = 0; c < p.head_dim_v; ++c) {
    double expected = 0.0;
    for (int32_t split = 0; split < part.splits; ++split) {
      const size_t at = part.at(split, row, head);
      if (part.lse[at] == kNothing) continue;
      expected += std::exp(static_cast<double>(part.lse[at])) / sum *
                  part.out[at * static_cast<size_t>(p.head_dim_v) + static_cast<size_t>(c)];
    }
    const auto at = static_cast<size_t>(s.row_offset(p.out, i) + head * p.out.stride_head + c);
    const double unit = std::max(cuda_test::Type<T>::kUnit, 0x1p-20);
    ASSERT_NEAR(to_float(call.out[at]), expected, unit * std::max(1.0, std::abs(expected)));
  }
}

TYPED_TEST(CommonCombine, IsTheSoftmaxOfAllSplits) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    Call<TypeParam> call(seed, {30, 10, 140, 3});
    const int32_t splits = call.random.template pick<int32_t>({2, 3, 7, 32, 33, 80});
    Partials part(call, splits);
    if (seed % 7 == 0) call.p.lse = nullptr;
    tilewise::cuda::ForwardParams params{};
    params.problem = call.p;
    params.order.splits = splits;
    params.partial_out = part.out.data();
    params.partial_lse = part.lse.data();
    params.rule = {0, splits};
    const common::TensorKernels& kernels = common::tensor_kernels(call.p.dtype);
    const int64_t rows = common::combined_rows(params);
    // Which of the two a launch takes follows from the number of rows.
    if (seed % 2 == 0 && splits <= 32 && call.p.head_dim_v % 4 == 0)
      tilewise::cuda::launch(kernels.combine_splits_by_warps,
                             tilewise::ceil_div(rows, common::kRowsOfCombine), nullptr, params);
    else
      tilewise::cuda::launch(kernels.combine_splits, rows, nullptr, params);
    int64_t used = 0;
    for (int64_t b = 0; b < call.p.batch; ++b) {
      const Sequence s = tilewise::sequence_of(call.p, b);
      used += s.band.rows;
      if (call.p.lse == nullptr) continue;
      for (int64_t i = 0; i < s.band.rows; ++i)
        for (int64_t head = 0; head < call.p.heads_q; ++head) compare(call, part, s, i, head);
    }
    // Rows that are not in use are not this kernel's.
    int64_t written = 0;
    for (const TypeParam x : call.out) written += std::isnan(to_float(x)) ? 0 : 1;
    ASSERT_EQ(written, used * call.p.heads_q * call.p.head_dim_v) << "seed " << seed;
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
