// How decoding reads K and V in place, one vector at a time: dot products with q and sums weighted
// by p, in fp32 or in pairs of bf16.
#pragma once

#include <type_traits>

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// A copy of the first n elements, padded with zeros to the size of a whole read.
template <class T, int N>
struct FirstElements {
  T data[N] = {};
  TILEWISE_FN FirstElements(const T* from, int64_t n) {
    if (n > 0) copy_first(data, from, n);  // the last read of a group may be empty
  }
};

// A vector that repeats kUnits units of 32 bits.
template <class V, int kUnits, class T>
TILEWISE_FN V repeated(const T* from) {
  static_assert(kUnits <= 2 || kUnits == W || W > 4);
  if constexpr (kUnits == W) {
    return load_as<V>(from);
  } else if constexpr (kUnits == 1) {
    return reinterpret_cast<V>(U{} + load_as<uint32_t>(from));
  } else if constexpr (kUnits == 2) {
    using Pairs = uint64_t __attribute__((vector_size(W * 4)));
    return reinterpret_cast<V>(Pairs{} + load_as<uint64_t>(from));
#if defined(__AVX512F__)
  } else if constexpr (kUnits == 4) {
    return reinterpret_cast<V>(_mm512_broadcast_i32x4(load_as<__m128i>(from)));
  } else {
    return reinterpret_cast<V>(_mm512_broadcast_i64x4(load_as<__m256i>(from)));
#elif defined(__AVX2__)
  } else {
    return reinterpret_cast<V>(_mm256_broadcastsi128_si256(load_as<__m128i>(from)));
#endif
  }
}

// One read: kParts * W neighbouring elements as kParts vectors of fp32. Half has two parts
// where there are enough registers for the sums of both.
template <class T>
struct Widened {
  static constexpr int kParts = sizeof(T) == 2 && kRegisters == 32 ? 2 : 1;
  TILEWISE_FN static void read(const T* from, F (&part)[kParts]) {
    for (int i = 0; i < kParts; ++i) part[i] = to_fp32(from + i * W);
  }
  TILEWISE_FN static void read_first(const T* from, int64_t n, F (&part)[kParts]) {
    for (int i = 0; i < kParts; ++i, from += W, n -= W) {
      if (n >= W)
        part[i] = to_fp32(from);
      else
        part[i] = n > 0 ? to_fp32_tail(from, n) : F{};
    }
  }
  TILEWISE_FN static void in_order(F (&)[kParts]) {}
};

// A read of Float8 gives the elements divided by kFloat8Unit.
template <>
struct Widened<Float8> {
  static constexpr int kParts = 2;
  TILEWISE_FN static void read(const Float8* from, F (&part)[2]) { to_fp32_units(from, part); }
  TILEWISE_FN static void read_first(const Float8* from, int64_t n, F (&part)[2]) {
    read(FirstElements<Float8, 2 * W>(from, n).data, part);
  }
  TILEWISE_FN static void in_order(F (&)[2]) {}
};

// The even and the odd columns: two operations, where widening in order takes four.
template <>
struct Widened<BFloat16> {
  static constexpr int kParts = 2;
  TILEWISE_FN static void read(const BFloat16* from, F (&part)[2]) {
    const U pairs = load_as<U>(from);
    const U even = pairs << 16;
    const U odd = pairs & 0xffff0000u;
    part[0] = load_as<F>(&even);
    part[1] = load_as<F>(&odd);
  }
  TILEWISE_FN static void read_first(const BFloat16* from, int64_t n, F (&part)[2]) {
    read(FirstElements<BFloat16, 2 * W>(from, n).data, part);
  }
  TILEWISE_FN static void in_order(F (&part)[2]) {
    interleave(part[0], part[1], std::make_integer_sequence<int, W>{});
  }

 private:
  template <int... J>
  TILEWISE_FN static void interleave(F& a, F& b, std::integer_sequence<int, J...>) {
    const F low = __builtin_shufflevector(a, b, (J / 2 + J % 2 * W)...);
    const F high = __builtin_shufflevector(a, b, (W / 2 + J / 2 + J % 2 * W)...);
    a = low;
    b = high;
  }
};

// fp32 arithmetic for any storage type.
template <class T>
struct Stream {
  using Storage = T;
  static constexpr int kParts = Widened<T>::kParts;  // vectors of sums per read
  static constexpr int kColumns = kParts * W;        // elements per read
  static constexpr float kUnit =
      std::is_same_v<T, Float8> ? kFloat8Unit : 1.0f;  // the unit of a read
  struct Read {
    F part[kParts];
  };
  // Keys whose weights are applied together: with 16 registers, two would leave too few for the
  // sums.
  static constexpr int kKeys = kRegisters == 32 ? 2 : 1;
  struct Values {
    Read of[kKeys];
  };

  // Whether a few columns of a key, repeated over a vector, are an operand of UnitScores
  // (decode_units.h) without further shuffles.
  static constexpr bool kHasUnits = std::is_same_v<T, float> || (std::is_same_v<T, Half> && W >= 8);
  using Unit = F;
  static constexpr int kUnitColumns = 1;
  static constexpr int kUnitBlocks = std::is_same_v<T, Half> ? 2 : 1;
  template <int kUnits>
  TILEWISE_FN static Unit read_repeated(const T* from) {
    if constexpr (std::is_same_v<T, float>) {
      return repeated<F, kUnits>(from);
    } else {
      const auto halves = repeated<H2, kUnits / 2>(from);  // twice as many as there are lanes
      F part[2];
      to_fp32(halves, part, std::make_integer_sequence<int, W>{});
      return part[0];
    }
  }
  TILEWISE_FN static F multiply_add(F sum, F a, F b) { return sum + a * b; }
  TILEWISE_FN static Read read(const T* from) {
    Read r;
    Widened<T>::read(from, r.part);
    return r;
  }
  // The first n < kColumns elements, then zeros.
  TILEWISE_FN static Read read_first(const T* from, int64_t n) {
    Read r;
    Widened<T>::read_first(from, n, r.part);
    return r;
  }
  TILEWISE_FN static void negate(Read& r) {
    for (F& part : r.part) part = -part;
  }
  TILEWISE_FN static F dot(F sum, const Read& q, const Read& k) {
    for (int i = 0; i < kParts; ++i) sum = sum + q.part[i] * k.part[i];
    return sum;
  }

  // The weights of W keys overwrite their scores; those of kKeys keys are applied together.
  static constexpr bool kRoundsWeights = false;  // to bf16
  TILEWISE_FN static void store_weights(float* row, int64_t key, F p) { store(row + key, p); }
  TILEWISE_FN static float weight(const float* row, int64_t key) { return row[key]; }
  TILEWISE_FN static Values values(const Read (&read)[kKeys]) {
    Values v;
    for (int k = 0; k < kKeys; ++k) v.of[k] = read[k];
    return v;
  }
  TILEWISE_FN static void weigh(F (&sum)[kParts], const Values& v, const float* row, int64_t key) {
    for (int k = 0; k < kKeys; ++k)
      for (int i = 0; i < kParts; ++i) sum[i] = sum[i] + v.of[k].part[i] * row[key + k];
  }
  TILEWISE_FN static void in_order(F (&sum)[kParts]) { Widened<T>::in_order(sum); }
};

#if defined(TILEWISE_BF16_DOT)
// Two bf16 products per lane with fp32 sums: of neighbouring columns in q k, of two keys in p v.
template <>
struct Stream<BFloat16> {
  using Storage = BFloat16;
  static constexpr int kParts = 2;
  static constexpr int kColumns = kParts * W;
  static constexpr float kUnit = 1.0f;
  static constexpr int kKeys = 2;
  using Read = H2;
  struct Values {
    H2 low, high;  // the first and the last four of every 8 columns
  };

  static constexpr bool kHasUnits = true;
  using Unit = H2;
  static constexpr int kUnitColumns = 2;
  static constexpr int kUnitBlocks = 1;
  template <int kUnits>
  TILEWISE_FN static Unit read_repeated(const BFloat16* from) {
    return repeated<H2, kUnits>(from);
  }
  TILEWISE_FN static Read read(const BFloat16* from) { return load_as<H2>(from); }
  TILEWISE_FN static Read read_first(const BFloat16* from, int64_t n) {
    return read(FirstElements<BFloat16, kColumns>(from, n).data);
  }
  TILEWISE_FN static void negate(Read& r) { r ^= static_cast<uint16_t>(0x8000); }
  TILEWISE_FN static F multiply_add(F sum, H2 a, H2 b) { return dot_bf16(sum, a, b); }
  TILEWISE_FN static F dot(F sum, Read q, Read k) { return multiply_add(sum, q, k); }

  // A weight is half as wide as a score, so no score is overwritten before it has been read.
  static constexpr bool kRoundsWeights = true;
  TILEWISE_FN static void store_weights(float* row, int64_t key, F p) {
    from_fp32(reinterpret_cast<BFloat16*>(row) + key, p);
  }
  TILEWISE_FN static float weight(const float* row, int64_t key) {
    return to_float(load_as<BFloat16>(reinterpret_cast<const BFloat16*>(row) + key));
  }
  TILEWISE_FN static Values values(const Read (&read)[kKeys]) {
    return {pairs_low(read[0], read[1]), pairs_high(read[0], read[1])};
  }
  TILEWISE_FN static void weigh(F (&sum)[kParts], const Values& v, const float* row, int64_t key) {
    const U pair = U{} + load_as<uint32_t>(reinterpret_cast<const BFloat16*>(row) + key);
    sum[0] = multiply_add(sum[0], v.low, reinterpret_cast<H2>(pair));
    sum[1] = multiply_add(sum[1], v.high, reinterpret_cast<H2>(pair));
  }
  TILEWISE_FN static void in_order(F (&sum)[kParts]) {
    in_order(sum, std::make_integer_sequence<int, W>{});
  }

 private:
  // The lane, of both vectors together, that holds the sum of a column.
  static constexpr int lane_of(int column) {
    return column / 8 * 4 + column / 4 % 2 * W + column % 4;
  }
  template <int... J>
  TILEWISE_FN static void in_order(F (&sum)[kParts], std::integer_sequence<int, J...>) {
    const F low = sum[0];
    const F high = sum[1];
    sum[0] = __builtin_shufflevector(low, high, lane_of(J)...);
    sum[1] = __builtin_shufflevector(low, high, lane_of(W + J)...);
  }
};
#endif

}  // namespace
}  // namespace tilewise::cpu
