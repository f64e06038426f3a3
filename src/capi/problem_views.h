// The tensors of a problem and of its gradients, as views for the layout checks.
#pragma once

#include "attention/problem.h"
#include "capi/views.h"

namespace tilewise::capi {

// q, out, dout, dq: one row per query, of elements of `dtype`.
View rows_view(const char* name, const tilewise_tensor& t, const Problem& p, int32_t dtype,
               int64_t columns, Access access);

// k and v, which are only read: dense, variable length or paged.
View keys_view(const char* name, const tilewise_tensor& t, const Problem& p, int64_t columns);

// dk and dv: like k and v, but with block_table or kv_batch_idx they have one row per key of each
// sequence, because sequences may share keys.
View dkeys_view(const char* name, const tilewise_tensor& t, const Problem& p, int64_t columns);

// bias and its tangent, as far as the library can know their sizes: [B, Hq, rows, keys], which are
// only read.
View bias_view(const char* name, const void* data, const Problem& p, int64_t stride_batch,
               int64_t stride_head, int64_t stride_row);

// lse and dlse: [B, Hq, Sq] or [Hq, T], rows contiguous.
View lse_view(const char* name, const float* data, int64_t stride_batch, int64_t stride_head,
              const Problem& p, Access access);

}  // namespace tilewise::capi
