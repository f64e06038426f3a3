// The same Band, Score, KvSource and Merge serve a tiled forward, a backward that iterates over key
// tiles, a decode with splits, and paged keys. The kernels here are deliberately small and scalar;
// the references that they are compared with use none of the policies.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "attention/band.h"
#include "attention/kv_source.h"
#include "attention/online_softmax.h"
#include "attention/schedule.h"
#include "attention/score.h"

namespace {

using tilewise::Band;
using tilewise::intersect;
using tilewise::key_split;
using tilewise::KvSource;
using tilewise::Merge;
using tilewise::Range;
using tilewise::Score;
using tilewise::Tiling;

constexpr int64_t kDim = 4;

// A vector of one float and its functions, as Score requires them.
struct Lane {
  float x = 0;
  friend Lane operator+(Lane a, Lane b) { return {a.x + b.x}; }
  friend Lane operator-(Lane a, Lane b) { return {a.x - b.x}; }
  friend Lane operator*(Lane a, Lane b) { return {a.x * b.x}; }
  friend Lane operator+(Lane a, float b) { return {a.x + b}; }
  friend Lane operator-(float a, Lane b) { return {a - b.x}; }
  friend Lane operator*(Lane a, float b) { return {a.x * b}; }
};

struct LaneMath {
  static Lane tanh(Lane a) { return {std::tanh(a.x)}; }
};

using Values = std::vector<float>;

// One head of one sequence. q, out, dout are [rows, kDim]; `kv` locates the keys in k and v.
struct Toy {
  int64_t rows, keys, left, right;
  float slope;
  Score score;
  KvSource kv;
  tilewise_tensor view;  // geometry of k and v
  Values q, k, v, bias, dout;

  Band band() const { return Band::make(rows, keys, left, right); }
  const float* key(const Values& from, int64_t j) const { return from.data() + kv.offset(view, j); }
};

float dot(const float* a, const float* b) { return std::inner_product(a, a + kDim, b, 0.0f); }

// Value and derivative of the score of row i and key j.
Score::Capped<Lane> score_of(const Toy& toy, int64_t i, int64_t j) {
  const int64_t distance = std::abs(i + toy.band().shift() - j);
  return toy.score.apply<LaneMath>(
      Lane{dot(&toy.q[static_cast<size_t>(i * kDim)], toy.key(toy.k, j))}, Lane{toy.slope},
      Lane{static_cast<float>(distance)}, Lane{toy.bias[static_cast<size_t>(i * toy.keys + j)]});
}

struct Row {
  float out[kDim] = {};
  float lse = tilewise::kMinusInfinity;
};

// One row over a range of keys, tile by tile with a running maximum.
Row attend(const Toy& toy, int64_t i, Range tile_rows, Range keys, int64_t tile_keys) {
  const Band band = toy.band();
  float m = tilewise::kMinusInfinity;
  float l = 0;
  Row row;
  for (int64_t begin = keys.begin; begin < keys.end; begin += tile_keys) {
    const Range tile{begin, std::min(keys.end, begin + tile_keys)};
    const bool masked = !band.covers(tile_rows, tile);
    for (int64_t j = tile.begin; j < tile.end; ++j) {
      if (masked && !band.visible(i, j)) continue;
      const float s = score_of(toy, i, j).value.x;
      const float next = std::max(m, s);
      const float base = tilewise::exponent_base(next);
      const float rescale = std::exp(m - base);
      const float p = std::exp(s - base);
      l = l * rescale + p;
      for (int64_t d = 0; d < kDim; ++d)
        row.out[d] = row.out[d] * rescale + p * toy.key(toy.v, j)[d];
      m = next;
    }
  }
  if (l == 0) return Row{};
  for (float& x : row.out) x /= l;
  row.lse = m + std::log(l);
  return row;
}

Row merge(const Row& a, const Row& b) {
  const Merge m = Merge::of({a.lse}, {b.lse});
  Row whole;
  for (int64_t d = 0; d < kDim; ++d) whole.out[d] = m.weight_a * a.out[d] + m.weight_b * b.out[d];
  whole.lse = m.sum.lse;
  return whole;
}

std::vector<Row> forward(const Toy& toy, int64_t tile_q, int64_t tile_k, int64_t splits) {
  const Band band = toy.band();
  const Tiling tiles{toy.rows, tile_q};
  std::vector<Row> rows(static_cast<size_t>(toy.rows));
  for (int64_t t = 0; t < tiles.count(); ++t) {
    const Range tile = tiles.at(t);
    const Range keys = band.keys_of_any(tile);
    for (int64_t i = tile.begin; i < tile.end; ++i) {
      Row& row = rows[static_cast<size_t>(i)];
      for (int64_t s = 0; s < splits; ++s)
        row = merge(row, attend(toy, i, tile, key_split(keys, splits, s, tile_k), tile_k));
    }
  }
  return rows;
}

struct Gradients {
  Values dq, dk, dv;  // [rows or keys, kDim]
};

// The backward iterates over key tiles and uses the transposed band.
Gradients backward(const Toy& toy, const std::vector<Row>& rows, int64_t tile_q, int64_t tile_k) {
  const Band band = toy.band();
  const Tiling key_tiles{toy.keys, tile_k};
  const Tiling row_tiles{toy.rows, tile_q};
  Gradients g{Values(toy.q.size()), Values(static_cast<size_t>(toy.keys * kDim)), {}};
  g.dv = g.dk;
  for (int64_t t = 0; t < key_tiles.count(); ++t) {
    const Range keys = key_tiles.at(t);
    const Range touched = row_tiles.touching(band.rows_of_any(keys));
    for (int64_t u = touched.begin; u < touched.end; ++u) {
      const Range tile = row_tiles.at(u);
      const bool masked = !band.transposed().covers(keys, tile);
      for (int64_t j = keys.begin; j < keys.end; ++j)
        for (int64_t i = tile.begin; i < tile.end; ++i) {
          if (masked && !band.visible(i, j)) continue;
          const Row& row = rows[static_cast<size_t>(i)];
          const float* dout = &toy.dout[static_cast<size_t>(i * kDim)];
          const Score::Capped<Lane> s = score_of(toy, i, j);
          const float p = std::exp(s.value.x - tilewise::exponent_base(row.lse));
          const float ds = p * (dot(dout, toy.key(toy.v, j)) - dot(dout, row.out));
          for (int64_t d = 0; d < kDim; ++d) {
            const auto q_at = static_cast<size_t>(i * kDim + d);
            const auto k_at = static_cast<size_t>(j * kDim + d);
            g.dv[k_at] += p * dout[d];
            g.dq[q_at] += ds * s.derivative.x * toy.score.scale * toy.key(toy.k, j)[d];
            g.dk[k_at] += ds * s.derivative.x * toy.score.scale * toy.q[q_at];
          }
        }
    }
  }
  return g;
}

// Attention as it is defined, in double and without the policies, and the loss sum(dout * out) as a
// function of all inputs.
struct Reference {
  const Toy& toy;
  std::vector<double> q, k, v;  // gathered, [rows or keys, kDim]

  explicit Reference(const Toy& from) : toy(from), q(from.q.begin(), from.q.end()) {
    for (int64_t j = 0; j < toy.keys; ++j)
      for (int64_t d = 0; d < kDim; ++d) {
        k.push_back(static_cast<double>(toy.key(toy.k, j)[d]));
        v.push_back(static_cast<double>(toy.key(toy.v, j)[d]));
      }
  }

  std::vector<double> row(int64_t i, double* lse) const {
    std::vector<double> weights(static_cast<size_t>(toy.keys));
    double sum = 0;
    for (int64_t j = 0; j < toy.keys; ++j) {
      const int64_t diagonal = i + toy.keys - toy.rows;
      if (toy.left >= 0 && j < diagonal - toy.left) continue;
      if (toy.right >= 0 && j > diagonal + toy.right) continue;
      double s = 0;
      for (int64_t d = 0; d < kDim; ++d)
        s += q[static_cast<size_t>(i * kDim + d)] * k[static_cast<size_t>(j * kDim + d)];
      s *= static_cast<double>(toy.score.scale);
      const auto cap = static_cast<double>(toy.score.softcap);
      if (cap > 0) s = cap * std::tanh(s / cap);
      s -= static_cast<double>(toy.slope) * static_cast<double>(std::abs(diagonal - j));
      s += static_cast<double>(toy.bias[static_cast<size_t>(i * toy.keys + j)]);
      weights[static_cast<size_t>(j)] = std::exp(s);
      sum += weights[static_cast<size_t>(j)];
    }
    *lse = std::log(sum);
    std::vector<double> out(kDim);
    for (int64_t j = 0; j < toy.keys && sum > 0; ++j)
      for (int64_t d = 0; d < kDim; ++d)
        out[static_cast<size_t>(d)] +=
            weights[static_cast<size_t>(j)] / sum * v[static_cast<size_t>(j * kDim + d)];
    return out;
  }

  double loss() const {
    double sum = 0;
    double lse = 0;
    for (int64_t i = 0; i < toy.rows; ++i) {
      const std::vector<double> out = row(i, &lse);
      for (int64_t d = 0; d < kDim; ++d)
        sum += static_cast<double>(toy.dout[static_cast<size_t>(i * kDim + d)]) *
               out[static_cast<size_t>(d)];
    }
    return sum;
  }

  double finite_difference(std::vector<double>& values, size_t at) {
    constexpr double kStep = 1e-5;
    const double old = values[at];
    values[at] = old + kStep;
    const double up = loss();
    values[at] = old - kStep;
    const double down = loss();
    values[at] = old;
    return (up - down) / (2 * kStep);
  }
};

Toy make_toy(int seed, int64_t rows, int64_t keys, int64_t left, int64_t right, float softcap) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t count) {
    Values values(static_cast<size_t>(count));
    for (float& x : values) x = normal(random);
    return values;
  };
  Toy toy{rows, keys, left, right, 0.1f, Score{0.6f, softcap}, KvSource{}, {}, {}, {}, {}, {}, {}};
  toy.view = {nullptr, 0, kDim, 0};
  toy.q = draw(rows * kDim);
  toy.k = draw(keys * kDim);
  toy.v = draw(keys * kDim);
  toy.bias = draw(rows * keys);
  toy.dout = draw(rows * kDim);
  return toy;
}

// Moves the keys, after two keys of padding, into pages of three keys and two heads, of which they
// use one head. `pages` becomes the block table.
void scatter(Toy& toy, std::vector<int32_t>& pages) {
  constexpr int64_t kPage = 3;
  constexpr int64_t kPadding = 2;
  pages.resize(static_cast<size_t>((toy.keys + kPadding + kPage - 1) / kPage));
  std::iota(pages.rbegin(), pages.rend(), 1);  // in reverse order; page 0 is unused
  const Toy dense = toy;
  toy.view = {nullptr, kPage * 2 * kDim + 5, 2 * kDim, kDim};
  toy.kv = {pages.data(), kPage, 0, kPadding, static_cast<uint32_t>(pages.size())};
  const float poison = std::nanf("");
  toy.k.assign(
      static_cast<size_t>((static_cast<int64_t>(pages.size()) + 1) * toy.view.stride_batch),
      poison);
  toy.v = toy.k;
  for (int64_t j = 0; j < toy.keys; ++j)
    for (int64_t d = 0; d < kDim; ++d) {
      toy.k[static_cast<size_t>(toy.kv.offset(toy.view, j) + d)] = dense.key(dense.k, j)[d];
      toy.v[static_cast<size_t>(toy.kv.offset(toy.view, j) + d)] = dense.key(dense.v, j)[d];
    }
}

void expect_rows(const Toy& toy, const std::vector<Row>& rows) {
  const Reference reference(toy);
  for (int64_t i = 0; i < toy.rows; ++i) {
    double lse = 0;
    const std::vector<double> out = reference.row(i, &lse);
    const Row& row = rows[static_cast<size_t>(i)];
    if (std::isinf(lse)) {
      EXPECT_EQ(row.lse, tilewise::kMinusInfinity);
    } else {
      EXPECT_NEAR(row.lse, lse, 1e-5);
    }
    for (int64_t d = 0; d < kDim; ++d) EXPECT_NEAR(row.out[d], out[static_cast<size_t>(d)], 1e-5);
  }
}

struct Window {
  int64_t left, right;
};

class Policies : public testing::TestWithParam<std::tuple<Window, int64_t, float>> {
 protected:
  Toy toy(int64_t rows) const {
    const auto& [window, keys, softcap] = GetParam();
    return make_toy(7, rows, keys, window.left, window.right, softcap);
  }
};

TEST_P(Policies, Forward) {
  for (int64_t rows : {1, 9, 20}) {
    const Toy t = toy(rows);
    for (int64_t tile : {1, 4, 32}) expect_rows(t, forward(t, tile, 5, 1));
  }
}

TEST_P(Policies, DecodeWithSplits) {
  for (int64_t rows : {1, 3}) {
    const Toy t = toy(rows);
    for (int64_t splits : {1, 2, 7}) expect_rows(t, forward(t, 4, 2, splits));
  }
}

TEST_P(Policies, PagedForwardEqualsDenseForwardBitwise) {
  Toy paged = toy(9);
  const std::vector<Row> dense_rows = forward(paged, 4, 5, 2);
  std::vector<int32_t> pages;
  scatter(paged, pages);
  const std::vector<Row> rows = forward(paged, 4, 5, 2);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].lse, dense_rows[i].lse);
    EXPECT_TRUE(std::equal(rows[i].out, rows[i].out + kDim, dense_rows[i].out));
  }
}

TEST_P(Policies, BackwardOverKeyTilesMatchesTheDerivative) {
  for (bool paged : {false, true}) {
    Toy t = toy(9);
    std::vector<int32_t> pages;
    if (paged) scatter(t, pages);
    const Gradients g = backward(t, forward(t, 4, 5, 1), 4, 3);
    Reference reference(t);
    for (size_t at = 0; at < g.dq.size(); ++at)
      EXPECT_NEAR(g.dq[at], reference.finite_difference(reference.q, at), 2e-5);
    for (size_t at = 0; at < g.dk.size(); ++at) {
      EXPECT_NEAR(g.dk[at], reference.finite_difference(reference.k, at), 2e-5);
      EXPECT_NEAR(g.dv[at], reference.finite_difference(reference.v, at), 2e-5);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Policies,
                         testing::Combine(testing::Values(Window{-1, -1}, Window{-1, 0},
                                                          Window{3, 0}, Window{2, 4},
                                                          Window{0, -1}),
                                          testing::Values(1, 6, 14), testing::Values(0.0f, 1.5f)));

TEST(Score, DerivativesMatchFiniteDifferences) {
  for (float softcap : {0.0f, 0.5f, 30.0f}) {
    const Score score{0.7f, softcap};
    for (float raw : {-20.0f, -1.0f, 0.0f, 0.3f, 5.0f}) {
      const auto value = [&](double x) {
        const double scaled = 0.7f * x;
        const auto cap = static_cast<double>(softcap);
        return (cap > 0 ? cap * std::tanh(scaled / cap) : scaled) - 0.25 * 3 + 2;
      };
      const auto s = score.apply<LaneMath>(Lane{raw}, Lane{0.25f}, Lane{3.0f}, Lane{2.0f});
      EXPECT_NEAR(s.value.x, value(static_cast<double>(raw)), 2e-6 * (1 + std::abs(s.value.x)));
      constexpr double kStep = 1e-5;
      const double x = static_cast<double>(raw);
      const double slope = (value(x + kStep) - value(x - kStep)) / (2 * kStep);
      EXPECT_NEAR(static_cast<double>(s.derivative.x) * static_cast<double>(0.7f), slope, 1e-6);
      const auto derivative = [&](double at) {
        const double t = softcap > 0 ? std::tanh(0.7f * at / static_cast<double>(softcap)) : 0;
        return 1 - t * t;
      };
      const double bend = (derivative(x + kStep) - derivative(x - kStep)) / (2 * kStep);
      EXPECT_NEAR(static_cast<double>(s.second.x) * static_cast<double>(0.7f), bend, 2e-6);
    }
  }
}

}  // namespace
