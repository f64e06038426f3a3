// The softcap's hyperbolic tangent beside fp64, over all it may be asked for.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cuda/common/device_math.h"

namespace tilewise::cuda {
namespace {

constexpr float kFactor = 0.02f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// By either of the ways that the four scores go.
void expect_tanh(float x, double relative) {
  float got[4] = {x, -x, x, x};
  HalfMath::ScaledTanh(kFactor).apply(got);
  const double want = std::tanh(static_cast<double>(kFactor) * x);
  for (int i = 0; i < 4; ++i)
    EXPECT_NEAR(got[i], i == 1 ? -want : want, 2.5e-7 + relative * std::fabs(want)) << x << i;
}

TEST(ScaledTanh, IsOffByRoundingOfTheLargestValue) {
  for (float x = 1e-6f; x < 1e6f; x *= 1.0007f) {
    expect_tanh(x, 1e-7);
    expect_tanh(-x, 1e-7);
  }
}

TEST(ScaledTanh, EndsAtOne) {
  for (float x : {1e4f, 1e30f, kInfinity}) expect_tanh(x, 0.0);
}

TEST(ScaledTanh, NanStaysNanAndAmongItself) {
  for (int at = 0; at < 4; ++at) {
    float x[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    x[at] = std::nanf("");
    HalfMath::ScaledTanh(kFactor).apply(x);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(x[i]), i == at);
  }
}

}  // namespace
}  // namespace tilewise::cuda
