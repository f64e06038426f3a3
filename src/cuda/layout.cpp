#include "cuda/layout.h"

#include "cuda/form.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

constexpr int64_t kAlignment = 16;

struct Shape {
  int64_t batch;
  int64_t rows;
  int64_t heads;
};

Shape rows_shape(const Problem& p) {
  return {p.cu_seqlens_q != nullptr ? 1 : p.batch, p.seqlen_q, p.heads_q};
}
Shape keys_shape(const Problem& p) {
  return {p.cu_seqlens_k != nullptr ? 1 : p.kv_batch, p.seqlen_k, p.heads_kv};
}
Shape pages_shape(const Problem& p) { return {p.pages, p.page_size, p.heads_kv}; }

// Whether the stride of one dimension of a view is a multiple of 16 bytes. The stride of a
// dimension with one entry is never used.
bool aligned(int64_t size, int64_t stride, int64_t bytes) {
  return size <= 1 || stride % (kAlignment / bytes) == 0;
}

bool aligned(const tilewise_tensor& view, const Shape& shape, int32_t dtype) {
  const int64_t bytes = element_bytes(dtype);
  return reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0 &&
         aligned(shape.batch, view.stride_batch, bytes) &&
         aligned(shape.rows, view.stride_row, bytes) &&
         aligned(shape.heads, view.stride_head, bytes);
}

// The paged forms count the rows of a sequence, and the 16-byte chunks of a cache, in 32 bits.
constexpr int64_t kMaxPagedCount = int64_t{1} << 30;

bool rows_fit_32_bits(const Problem& p) {
  return key_capacity(p) <= kMaxPagedCount && p.page_size <= kMaxPagedCount;
}

bool is_mappable(const tilewise_tensor& view, const Shape& shape) {
  constexpr int64_t kMaxElements = int64_t{1} << 38;  // within 2^40 bytes for all element sizes
  const auto fits = [](int64_t size, int64_t stride) {
    return size <= 1 || (stride >= 0 && stride < kMaxElements);
  };
  return fits(shape.batch, view.stride_batch) && fits(shape.rows, view.stride_row) &&
         fits(shape.heads, view.stride_head) && shape.rows < INT32_MAX;
}

}  // namespace

bool rows_are_aligned(const Request& request) {
  const Problem& p = request.problem;
  const Gradients& g = request.gradients;
  const Tangents& t = request.tangents;
  const Dtypes& dtypes = request.dtypes;
  const int64_t bytes_of_key = element_bytes(dtypes.kv);
  if (p.head_dim * bytes_of_key % kAlignment != 0 || p.head_dim_v * bytes_of_key % kAlignment != 0)
    return false;
  const Shape rows = rows_shape(p);
  const Shape keys = p.block_table != nullptr ? pages_shape(p) : keys_shape(p);
  const bool inputs = aligned(p.q, rows, dtypes.q) && aligned(p.out, rows, dtypes.out) &&
                      aligned(p.k, keys, dtypes.kv) && aligned(p.v, keys, dtypes.kv);
  if (request.is(Pass::forward) || !inputs) return inputs;
  const Shape gradients = keys_per_sequence(p) ? Shape{p.batch, key_capacity(p), p.heads_kv} : keys;
  const auto aligned_if_given = [](const tilewise_tensor& view, const Shape& shape, int32_t dtype) {
    return view.data == nullptr || aligned(view, shape, dtype);
  };
  const bool tangents =
      aligned_if_given(t.q, rows, dtypes.q) && aligned_if_given(t.k, keys, dtypes.kv) &&
      aligned_if_given(t.v, keys, dtypes.kv) && aligned_if_given(t.out, rows, dtypes.out);
  if (request.is(Pass::jvp) || !tangents) return tangents;
  return aligned(g.dout, rows, dtypes.q) && aligned_if_given(t.dout, rows, dtypes.q) &&
         aligned_if_given(g.dq, rows, dtypes.q) && aligned_if_given(g.dk, gradients, dtypes.kv) &&
         aligned_if_given(g.dv, gradients, dtypes.kv);
}

bool rows_are_mappable(const Problem& p, const tilewise_tensor& view) {
  return is_mappable(view, rows_shape(p));
}

bool keys_are_mappable(const Problem& p) {
  const Shape keys = keys_shape(p);
  return is_mappable(p.k, keys) && is_mappable(p.v, keys);
}

bool pages_are_mappable(const Problem& p) {
  const Shape pages = pages_shape(p);
  return p.leftpad_k == nullptr && rows_fit_32_bits(p) && is_mappable(p.k, pages) &&
         is_mappable(p.v, pages);
}

bool pages_fit_boxes(const Problem& p, int64_t keys) {
  const bool pages_divide_tile = p.page_size >= kMinTmaPageRows && keys % p.page_size == 0;
  return (pages_divide_tile || p.page_size % keys == 0) && pages_are_mappable(p);
}

bool pages_fit_32_bits(const Problem& p) {
  const auto fits = [&](const tilewise_tensor& view) {
    const auto bytes = [&](int64_t size, int64_t stride) {
      return static_cast<double>(size) * static_cast<double>(stride < 0 ? -stride : stride) *
             static_cast<double>(element_bytes(dtypes_of(p).kv));
    };
    return bytes(p.pages, view.stride_batch) + bytes(p.page_size, view.stride_row) <=
           static_cast<double>(kMaxPagedCount * kAlignment);
  };
  return rows_fit_32_bits(p) && fits(p.k) && fits(p.v);
}

}  // namespace tilewise::cuda
