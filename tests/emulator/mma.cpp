// Matrix products of a warp. The last lane to arrive multiplies whole matrices for all lanes.
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kRows = 16;
constexpr int kColumns = 8;

struct Product {
  float* d;
  uint32_t a[4];
  uint32_t b[2];
};

using Calls = std::array<Product*, kLanes>;

using Sums = float[kRows][kColumns];

void load_sums(Sums& d, const Calls& calls) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(&d[lane / 4][lane % 4 * 2], calls[lane]->d, 8);
    std::memcpy(&d[lane / 4 + 8][lane % 4 * 2], calls[lane]->d + 2, 8);
  }
}

void store_sums(const Sums& d, const Calls& calls) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(calls[lane]->d, &d[lane / 4][lane % 4 * 2], 8);
    std::memcpy(calls[lane]->d + 2, &d[lane / 4 + 8][lane % 4 * 2], 8);
  }
  ++block().counts().matrix_products;
}

// A register holds elements 2i and 2i + 1 of a row. Whole arrays are converted in loops that
// compilers vectorise.
void unpack(const uint32_t* pairs, int count, BFloat16, float* even, float* odd) {
  for (int i = 0; i < count; ++i) even[i] = float_of(pairs[i] << 16);
  for (int i = 0; i < count; ++i) odd[i] = float_of(pairs[i] & 0xffff0000u);
}

// Equals to_float(Half), without a branch.
float half_bits_to_float(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t special = -static_cast<uint32_t>(static_cast<int32_t>(magnitude) >= 0x0f800000);
  const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t value = (special & (magnitude | 0x70000000u)) | (~special & scaled);
  return float_of((bits & 0x8000u) << 16 | value);
}

void unpack(const uint32_t* pairs, int count, Half, float* even, float* odd) {
  for (int i = 0; i < count; ++i) even[i] = half_bits_to_float(pairs[i]);
  for (int i = 0; i < count; ++i) odd[i] = half_bits_to_float(pairs[i] >> 16);
}

// 16-bit elements: a register holds columns 2t and 2t + 1 of a, rows 2t and 2t + 1 of b.
template <class T, int kDepth>
void multiply_pairs(const Calls& calls) {
  constexpr int kPairs = kDepth / 2;
  uint32_t a[kRows][kPairs];
  uint32_t b[kPairs][kColumns];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < kDepth / 8; ++half) {
      const int pair = half * 4 + lane % 4;
      a[lane / 4][pair] = calls[lane]->a[half * 2];
      a[lane / 4 + 8][pair] = calls[lane]->a[half * 2 + 1];
      b[pair][lane / 4] = calls[lane]->b[half];
    }
  }
  float a_even[kRows][kPairs], a_odd[kRows][kPairs];
  float b_even[kPairs][kColumns], b_odd[kPairs][kColumns];
  unpack(a[0], kRows * kPairs, T{}, a_even[0], a_odd[0]);
  unpack(b[0], kPairs * kColumns, T{}, b_even[0], b_odd[0]);
  float d[kRows][kColumns];
  load_sums(d, calls);
  for (int i = 0; i < kRows; ++i) {
    for (int pair = 0; pair < kPairs; ++pair) {
      for (int j = 0; j < kColumns; ++j) d[i][j] += a_even[i][pair] * b_even[pair][j];
      for (int j = 0; j < kColumns; ++j) d[i][j] += a_odd[i][pair] * b_odd[pair][j];
    }
  }
  store_sums(d, calls);
}

// The bits of a 32-bit operand that the tensor core reads: 10 bits of mantissa, the others are
// ignored.
float tf32(uint32_t x) { return float_of(x & 0xffffe000u); }

// Tensor cores truncate their sums. Only fp32, which is split into tf32 numbers, is accurate enough
// to show that: with this model, the error of an H200 and that of the emulator differ by a tenth.
float truncated(double sum) {
  const auto x = static_cast<float>(sum);
  return std::abs(static_cast<double>(x)) > std::abs(sum) ? std::nextafter(x, 0.0f) : x;
}

void multiply_tf32(const Calls& calls) {
  constexpr int kDepth = 8;
  float a[kRows][kDepth];
  float b[kDepth][kColumns];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const int k = half * 4 + lane % 4;
      a[lane / 4][k] = tf32(calls[lane]->a[half * 2]);
      a[lane / 4 + 8][k] = tf32(calls[lane]->a[half * 2 + 1]);
      b[k][lane / 4] = tf32(calls[lane]->b[half]);
    }
  }
  Sums d;
  load_sums(d, calls);
  if (block().options().truncate_sums) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; ++j) {
        double sum = d[i][j];
        for (int k = 0; k < kDepth; ++k) sum += static_cast<double>(a[i][k]) * b[k][j];
        d[i][j] = truncated(sum);
      }
    }
  } else {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kDepth; ++k) {
        for (int j = 0; j < kColumns; ++j) d[i][j] += a[i][k] * b[k][j];
      }
    }
  }
  store_sums(d, calls);
}

}  // namespace

void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product call{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  block().meet(Collective::mma_m16n8k16_f16, call, multiply_pairs<Half, 16>);
}

void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product call{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  block().meet(Collective::mma_m16n8k16_bf16, call, multiply_pairs<BFloat16, 16>);
}

void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  Product call{d, {a0, a1, 0, 0}, {b0, 0}};
  block().meet(Collective::mma_m16n8k8_f16, call, multiply_pairs<Half, 8>);
}

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product call{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  block().meet(Collective::mma_m16n8k8_tf32, call, multiply_tf32);
}

}  // namespace tilewise::cuda::emulator
