// The element types of a problem's tensors: the only place that derives them from the struct of the
// C ABI.
#pragma once

#include "base/platform.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Bytes of an element; dtypes are those of tilewise_dtype.
TILEWISE_FN constexpr int64_t element_bytes(int32_t dtype) {
  switch (dtype) {
    case TILEWISE_FLOAT32:
      return 4;
    case TILEWISE_FLOAT16:
    case TILEWISE_BFLOAT16:
      return 2;
    default:
      return 1;
  }
}

// Short names as they appear in kernel names: "f32", "f16", "bf16", "f8".
constexpr const char* short_dtype(int32_t dtype) {
  switch (dtype) {
    case TILEWISE_FLOAT32:
      return "f32";
    case TILEWISE_FLOAT16:
      return "f16";
    case TILEWISE_BFLOAT16:
      return "bf16";
    default:
      return "f8";
  }
}

struct Dtypes {
  int32_t q;    // of q, dq, and of dout and its tangent, which are factors of products as q is
  int32_t kv;   // of k, v, dk and dv
  int32_t out;  // of out and its tangent

  // Whether keys and values are stored in fewer bits than the queries have.
  TILEWISE_FN constexpr bool converts_kv() const { return kv != q; }
  // Whether keys and values have descales.
  TILEWISE_FN constexpr bool scales_kv() const { return kv == TILEWISE_FLOAT8_E4M3; }
  // The dtype in which kernels read q: its own or, instead of float8_e4m3, a 16-bit type, all of
  // which hold its numbers. It is that of out, so that the two agree, or bfloat16.
  TILEWISE_FN constexpr int32_t widened_q() const {
    if (q != TILEWISE_FLOAT8_E4M3) return q;
    return out == TILEWISE_FLOAT16 ? TILEWISE_FLOAT16 : TILEWISE_BFLOAT16;
  }
};

// The tilewise_dtype of out.
TILEWISE_FN constexpr int32_t out_dtype_of(const tilewise_attention& given) {
  switch (given.out_dtype) {
    case TILEWISE_OUT_FLOAT32:
      return TILEWISE_FLOAT32;
    case TILEWISE_OUT_FLOAT16:
      return TILEWISE_FLOAT16;
    case TILEWISE_OUT_BFLOAT16:
      return TILEWISE_BFLOAT16;
    default:
      return given.dtype == TILEWISE_FLOAT8_E4M3 ? TILEWISE_BFLOAT16 : given.dtype;
  }
}
// An append writes a copy of q in the dtype of q.
TILEWISE_FN constexpr int32_t out_dtype_of(const tilewise_kv_append& given) { return given.dtype; }

// `Given` is a problem, or an append to its cache.
template <class Given>
TILEWISE_FN constexpr Dtypes dtypes_of(const Given& given) {
  const int32_t kv = given.kv_float8 != 0 ? TILEWISE_FLOAT8_E4M3 : given.dtype;
  return {.q = given.dtype, .kv = kv, .out = out_dtype_of(given)};
}

}  // namespace tilewise
