#include "capi/problem_views.h"

namespace tilewise::capi {

View rows_view(const char* name, const tilewise_tensor& t, const Problem& p, int32_t dtype,
               int64_t columns, Access access) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  return {name,
          t.data,
          {{{".stride_batch", varlen ? 1 : p.batch, t.stride_batch},
            {".stride_row", p.seqlen_q, t.stride_row},
            {".stride_head", p.heads_q, t.stride_head}}},
          p.batch == 0 && !varlen ? 0 : columns,
          element_bytes(dtype),
          access};
}

View keys_view(const char* name, const tilewise_tensor& t, const Problem& p, int64_t columns) {
  const bool paged = p.block_table != nullptr;
  const bool varlen = !paged && p.cu_seqlens_k != nullptr;
  return {name,
          t.data,
          {{{".stride_batch",
             paged    ? p.pages
             : varlen ? 1
                      : p.kv_batch,
             t.stride_batch},
            {".stride_row", paged ? p.page_size : p.seqlen_k, t.stride_row},
            {".stride_head", p.heads_kv, t.stride_head}}},
          columns,
          element_bytes(dtypes_of(p).kv),
          Access::read};
}

View lse_view(const char* name, const float* data, int64_t stride_batch, int64_t stride_head,
              const Problem& p, Access access) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  return {name,
          data,
          {{{"_stride_batch", varlen ? 1 : p.batch, stride_batch},
            {"_stride_head", p.heads_q, stride_head},
            {"", 1, 0}}},
          p.seqlen_q,
          4,
          access};
}

View bias_view(const char* name, const void* data, const Problem& p, int64_t stride_batch,
               int64_t stride_head, int64_t stride_row) {
  const int64_t keys = p.max_seqlen_k > 0 ? p.max_seqlen_k : key_capacity(p);
  const int64_t rows = p.max_seqlen_q > 0 ? p.max_seqlen_q : p.seqlen_q;
  return {name,
          data,
          {{{"_stride_batch", p.batch, stride_batch},
            {"_stride_head", p.heads_q, stride_head},
            {"_stride_row", rows, stride_row}}},
          keys,
          element_bytes(p.bias_dtype),
          Access::read};
}

View dkeys_view(const char* name, const tilewise_tensor& t, const Problem& p, int64_t columns) {
  View view = keys_view(name, t, p, columns);
  view.access = Access::write;
  if (keys_per_sequence(p)) {
    view.dimensions[0].size = p.batch;
    view.dimensions[1].size = key_capacity(p);
  }
  return view;
}

}  // namespace tilewise::capi
