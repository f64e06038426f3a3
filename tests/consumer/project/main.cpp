// Attention from C++: forward and backward through tilewise.hpp, checked against the definition.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tilewise/tilewise.hpp"

namespace {

constexpr int64_t kRows = 6, kHeads = 2, kDim = 8;
constexpr int64_t kCount = kRows * kHeads * kDim;

std::vector<float> wave(double phase) {
  std::vector<float> x(kCount);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(std::sin(phase + 0.7 * static_cast<double>(i)));
  return x;
}

std::size_t at(int64_t row, int64_t head, int64_t column) {
  return static_cast<std::size_t>((row * kHeads + head) * kDim + column);
}

// sum(out * weight) of causal attention in double precision. Sequence s has the rows from starts[s]
// to starts[s + 1].
double loss(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
            const std::vector<float>& weight, const std::vector<int32_t>& starts) {
  double total = 0;
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (int64_t i = starts[s]; i < starts[s + 1]; ++i)
      for (int64_t h = 0; h < kHeads; ++h) {
        double sum = 0;
        double out[kDim] = {};
        for (int64_t j = starts[s]; j <= i; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < kDim; ++d)
            dot += static_cast<double>(q[at(i, h, d)]) * k[at(j, h, d)];
          const double p = std::exp(dot / std::sqrt(static_cast<double>(kDim)));
          sum += p;
          for (int64_t d = 0; d < kDim; ++d) out[d] += p * v[at(j, h, d)];
        }
        for (int64_t d = 0; d < kDim; ++d) total += out[d] / sum * weight[at(i, h, d)];
      }
  return total;
}

// The largest logits [sequence, head] of the same problem.
std::vector<double> largest_logits(const std::vector<float>& q, const std::vector<float>& k,
                                   const std::vector<int32_t>& starts) {
  std::vector<double> largest;
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (int64_t h = 0; h < kHeads; ++h) {
      largest.push_back(-HUGE_VAL);
      for (int64_t i = starts[s]; i < starts[s + 1]; ++i)
        for (int64_t j = starts[s]; j <= i; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < kDim; ++d)
            dot += static_cast<double>(q[at(i, h, d)]) * k[at(j, h, d)];
          largest.back() = std::max(largest.back(), dot / std::sqrt(static_cast<double>(kDim)));
        }
    }
  return largest;
}

bool check(const char* what, double value, double expected, double tolerance) {
  const bool good = std::abs(value - expected) <= tolerance;
  if (!good) std::fprintf(stderr, "%s: %.9g, expected %.9g\n", what, value, expected);
  return good;
}

// Two sequences of 2 and 4 rows, one after the other; the gradients are compared with finite
// differences.
bool varlen_gradients_are_right() {
  const std::vector<int32_t> starts = {0, 2, 6};
  std::vector<float> q = wave(0.1), k = wave(0.2), v = wave(0.3);
  const std::vector<float> dout = wave(0.4);
  std::vector<float> out(kCount), dq(kCount), dk(kCount), dv(kCount), lse(kRows * kHeads);
  std::vector<float> max_logits(2 * kHeads);
  const tilewise::Sizes sizes = {kRows, kHeads, kDim};
  tilewise_attention a = tilewise::describe(
      tilewise::view(q, sizes), tilewise::view(k, sizes), tilewise::view(v, sizes),
      tilewise::view(out, sizes), {.causal = true, .cu_seqlens_q = starts, .cu_seqlens_k = starts},
      lse, {}, max_logits);
  const tilewise_gradients g = tilewise::describe(a, {.dout = tilewise::view(dout, sizes),
                                                      .dq = tilewise::view(dq, sizes),
                                                      .dk = tilewise::view(dk, sizes),
                                                      .dv = tilewise::view(dv, sizes)});
  tilewise::Workspace workspace;
  tilewise::forward(a, workspace);
  tilewise::backward(a, g, workspace);

  const double forward = std::inner_product(out.begin(), out.end(), dout.begin(), 0.0);
  bool good = check("forward", forward, loss(q, k, v, dout, starts), 1e-5);
  const std::vector<double> largest = largest_logits(q, k, starts);
  for (std::size_t i = 0; i < largest.size(); ++i)
    good = check("max_logits", max_logits[i], largest[i], 1e-6) && good;
  struct Pair {
    const char* name;
    std::vector<float>* input;
    const std::vector<float>* gradient;
  };
  for (const Pair& pair : {Pair{"dq", &q, &dq}, Pair{"dk", &k, &dk}, Pair{"dv", &v, &dv}})
    for (std::size_t i = 0; i < q.size(); i += 5) {
      const float original = (*pair.input)[i];
      (*pair.input)[i] = original + 0.0078125f;
      const double up = loss(q, k, v, dout, starts);
      (*pair.input)[i] = original - 0.0078125f;
      const double down = loss(q, k, v, dout, starts);
      (*pair.input)[i] = original;
      good = check(pair.name, (*pair.gradient)[i], (up - down) / 0.015625, 1e-4) && good;
    }
  return good;
}

// Equal numbers whose factors differ: out is the value times its factor.
bool float8_is_multiplied() {
  const std::vector<uint8_t> ones(kCount, 0x38);  // 1 in float8_e4m3
  const std::vector<float> twice(kHeads, 2.0f), thrice(kHeads, 3.0f);
  std::vector<float> out(kCount);
  const auto view = tilewise::view(ones.data(), TILEWISE_FLOAT8_E4M3, {1, kRows, kHeads, kDim});
  tilewise::attention(view, view, view, tilewise::view(out, {1, kRows, kHeads, kDim}),
                      {.q_descale = twice, .k_descale = twice, .v_descale = thrice});
  return check("float8", out.front(), 3.0, 1e-6) && check("float8", out.back(), 3.0, 1e-6);
}

bool mistakes_are_exceptions() {
  std::vector<float> x(kCount);
  const auto message = [](auto&& action) -> std::string {
    try {
      action();
    } catch (const tilewise::Error& error) {
      return error.status() == TILEWISE_INVALID_ARGUMENT ? error.what() : "another status";
    }
    return "no exception";
  };
  const auto expect = [](const std::string& given, const char* expected) {
    if (given.find(expected) != std::string::npos) return true;
    std::fprintf(stderr, "message \"%s\", expected \"%s\"\n", given.c_str(), expected);
    return false;
  };
  const auto whole = tilewise::view(x, {1, kRows, kHeads, kDim});
  const tilewise_attention a = tilewise::describe(whole, whole, whole, whole);
  const auto fewer_rows = tilewise::view(x, {1, kRows - 1, kHeads, kDim});
  const auto packed = tilewise::view(x, {kRows, kHeads, kDim});
  const auto halves = tilewise::view(x.data(), TILEWISE_FLOAT16, {1, kRows, kHeads, kDim});
  bool good = expect(message([&] { tilewise::describe(a, {.dout = whole, .dq = fewer_rows}); }),
                     "the rows of dq and of the problem are 5 and 6: they must be equal");
  good = expect(message([&] { tilewise::describe(a, {.dout = whole, .dk = packed}); }),
                "the ranks of dk and of the problem are 3 and 4") &&
         good;
  good = expect(message([&] { tilewise::describe(a, {.dout = halves}); }),
                "the dtypes of dout and of the problem are") &&
         good;
  good = expect(message([&] { tilewise::view(x, {2, kRows, kHeads, kDim}); }),
                "sizes and strides reach from element 0 to 191") &&
         good;
  good = expect(message([&] { tilewise::view(x, {kRows, kDim}); }), "sizes has 2 entries") && good;
  good =
      expect(message([&] { tilewise::view(x, {1, 2, 2}, {4, 2, 2}); }), "last stride is 2") && good;
  good =
      expect(message([&] { tilewise::attention(whole, whole, whole, whole, {.softcap = -1.0f}); }),
             "softcap is -1: ") &&
      good;
  std::vector<float> logits(kHeads + 1);
  good = expect(message([&] { tilewise::attention(whole, whole, whole, whole, {}, {}, logits); }),
                "max_logits has 3 entries: it must have 2") &&
         good;
  good = expect(message([&] {
                  tilewise::attention(whole, tilewise::view(x, {1, kRows, 1, kDim}), whole, whole);
                }),
                "the heads of k and v are 1 and 2") &&
         good;
  return good;
}

// After a move, the source has no memory; it can allocate some again, like a new workspace.
bool a_workspace_can_be_moved() {
  tilewise::Workspace first;
  const void* const memory = first.reserve(1 << 10);
  tilewise::Workspace second = std::move(first);
  const bool moved = second.capacity() == 1 << 10 && second.reserve(1 << 10) == memory;
  const bool anew = first.capacity() == 0 && first.reserve(64) != nullptr;
  if (!moved || !anew) std::fprintf(stderr, "a moved workspace lost its memory, or kept it\n");
  return moved && anew;
}

}  // namespace

int main() {
  bool good = varlen_gradients_are_right();
  good = float8_is_multiplied() && good;
  good = mistakes_are_exceptions() && good;
  good = a_workspace_can_be_moved() && good;
  return good ? 0 : 1;
}
