// Operands of wgmma and tcgen05.mma in shared memory: panels with the 128-byte swizzle.
#pragma once

#include <array>
#include <cstdint>

#include "base/float8.h"
#include "base/half.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {

// The fields of a matrix descriptor that wgmma and tcgen05 have in common. PTX ISA 9.7.15.5.1.2
// and 9.7.16.4.1.
struct SwizzledOperand {
  static constexpr int kDepth = 16;  // k of a product of 16-bit elements
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunkElements = 8;

  uint32_t address;
  uint32_t leading;
  uint32_t stride;

  explicit SwizzledOperand(uint64_t descriptor)
      : address(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)) {}

  // Address of 8 elements, from k = 8 * chunk on, of row `row` (m or n) where k is contiguous.
  uint32_t by_columns(int row, int chunk) const {
    return swizzled(address + static_cast<uint32_t>(row / 8) * stride +
                    static_cast<uint32_t>(row % 8 * 128 + chunk * kChunkBytes));
  }
  // Address of 8 elements, from 8 * chunk on, of row `k` where m or n is contiguous.
  uint32_t by_rows(int k, int chunk) const {
    return swizzled(address + static_cast<uint32_t>(chunk / 8) * leading +
                    static_cast<uint32_t>(k / 8) * stride +
                    static_cast<uint32_t>(k % 8 * 128 + chunk % 8 * kChunkBytes));
  }

  // Calls visit(address, line, chunk) for `rows` rows of the operand from row0 on. Lines are rows,
  // or k where the operand is transposed.
  template <class Visit>
  void for_each_chunk(bool trans, int row0, int rows, Visit visit) const {
    if (trans) {
      for (int k = 0; k < kDepth; ++k) {
        for (int chunk = 0; chunk < rows / kChunkElements; ++chunk) {
          visit(by_rows(k, row0 / kChunkElements + chunk), k, chunk);
        }
      }
      return;
    }
    for (int row = 0; row < rows; ++row) {
      for (int chunk = 0; chunk < kDepth / kChunkElements; ++chunk) {
        visit(by_columns(row0 + row, chunk), row, chunk);
      }
    }
  }

 private:
  static uint32_t field(uint64_t bits, int shift) {
    return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4;
  }
  static uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }
};

// Equals to_float(Half), without a branch.
inline float half_bits_to_float(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t special = -static_cast<uint32_t>(static_cast<int32_t>(magnitude) >= 0x0f800000);
  const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t value = (special & (magnitude | 0x70000000u)) | (~special & scaled);
  return float_of((bits & 0x8000u) << 16 | value);
}

inline void unpack(const uint16_t* bits, int count, bool bf16, float* values) {
  if (bf16) {
    for (int i = 0; i < count; ++i) values[i] = float_of(uint32_t{bits[i]} << 16);
  } else {
    for (int i = 0; i < count; ++i) values[i] = half_bits_to_float(bits[i]);
  }
}

// Each of `count` units of 16 bits holds two numbers of float8_e4m3.
inline void unpack_float8(const uint16_t* bits, int count, float* values) {
  static const auto kMeaning = [] {
    std::array<float, 256> meaning{};
    for (size_t i = 0; i < meaning.size(); ++i)
      meaning[i] = to_float(Float8{static_cast<uint8_t>(i)});
    return meaning;
  }();
  for (int i = 0; i < count; ++i) {
    values[2 * i] = kMeaning[bits[i] & 0xffu];
    values[2 * i + 1] = kMeaning[bits[i] >> 8];
  }
}

}  // namespace tilewise::cuda::emulator
