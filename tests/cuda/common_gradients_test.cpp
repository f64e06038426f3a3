// dbias, dsinks and dscale compared with plain loops in double. out and lse come from the loops,
// rounded to the types of the problem, so that only the kernels' errors are measured.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "call.h"
#include "cuda/common/kernels.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::Call;
using tilewise::BFloat16;
using tilewise::Half;
using tilewise::Sequence;
using tilewise::to_float;

template <class T>
class Oracle {
 public:
  explicit Oracle(Call<T>& call) : call_(call), p_(call.p), g_(call.g) {}

  // Writes out and lse of the call, then sums the gradients.
  void run() {
    dbias.assign(call_.dbias.size(), 0.0);
    magnitude = dbias;
    dsinks.assign(static_cast<size_t>(p_.heads_q), 0.0);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence s = tilewise::sequence_of(p_, b);
      for (int64_t h = 0; h < p_.heads_q; ++h)
        for (int64_t i = 0; i < s.band.rows; ++i) row(s, h, i);
    }
  }

  std::vector<double> dbias, dsinks;
  // Sums of the absolute terms of dbias: terms may cancel, but their rounding errors do not.
  std::vector<double> magnitude;

 private:
  double score(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    const T* const q = call_.q.data() + s.row_offset(p_.q, i) + h * p_.q.stride_head;
    const T* const k =
        call_.k.data() + s.kv.offset(p_.k, j) + h / tilewise::group_size(p_) * p_.k.stride_head;
    double x = 0.0;
    for (int64_t c = 0; c < p_.head_dim; ++c)
      x += static_cast<double>(to_float(q[c])) * static_cast<double>(to_float(k[c]));
    x *= static_cast<double>(call_.scale);
    const auto cap = static_cast<double>(p_.softcap);
    if (cap > 0.0) x = cap * std::tanh(x / cap);
    if (p_.alibi_slopes != nullptr)
      x -= static_cast<double>(p_.alibi_slopes[s.batch * p_.alibi_stride_batch + h]) *
           static_cast<double>(std::abs(i + s.band.shift() - j));
    if (p_.bias != nullptr)
      x += static_cast<double>(call_.bias[static_cast<size_t>(
          s.batch * p_.bias_stride_batch + h * p_.bias_stride_head + i * p_.bias_stride_row + j)]);
    return x;
  }

  double value_product(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    const T* const d = call_.dout.data() + s.row_offset(g_.dout, i) + h * g_.dout.stride_head;
    const T* const v =
        call_.v.data() + s.kv.offset(p_.v, j) + h / tilewise::group_size(p_) * p_.v.stride_head;
    double x = 0.0;
    for (int64_t c = 0; c < p_.head_dim_v; ++c)
      x += static_cast<double>(to_float(d[c])) * static_cast<double>(to_float(v[c]));
    return x;
  }

  void row(const Sequence& s, int64_t h, int64_t i) {
    const tilewise::Dropout dropout = tilewise::dropout_of(p_);
    const auto kept = [&](int64_t j) {
      if (!dropout.on()) return 1.0;
      return dropout.kept(tilewise::dropout_head(p_, s.batch, h), i, j) ? 1.0 / (1.0 - 0.3f) : 0.0;
    };
    const double sink = p_.sinks != nullptr ? static_cast<double>(p_.sinks[h]) : -HUGE_VAL;
    double sum = std::exp(sink);
    std::vector<double> scores(static_cast<size_t>(s.band.keys));
    const tilewise::Range seen = s.band.keys_of(i);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      scores[static_cast<size_t>(j)] = score(s, h, i, j);
      sum += std::exp(scores[static_cast<size_t>(j)]);
    }
    const auto lse = static_cast<float>(std::log(sum));
    T* const out = call_.out.data() + s.row_offset(p_.out, i) + h * p_.out.stride_head;
    const T* const dout = call_.dout.data() + s.row_offset(g_.dout, i) + h * g_.dout.stride_head;
    call_.lse[static_cast<size_t>(s.lse_offset(p_.lse_stride_batch, i) + h * p_.lse_stride_head)] =
        lse;
    double delta = 0.0;
    for (int64_t c = 0; c < p_.head_dim_v; ++c) {
      double o = 0.0;
      for (int64_t j = seen.begin; j < seen.end; ++j)
        o += std::exp(scores[static_cast<size_t>(j)]) / sum * kept(j) *
             static_cast<double>(to_float(call_.v[static_cast<size_t>(
                 s.kv.offset(p_.v, j) + h / tilewise::group_size(p_) * p_.v.stride_head + c)]));
      out[c] = tilewise::from_float<T>(static_cast<float>(o));
      delta += static_cast<double>(to_float(out[c])) * static_cast<double>(to_float(dout[c]));
    }
    if (g_.dlse != nullptr)
      delta -= static_cast<double>(
          g_.dlse[s.lse_offset(g_.dlse_stride_batch, i) + h * g_.dlse_stride_head]);
    if (sum == 0.0) return;
    dsinks[static_cast<size_t>(h)] -= std::exp(sink - static_cast<double>(lse)) * delta;
    if (p_.bias == nullptr) return;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const double weight = std::exp(scores[static_cast<size_t>(j)] - static_cast<double>(lse));
      const auto at = static_cast<size_t>(s.batch * g_.dbias_stride_batch +
                                          h * g_.dbias_stride_head + i * g_.dbias_stride_row + j);
      const double dp = kept(j) * value_product(s, h, i, j);
      dbias[at] += weight * (dp - delta);
      magnitude[at] += weight * (std::abs(dp) + std::abs(delta));
    }
  }

  Call<T>& call_;
  const tilewise::Problem& p_;
  const tilewise::Gradients& g_;
};

double tolerance(double magnitude) { return 1.2e-6 * std::max(1.0, magnitude); }

double largest(const std::vector<double>& x) {
  double maximum = 1.0;
  for (double value : x) maximum = std::max(maximum, std::abs(value));
  return maximum;
}

template <class T>
class CommonGradients : public testing::Test {};
using Types = testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(CommonGradients, Types);

template <class T>
void launch_dbias(const Call<T>& call) {
  const common::DbiasParams params{call.p, call.g};
  tilewise::cuda::launch(common::tensor_kernels(call.p.dtype).dbias,
                         common::dbias_blocks(call.p, call.g), nullptr, params);
}

// Marks the elements of dbias. The kernel writes all of them, but not the gaps between rows.
template <class T>
std::vector<char> written_elements(const Call<T>& call) {
  std::vector<char> written(call.dbias.size(), 0);
  const common::DbiasShape shape = common::DbiasShape::of(call.p, call.g);
  for (int64_t b = 0; b < shape.batches; ++b)
    for (int64_t h = 0; h < shape.heads; ++h)
      for (int64_t i = 0; i < shape.rows; ++i)
        for (int64_t j = 0; j < shape.keys; ++j)
          written[static_cast<size_t>(b * call.g.dbias_stride_batch + h * call.g.dbias_stride_head +
                                      i * call.g.dbias_stride_row + j)] = 1;
  return written;
}

TYPED_TEST(CommonGradients, DbiasSumsOverBroadcastDimensions) {
  double error = 0.0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const bool large = seed % 6 == 0;
    Call<TypeParam> call(seed, {large ? 150 : 40, large ? 150 : 70, seed % 11 == 0 ? 300 : 50, 3});
    call.add_bias();
    Oracle<TypeParam> oracle(call);
    oracle.run();
    launch_dbias(call);
    const std::vector<char> written = written_elements(call);
    for (size_t i = 0; i < call.dbias.size(); ++i) {
      if (written[i] == 0) {
        ASSERT_TRUE(std::isnan(call.dbias[i])) << "seed " << seed << ", element " << i;
        continue;
      }
      ASSERT_NEAR(call.dbias[i], oracle.dbias[i], tolerance(oracle.magnitude[i]))
          << "seed " << seed << ", " << i;
      error = std::max(error,
                       std::abs(call.dbias[i] - oracle.dbias[i]) / tolerance(oracle.magnitude[i]));
    }
  }
  std::printf("largest error: %.2f of what is allowed\n", error);
}

// Results do not depend on the order in which the threads of a block run.
TYPED_TEST(CommonGradients, DbiasIsDeterministic) {
  int64_t compared = 0;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Call<TypeParam> call(seed, {100, 100, 64, 3});
    call.add_bias();
    Oracle<TypeParam>(call).run();
    launch_dbias(call);
    const std::vector<float> first = call.dbias;
    setenv("TILEWISE_EMULATOR_ORDER", "shuffled", 1);
    launch_dbias(call);
    unsetenv("TILEWISE_EMULATOR_ORDER");
    ASSERT_EQ(std::memcmp(first.data(), call.dbias.data(), first.size() * sizeof(float)), 0);
    for (float x : first) compared += std::isnan(x) || x == 0.0f ? 0 : 1;
  }
  EXPECT_GT(compared, 100);
}

// Callers may pass a bias in the dtype of q instead of float32.
TYPED_TEST(CommonGradients, DbiasOfABiasInTheTypeOfQ) {
  Call<TypeParam> call(3, {40, 40, 32, 3});
  call.add_bias();
  std::vector<TypeParam> bias;
  for (float& x : call.bias) {
    bias.push_back(tilewise::from_float<TypeParam>(x));
    x = to_float(bias.back());
  }
  call.p.bias_dtype = call.p.dtype;
  call.p.bias = bias.data();
  Oracle<TypeParam> oracle(call);
  oracle.run();
  launch_dbias(call);
  const std::vector<char> written = written_elements(call);
  for (size_t i = 0; i < call.dbias.size(); ++i) {
    if (written[i] == 0) continue;
    ASSERT_NEAR(call.dbias[i], oracle.dbias[i], 1.1e-6 * largest(oracle.dbias)) << i;
  }
}

TYPED_TEST(CommonGradients, DsinksOverAllRows) {
  int64_t with_sinks = 0;
  for (uint32_t seed = 0; seed < 120; ++seed) {
    Call<TypeParam> call(seed, {seed % 10 == 0 ? 400 : 60, 30, 40, 4});
    if (call.p.sinks == nullptr) continue;
    ++with_sinks;
    Oracle<TypeParam> oracle(call);
    oracle.run();
    common::DsinksParams partials{call.p, call.g, nullptr, common::dsinks_row_blocks(call.p)};
    std::vector<double> memory(static_cast<size_t>(call.p.heads_q * partials.row_blocks) + 1, -1e9);
    partials.partials = memory.data();
    tilewise::cuda::launch(common::tensor_kernels(call.p.dtype).dsinks,
                           common::dsinks_blocks(call.p), nullptr, partials);
    common::ReduceParams sums{};
    sums.dsinks_partials = memory.data();
    sums.heads = call.p.heads_q;
    sums.row_blocks = partials.row_blocks;
    sums.dsinks = call.dsinks.data();
    tilewise::cuda::launch(common::reduce_kernel(), common::reduce_blocks(sums), nullptr, sums);
    for (size_t h = 0; h < call.dsinks.size(); ++h)
      ASSERT_NEAR(call.dsinks[h], oracle.dsinks[h], 1e-6 * largest(oracle.dsinks))
          << "seed " << seed << ", head " << h;
  }
  EXPECT_GT(with_sinks, 30);
}

TEST(CommonSums, DscaleIsTheSumOfItsPartials) {
  for (const int64_t count : {0, 1, 255, 256, 257, 5000}) {
    cuda_test::Random random{std::mt19937(7)};
    std::vector<float> partials(static_cast<size_t>(count));
    double expected = 0.0;
    for (float& x : partials) {
      x = random.normal();
      expected += static_cast<double>(x);
    }
    float dscale = cuda_test::kNaN;
    common::ReduceParams params{};
    params.dscale_partials = partials.data();
    params.dscale_count = count;
    params.dscale = &dscale;
    tilewise::cuda::launch(common::reduce_kernel(), common::reduce_blocks(params), nullptr, params);
    EXPECT_FLOAT_EQ(dscale, static_cast<float>(expected)) << count;
  }
}

}  // namespace
