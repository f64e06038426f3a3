// Matrix products of a warp. The lane that arrives last multiplies whole matrices for all lanes.
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

template <int kDepth>
struct Matrices {
  float a[kRows][kDepth];
  float b[kDepth][kColumns];
  float d[kRows][kColumns];
};

template <int kDepth>
void multiply(Matrices<kDepth>& m) {
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kDepth; ++k) {
      for (int j = 0; j < kColumns; ++j) m.d[i][j] += m.a[i][k] * m.b[k][j];
    }
  }
}

template <int kDepth>
void load_sums(Matrices<kDepth>& m, const Calls& calls) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(&m.d[lane / 4][lane % 4 * 2], calls[lane]->d, 8);
    std::memcpy(&m.d[lane / 4 + 8][lane % 4 * 2], calls[lane]->d + 2, 8);
  }
}

template <int kDepth>
void store_sums(const Matrices<kDepth>& m, const Calls& calls) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(calls[lane]->d, &m.d[lane / 4][lane % 4 * 2], 8);
    std::memcpy(calls[lane]->d + 2, &m.d[lane / 4 + 8][lane % 4 * 2], 8);
  }
  ++block().counts().matrix_products;
}

template <class T>
float element(uint32_t pair, int i) {
  return to_float(T{static_cast<uint16_t>(pair >> (16 * i))});
}

// 16-bit elements: a register holds columns 2t and 2t + 1 of a, rows 2t and 2t + 1 of b.
template <class T, int kDepth>
void multiply_pairs(const Calls& calls) {
  Matrices<kDepth> m;
  load_sums(m, calls);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4;
    for (int half = 0; half < kDepth / 8; ++half) {
      for (int i = 0; i < 2; ++i) {
        const int k = half * 8 + lane % 4 * 2 + i;
        m.a[g][k] = element<T>(calls[lane]->a[half * 2], i);
        m.a[g + 8][k] = element<T>(calls[lane]->a[half * 2 + 1], i);
        m.b[k][g] = element<T>(calls[lane]->b[half], i);
      }
    }
  }
  multiply(m);
  store_sums(m, calls);
}

// What the tensor core reads of a 32-bit operand: 10 bits of mantissa, the others are ignored.
float tf32(uint32_t x) { return float_of(x & 0xffffe000u); }

void multiply_tf32(const Calls& calls) {
  Matrices<8> m;
  load_sums(m, calls);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4;
    for (int half = 0; half < 2; ++half) {
      const int k = half * 4 + lane % 4;
      m.a[g][k] = tf32(calls[lane]->a[half * 2]);
      m.a[g + 8][k] = tf32(calls[lane]->a[half * 2 + 1]);
      m.b[k][g] = tf32(calls[lane]->b[half]);
    }
  }
  multiply(m);
  store_sums(m, calls);
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
