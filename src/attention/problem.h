// What is asked, as every kernel reads it: the struct of the C ABI after validation, and the
// policies of one of its sequences.
#pragma once

#include "attention/band.h"
#include "attention/kv_source.h"
#include "attention/philox.h"
#include "attention/score.h"
#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// The largest head dimension, of q and k and of v.
inline constexpr int64_t kMaxHeadDim = 512;

// After `normalise`: head_dim_v and kv_batch are set, every size has been checked to fit.
using Problem = tilewise_attention;
using Gradients = tilewise_gradients;

// One sequence of the batch: where its rows are and what they may see.
struct Sequence {
  int64_t batch;      // index of the sequence
  int64_t slot;       // index along stride_batch of q, out (0 when cu_seqlens_q is given)
  int64_t first_row;  // rows of q before row 0
  Band band;          // with the number of rows and keys in use
  KvSource kv;

  // Offset in elements of row i in q, out, dout or dq; head and column 0.
  TILEWISE_FN int64_t row_offset(const tilewise_tensor& view, int64_t i) const {
    return slot * view.stride_batch + (first_row + i) * view.stride_row;
  }
  // Offset of row i in lse, dlse; head 0.
  TILEWISE_FN int64_t lse_offset(int64_t stride_batch, int64_t i) const {
    return slot * stride_batch + first_row + i;
  }
};

TILEWISE_FN int64_t group_size(const Problem& p) { return p.heads_q / p.heads_kv; }

// Rows of sequence b in the tensors, whether in use or not.
TILEWISE_FN Range query_rows(const Problem& p, int64_t b) {
  if (p.cu_seqlens_q == nullptr) return {0, p.seqlen_q};
  return {p.cu_seqlens_q[b], p.cu_seqlens_q[b + 1]};
}

// Rows that k and v have for one sequence.
TILEWISE_FN int64_t key_capacity(const Problem& p) {
  return p.block_table != nullptr ? p.block_table_width * p.page_size : p.seqlen_k;
}

TILEWISE_FN KvSource kv_source(const Problem& p, int64_t b) {
  KvSource kv;
  kv.first = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
  if (p.block_table != nullptr) {
    kv.pages = p.block_table + b * p.block_table_stride;
    kv.page_size = p.page_size;
  } else if (p.cu_seqlens_k != nullptr) {
    kv.first += p.cu_seqlens_k[b];
  } else {
    kv.slot = p.kv_batch_idx != nullptr ? p.kv_batch_idx[b] : b;
  }
  return kv;
}

TILEWISE_FN int64_t key_count(const Problem& p, int64_t b) {
  const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
  const int64_t used = p.seqused_k != nullptr      ? p.seqused_k[b]
                       : p.cu_seqlens_k != nullptr ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]
                                                   : key_capacity(p);
  return max(int64_t{0}, used - padding);
}

TILEWISE_FN Sequence sequence_of(const Problem& p, int64_t b) {
  const Range rows = query_rows(p, b);
  Sequence s;
  s.batch = b;
  s.slot = p.cu_seqlens_q == nullptr ? b : 0;
  s.first_row = rows.begin;
  s.band = Band::make(p.seqused_q != nullptr ? p.seqused_q[b] : rows.size(), key_count(p, b),
                      p.window_left, p.window_right);
  s.kv = kv_source(p, b);
  return s;
}

// Whether no index array says where sequences lie or what they use: all are alike.
TILEWISE_FN bool shape_says_all(const Problem& p) {
  return p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr && p.seqused_q == nullptr &&
         p.seqused_k == nullptr && p.leftpad_k == nullptr && p.kv_batch_idx == nullptr &&
         p.block_table == nullptr;
}

// `sequence_of` then.
TILEWISE_FN Sequence sequence_of_shape(const Problem& p, int64_t b) {
  Sequence s;
  s.batch = b;
  s.slot = b;
  s.first_row = 0;
  s.band = Band::make(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right);
  s.kv.first = 0;
  s.kv.slot = b;
  return s;
}

TILEWISE_FN Score score_of(const Problem& p) {
  return {p.scale_ptr != nullptr ? *p.scale_ptr : p.scale, p.softcap};
}

// What the values of a float8_e4m3 cache are multiplied by, 1 of any other; of a problem or of an
// append. The factor of k is a part of the scale.
template <class Cached>
TILEWISE_FN float k_descale(const Cached& c, int64_t batch, int64_t kv_head) {
  if (c.k_descale == nullptr) return 1.0f;
  return c.k_descale[batch * c.k_descale_stride_batch + kv_head * c.k_descale_stride_head];
}
template <class Cached>
TILEWISE_FN float v_descale(const Cached& c, int64_t batch, int64_t kv_head) {
  if (c.v_descale == nullptr) return 1.0f;
  return c.v_descale[batch * c.v_descale_stride_batch + kv_head * c.v_descale_stride_head];
}

TILEWISE_FN Score score_of(const Problem& p, int64_t batch, int64_t kv_head) {
  Score score = score_of(p);
  score.scale *= k_descale(p, batch, kv_head);
  return score;
}

TILEWISE_FN Dropout dropout_of(const Problem& p) {
  if (p.dropout_state == nullptr)
    return Dropout::make(p.dropout_p, p.dropout_seed, p.dropout_offset);
  return Dropout::make(p.dropout_p, p.dropout_state[0], p.dropout_state[1]);
}

// The general form carries what costs something in the inner loop; the plain one does not.
TILEWISE_FN bool is_general(const Problem& p) {
  return p.softcap != 0.0f || p.alibi_slopes != nullptr || p.bias != nullptr || p.dropout_p > 0.0f;
}

}  // namespace tilewise
