// Conversions and the functions of the special function unit.
#include <cmath>

#include "base/float8.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

template <class T>
uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

float flush(float x) {
  constexpr float kSmallestNormal = 0x1p-126f;
  return std::fabs(x) < kSmallestNormal ? std::copysign(0.0f, x) : x;
}

}  // namespace

uint32_t cvt_f16x2(float low, float high) { return pack<Half>(low, high); }
uint32_t cvt_bf16x2(float low, float high) { return pack<BFloat16>(low, high); }
uint32_t cvt_f16x2_e4m3x2(uint16_t x) {
  const auto value = [&](int shift) { return to_float(Float8{static_cast<uint8_t>(x >> shift)}); };
  return pack<Half>(value(0), value(8));
}
uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
  uint32_t r = 0;
  const float numbers[] = {x3, x2, x1, x0};
  for (const float x : numbers) r = r << 8 | from_float<Float8>(x).bits;
  return r;
}
float ex2(float x) { return flush(std::exp2(flush(x))); }
float lg2(float x) { return std::log2(flush(x)); }
float rcp_approximate(float x) { return flush(1.0f / flush(x)); }

}  // namespace tilewise::cuda::emulator
