// Tilewise from C++20: forward and backward of causal grouped-query attention through tilewise.hpp,
// with a derivative that is checked by finite differences.
//
//   c++ -std=c++20 attention.cpp $(pkg-config --cflags --libs tilewise) -o attention && ./attention
//
// examples/CMakeLists.txt builds it with find_package(tilewise).
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "tilewise/tilewise.hpp"

namespace {

constexpr int64_t kBatch = 1, kRows = 200, kHeads = 4, kKvHeads = 2, kColumns = 64;

std::vector<float> random_tensor(int64_t heads, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> data(static_cast<size_t>(kBatch * kRows * heads * kColumns));
  for (float& value : data) value = normal(engine);
  return data;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace

int main() try {
  using tilewise::view;
  auto q = random_tensor(kHeads, 1), k = random_tensor(kKvHeads, 2), v = random_tensor(kKvHeads, 3);
  std::vector<float> out(q.size()), lse(static_cast<size_t>(kBatch * kHeads * kRows));
  const auto q_view = [](auto& data) { return view(data, {kBatch, kRows, kHeads, kColumns}); };
  const auto kv_view = [](auto& data) { return view(data, {kBatch, kRows, kKvHeads, kColumns}); };

  // The forward. Later calls can use the same workspace.
  tilewise::Workspace workspace;
  const auto problem =
      tilewise::describe(q_view(q), kv_view(k), kv_view(v), q_view(out), {.causal = true}, lse);
  const tilewise_plan_info plan = tilewise::plan(problem);
  std::printf("%s with tiles of %d rows x %d keys: %s\n", plan.kernel, plan.tile_q, plan.tile_k,
              plan.why);
  tilewise::forward(problem, workspace);
  std::printf("row 0 sees only key 0: out - v = %.1e\n", std::abs(out[0] - v[0]));

  // The backward of loss = sum(out * weight).
  const auto weight = random_tensor(kHeads, 4);
  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size());
  const auto gradients = tilewise::describe(
      problem, {.dout = q_view(weight), .dq = q_view(dq), .dk = kv_view(dk), .dv = kv_view(dv)});
  tilewise::backward(problem, gradients, workspace);

  // The same derivative along one direction, from differences of the loss.
  const auto direction = random_tensor(kKvHeads, 5);
  const auto loss_at = [&](float step) {
    std::vector<float> moved(k);
    for (size_t i = 0; i < k.size(); ++i) moved[i] += step * direction[i];
    tilewise::attention(q_view(q), kv_view(moved), kv_view(v), q_view(out), {.causal = true},
                        workspace);
    return dot(out, weight);
  };
  constexpr float kStep = 1e-2f;
  const double differences = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
  const double derivative = dot(dk, direction);
  std::printf("derivative along a direction of k: %.4f, by differences %.4f\n", derivative,
              differences);
  const bool agree = std::abs(derivative - differences) <= 2e-2 * (1 + std::abs(differences));

  // Errors are exceptions. Here the view of v has more heads than its memory.
  try {
    tilewise::attention(q_view(q), kv_view(k), q_view(v), q_view(out));
    return 1;
  } catch (const tilewise::Error& error) {
    std::printf("a view that exceeds its memory: %s\n", error.what());
  }
  return agree ? 0 : 1;
} catch (const tilewise::Error& error) {
  std::fprintf(stderr, "attention: %s\n", error.what());
  return 1;
}
