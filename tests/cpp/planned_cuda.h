// Problems on a GPU and their plans.
#pragma once

#include <gtest/gtest.h>

#include "dispatch/planner.h"

namespace tilewise::dispatch {

inline Problem problem(int32_t dtype, int64_t batch = 1, int64_t rows = 2048, int64_t keys = 2048,
                       int64_t heads = 8, int64_t head_dim = 128) {
  Problem p{};
  p.struct_size = sizeof(p);
  p.device = TILEWISE_CUDA;
  p.dtype = dtype;
  p.batch = p.kv_batch = batch;
  p.seqlen_q = rows;
  p.seqlen_k = keys;
  p.heads_q = p.heads_kv = heads;
  p.head_dim = p.head_dim_v = head_dim;
  for (tilewise_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
    const bool of_keys = t == &p.k || t == &p.v;
    *t = {nullptr, (of_keys ? keys : rows) * heads * head_dim, heads * head_dim, head_dim};
  }
  p.window_left = p.window_right = -1;
  p.scale = 0.125f;
  return p;
}

inline Gradients gradients(const Problem& p) {
  Gradients g{};
  g.dout = p.out;
  return g;
}

inline cuda::Plan forward(const Problem& p, const Device& device) {
  const Decision decision = plan(p, device);
  EXPECT_EQ(decision.status, TILEWISE_OK) << explain(decision, p, device);
  return decision.cuda;
}

// A decode of two sequences with 4096 keys each in a paged cache.
inline Problem paged(int32_t dtype, int64_t page_size, int64_t head_dim = 128) {
  static constexpr int32_t kTable[] = {0};  // no planner reads it
  Problem p = problem(dtype, 2, 1, 0, 8, head_dim);
  p.block_table = kTable;
  p.block_table_width = p.block_table_stride = 4096 / page_size;
  p.page_size = page_size;
  p.pages = 2 * p.block_table_width;
  for (tilewise_tensor* t : {&p.k, &p.v}) t->stride_batch = page_size * t->stride_row;
  return p;
}

}  // namespace tilewise::dispatch
