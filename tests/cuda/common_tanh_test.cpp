// The softcap's hyperbolic tangent compared with fp64, over its whole range.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cuda/common/device_math.h"

namespace tilewise::cuda {
namespace {

using ScaledTanh = HalfMath::ScaledTanh;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Checks x and -x on every code path that they may take.
void expect_tanh(float factor, float x) {
  const ScaledTanh tanh(factor);
  const double want = std::tanh(static_cast<double>(factor) * x);
  float got[4] = {x, -x, -x, x};
  tanh.apply_to_any(got);
  for (int i = 0; i < 4; ++i)
    EXPECT_NEAR(got[i], i % 3 == 0 ? want : -want, 3e-7) << x << ", element " << i;
  if (!tanh.is_small(x)) return;
  float small[2] = {x, -x};
  tanh.apply_to_small(small);
  EXPECT_NEAR(small[0], want, 2.5e-7 * want) << x;
  EXPECT_EQ(small[1], -small[0]);
}

TEST(ScaledTanh, IsAccurateToRounding) {
  for (float factor : {1.0f, 0.02f, 0x1p-16f, 1e-6f}) {
    for (float x = 1e-6f; x * factor < 100.0f; x *= 1.0007f) expect_tanh(factor, x);
  }
}

TEST(ScaledTanh, SaturatesAtOne) {
  for (float x : {1e4f, 1e30f, kInfinity}) expect_tanh(0.02f, x);
}

TEST(ScaledTanh, IsSmallUpToTwoFifths) {
  EXPECT_TRUE(ScaledTanh(0.02f).is_small(19.9f));
  EXPECT_FALSE(ScaledTanh(0.02f).is_small(20.1f));
  EXPECT_FALSE(ScaledTanh(0.02f).is_small(kInfinity));
  EXPECT_FALSE(ScaledTanh(std::numeric_limits<float>::min()).is_small(1.0f));
}

TEST(ScaledTanh, NanAffectsOnlyItself) {
  for (int at = 0; at < 4; ++at) {
    float any[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    any[at] = std::nanf("");
    float small[4] = {any[0], any[1], any[2], any[3]};
    ScaledTanh(0.02f).apply_to_any(any);
    ScaledTanh(0.02f).apply_to_small(small);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(std::isnan(any[i]), i == at);
      EXPECT_EQ(std::isnan(small[i]), i == at);
    }
  }
}

}  // namespace
}  // namespace tilewise::cuda
