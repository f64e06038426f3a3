// A forward and a backward from plan to result, for each family and element in this build, compared
// with a computation in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "base/half.h"
#include "cuda/arch/limits.h"
#include "cuda/kernel_set.h"
#include "cuda/mma_sync/family.h"
#include "cuda/simt/family.h"
#include "cuda/wgmma/family.h"

namespace tilewise::cuda {
namespace {

struct Shape {
  int64_t batch, rows, keys, heads_q, heads_kv, head_dim;
  bool causal;
};

using Values = std::vector<double>;  // [batch, row, head, column]

struct Answer {
  Values out, lse, dq, dk, dv;
};

// out, lse and the gradients of sum(out * dout).
Answer reference(const Shape& s, const Values& q, const Values& k, const Values& v,
                 const Values& dout, double scale) {
  const int64_t group = s.heads_q / s.heads_kv;
  Answer a{Values(q.size()), Values(s.batch * s.heads_q * s.rows), Values(q.size()),
           Values(k.size()), Values(v.size())};
  const auto dot = [&](const double* x, const double* y) {
    double sum = 0;
    for (int64_t c = 0; c < s.head_dim; ++c) sum += x[c] * y[c];
    return sum;
  };
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.rows; ++i) {
        const int64_t row = ((b * s.rows + i) * s.heads_q + h) * s.head_dim;
        const auto key = [&](int64_t j) {
          return ((b * s.keys + j) * s.heads_kv + h / group) * s.head_dim;
        };
        const int64_t seen = s.causal ? std::min(s.keys, i + s.keys - s.rows + 1) : s.keys;
        double sum = 0;
        Values p(std::max<int64_t>(seen, 0));
        for (int64_t j = 0; j < seen; ++j) {
          p[j] = std::exp(scale * dot(&q[row], &k[key(j)]));
          sum += p[j];
        }
        a.lse[(b * s.heads_q + h) * s.rows + i] = seen > 0 ? std::log(sum) : -INFINITY;
        double delta = 0;
        for (int64_t j = 0; j < seen; ++j) {
          p[j] /= sum;
          for (int64_t c = 0; c < s.head_dim; ++c) a.out[row + c] += p[j] * v[key(j) + c];
        }
        delta = dot(&a.out[row], &dout[row]);
        for (int64_t j = 0; j < seen; ++j) {
          const double ds = scale * p[j] * (dot(&dout[row], &v[key(j)]) - delta);
          for (int64_t c = 0; c < s.head_dim; ++c) {
            a.dq[row + c] += ds * k[key(j) + c];
            a.dk[key(j) + c] += ds * q[row + c];
            a.dv[key(j) + c] += p[j] * dout[row + c];
          }
        }
      }
    }
  }
  return a;
}

// A tensor in the kernels' memory. The constructor from values also rounds these to Storage.
template <class Storage>
struct Buffer {
  std::vector<Storage> data;

  explicit Buffer(std::size_t count) : data(count, from_float<Storage>(NAN)) {}
  explicit Buffer(Values& values) {
    for (double& x : values) {
      data.push_back(from_float<Storage>(static_cast<float>(x)));
      x = to_float(data.back());
    }
  }
  tilewise_tensor view(int64_t rows, int64_t heads, int64_t columns) {
    return {data.data(), rows * heads * columns, heads * columns, columns};
  }
};

template <class Storage>
double max_error(const std::vector<Storage>& got, const Values& want) {
  double scale = 1e-30;
  double error = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    scale = std::max(scale, std::abs(want[i]));
    const double e = std::abs(static_cast<double>(to_float(got[i])) - want[i]);
    error = std::isnan(e) ? INFINITY : std::max(error, e);
  }
  return error / scale;
}

Values random_values(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  Values values(count);
  for (double& x : values) x = normal(engine);
  return values;
}

struct Workspace {
  std::vector<char> memory;
  explicit Workspace(int64_t bytes) : memory(static_cast<std::size_t>(bytes) + 64, char(0x7f)) {}
  void* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (64 - at % 64) % 64;
  }
};

template <class Storage>
void run(
    const Shape& s, int32_t dtype, const FamilyRow& family, int32_t sm, double tolerance,
    const std::function<void(Problem&)>& change = [](Problem&) {}) {
  const double scale = 0.125;
  Values q = random_values(s.batch * s.rows * s.heads_q * s.head_dim, 1);
  Values k = random_values(s.batch * s.keys * s.heads_kv * s.head_dim, 2);
  Values v = random_values(s.batch * s.keys * s.heads_kv * s.head_dim, 3);
  Values dout = random_values(static_cast<int64_t>(q.size()), 4);
  Buffer<Storage> bq(q), bk(k), bv(v), bdout(dout), out(q.size()), dq(q.size()), dk(k.size()),
      dv(k.size());
  const Answer want = reference(s, q, k, v, dout, scale);
  std::vector<float> lse(want.lse.size(), NAN);

  Problem p{};
  p.struct_size = sizeof(p);
  p.device = TILEWISE_CUDA;
  p.dtype = dtype;
  p.batch = p.kv_batch = s.batch;
  p.seqlen_q = s.rows;
  p.seqlen_k = s.keys;
  p.heads_q = s.heads_q;
  p.heads_kv = s.heads_kv;
  p.head_dim = p.head_dim_v = s.head_dim;
  p.q = bq.view(s.rows, s.heads_q, s.head_dim);
  p.k = bk.view(s.keys, s.heads_kv, s.head_dim);
  p.v = bv.view(s.keys, s.heads_kv, s.head_dim);
  p.out = out.view(s.rows, s.heads_q, s.head_dim);
  p.lse = lse.data();
  p.lse_stride_batch = s.heads_q * s.rows;
  p.lse_stride_head = s.rows;
  p.window_left = -1;
  p.window_right = s.causal ? 0 : -1;
  p.scale = static_cast<float>(scale);
  change(p);
  Gpu gpu{.sm = sm,
          .sm_count = 4,
          .shared_bytes = sm >= 75 ? arch::limits_of(sm).shared_bytes : 48 * 1024,
          .l2_bytes = 4 << 20};
  const Target target = {.gpu = gpu, .registry = registry(), .recomputes = &simt::kFamily};
  const Plan plan = family.plan(p, target);
  if (plan.kernel_set == nullptr) GTEST_SKIP() << "not in this build";

  Workspace memory(plan.workspace_bytes);
  family.launch(p, plan, memory.data());
  EXPECT_LT(max_error(out.data, want.out), tolerance);
  EXPECT_LT(max_error(lse, want.lse), p.tf32 != 0 ? 1e-3 : 1e-5);

  Gradients g{};
  g.struct_size = sizeof(g);
  g.dout = bdout.view(s.rows, s.heads_q, s.head_dim);
  g.dq = dq.view(s.rows, s.heads_q, s.head_dim);
  g.dk = dk.view(s.keys, s.heads_kv, s.head_dim);
  g.dv = dv.view(s.keys, s.heads_kv, s.head_dim);
  const Plan back = family.plan({p, g}, target);
  if (back.kernel_set == nullptr) return;
  Workspace more(back.workspace_bytes);
  family.launch({p, g}, back, more.data());
  EXPECT_LT(max_error(dq.data, want.dq), 2 * tolerance);
  EXPECT_LT(max_error(dk.data, want.dk), 2 * tolerance);
  EXPECT_LT(max_error(dv.data, want.dv), 2 * tolerance);
}

constexpr Shape kDense = {.batch = 2,
                          .rows = 70,
                          .keys = 150,
                          .heads_q = 4,
                          .heads_kv = 2,
                          .head_dim = 64,
                          .causal = false};
constexpr Shape kCausal = {.batch = 1,
                           .rows = 150,
                           .keys = 170,
                           .heads_q = 2,
                           .heads_kv = 2,
                           .head_dim = 64,
                           .causal = true};

constexpr Shape kWide = {.batch = 1,
                         .rows = 40,
                         .keys = 100,
                         .heads_q = 2,
                         .heads_kv = 1,
                         .head_dim = 128,
                         .causal = true};

template <class Storage>
void run_shapes(int32_t dtype, const FamilyRow& family, int32_t sm, double tolerance) {
  run<Storage>(kDense, dtype, family, sm, tolerance);
  run<Storage>(kCausal, dtype, family, sm, tolerance);
  run<Storage>(kWide, dtype, family, sm, tolerance);
}

TEST(CudaBackend, Simt) {
  run_shapes<float>(TILEWISE_FLOAT32, simt::kFamily, 60, 2e-6);
  run_shapes<Half>(TILEWISE_FLOAT16, simt::kFamily, 60, 2e-3);
  run_shapes<BFloat16>(TILEWISE_BFLOAT16, simt::kFamily, 60, 1.5e-2);
}

TEST(CudaBackend, MmaSync) {
  run_shapes<Half>(TILEWISE_FLOAT16, mma_sync::kFamily, 90, 2e-3);
  run_shapes<BFloat16>(TILEWISE_BFLOAT16, mma_sync::kFamily, 90, 1.5e-2);
  run_shapes<float>(TILEWISE_FLOAT32, mma_sync::kFamily, 90, 4e-6);
}

TEST(CudaBackend, MmaSyncTuring) {
  run_shapes<Half>(TILEWISE_FLOAT16, mma_sync::kFamily, 75, 2e-3);
}

TEST(CudaBackend, Tf32) {
  run<float>(kDense, TILEWISE_FLOAT32, mma_sync::kFamily, 90, 4e-3, [](Problem& p) { p.tf32 = 1; });
}

// Head dims 64 and 128, tiles that heads share, several row tiles, and deterministic gradients. All
// shapes are short enough for the small forward tile.
TEST(CudaBackend, Wgmma) {
  run_shapes<Half>(TILEWISE_FLOAT16, wgmma::kFamily, 90, 2e-3);
  run_shapes<BFloat16>(TILEWISE_BFLOAT16, wgmma::kFamily, 90, 1.5e-2);
  constexpr Shape kLong = {.batch = 1,
                           .rows = 1100,
                           .keys = 1200,
                           .heads_q = 2,
                           .heads_kv = 1,
                           .head_dim = 64,
                           .causal = true};
  run<BFloat16>(kLong, TILEWISE_BFLOAT16, wgmma::kFamily, 90, 1.5e-2);
  run<Half>(kCausal, TILEWISE_FLOAT16, wgmma::kFamily, 90, 2e-3,
            [](Problem& p) { p.deterministic = 1; });
}

// With few rows, heads share a tile, and keys are split and the splits combined.
TEST(CudaBackend, Decoding) {
  constexpr Shape shape = {.batch = 1,
                           .rows = 2,
                           .keys = 600,
                           .heads_q = 8,
                           .heads_kv = 2,
                           .head_dim = 64,
                           .causal = true};
  for (const FamilyRow* family : {&simt::kFamily, &mma_sync::kFamily}) {
    run<Half>(shape, TILEWISE_FLOAT16, *family, 90, 2e-3, [](Problem& p) { p.num_splits = 3; });
  }
}

TEST(CudaBackend, Deterministic) {
  run<Half>(kCausal, TILEWISE_FLOAT16, mma_sync::kFamily, 90, 2e-3,
            [](Problem& p) { p.deterministic = 1; });
}

}  // namespace
}  // namespace tilewise::cuda
