// Tensor maps of a problem's tensors.
#include "cuda/launch.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

struct Sizes {
  int64_t batches;
  int64_t rows;
  int64_t heads;
};

// A size of 0 becomes 1: no kernel reads such a map, but the driver has to accept it.
TensorMap map_of(const Problem& p, const tilewise_tensor& view, const Sizes& sizes, int32_t dtype,
                 int64_t columns, int32_t box_rows) {
  constexpr int64_t kUnusedStride = 16;
  const auto stride = [](int64_t size, int64_t x) { return size > 1 ? x : kUnusedStride; };
  TensorMapShape shape;
  for (const void* data : {view.data, p.q.data, p.k.data}) {
    if (shape.data == nullptr) shape.data = data;
  }
  if (shape.data == nullptr) return {};  // no rows and no keys: no kernel runs
  shape.columns = columns;
  shape.rows = max<int64_t>(1, sizes.rows);
  shape.heads = sizes.heads;
  shape.batches = max<int64_t>(1, sizes.batches);
  shape.stride_row = stride(sizes.rows, view.stride_row);
  shape.stride_head = stride(sizes.heads, view.stride_head);
  shape.stride_batch = stride(sizes.batches, view.stride_batch);
  shape.element_bytes = static_cast<int32_t>(element_bytes(dtype));
  shape.dtype = dtype;
  shape.box_rows = box_rows;
  TensorMap map;
  encode_tensor_map(map, shape);
  return map;
}

}  // namespace

TensorMap map_of_rows(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows) {
  const int64_t batches = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  return map_of(p, view, {batches, p.seqlen_q, p.heads_q}, dtypes_of(p).q, columns, box_rows);
}

TensorMap map_of_keys(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows) {
  if (p.block_table != nullptr) return {};
  const int64_t batches = p.cu_seqlens_k != nullptr ? 1 : p.kv_batch;
  return map_of(p, view, {batches, p.seqlen_k, p.heads_kv}, dtypes_of(p).kv, columns, box_rows);
}

TensorMap map_of_pages(const Problem& p, const tilewise_tensor& view, int64_t columns,
                       int32_t box_rows) {
  return map_of(p, view, {p.pages, p.page_size, p.heads_kv}, dtypes_of(p).kv, columns, box_rows);
}

TensorMap map_of_transposed_values(const Problem& p, void* values, int64_t batches, int64_t columns,
                                   int32_t box_rows) {
  const int64_t head = p.head_dim_v * columns;
  return map_of(p, {values, p.heads_kv * head, columns, head}, {batches, p.head_dim_v, p.heads_kv},
                dtypes_of(p).kv, columns, box_rows);
}

}  // namespace tilewise::cuda
