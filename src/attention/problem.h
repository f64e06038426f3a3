// The problem as every kernel reads it: the struct of the C ABI after validation, and the policies
// (band, keys, score, dropout) of one of its sequences.
#pragma once

#include "attention/band.h"
#include "attention/kv_source.h"
#include "attention/philox.h"
#include "attention/score.h"
#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// The largest head dimension of q and k, and of v: that of a latent cache (512 + 64). CPU families
// compute all of them; each CUDA family has a limit of its own.
inline constexpr int64_t kMaxHeadDim = 576;

// After `validated_problem`: head_dim_v and kv_batch are set, and every size has been checked.
using Problem = tilewise_attention;
using Gradients = tilewise_gradients;
using Tangents = tilewise_tangents;

// One sequence of the batch: where its rows are and what they may see. GPU kernels read the index
// arrays without prior validation, so entries are used only where they lie inside the tensors.
struct Sequence {
  int64_t batch;        // index of the sequence
  int64_t batch_index;  // index along stride_batch of q and out (0 when cu_seqlens_q is given)
  int64_t first_row;    // rows of q before row 0
  Band band;            // with the number of rows and keys in use
  KvSource kv;
  // Whether all its index entries lie inside the tensors. If not, it has no keys, and its rows must
  // become NaN.
  bool fits = true;

  // Offset in elements of row i in q, out, dout or dq, at head and column 0.
  TILEWISE_FN int64_t row_offset(const tilewise_tensor& view, int64_t i) const {
    return batch_index * view.stride_batch + (first_row + i) * view.stride_row;
  }
  // Offset of row i in lse and dlse, at head 0.
  TILEWISE_FN int64_t lse_offset(int64_t stride_batch, int64_t i) const {
    return batch_index * stride_batch + first_row + i;
  }
};

TILEWISE_FN int64_t group_size(const Problem& p) { return p.heads_q / p.heads_kv; }

// Whether the first head_dim_v columns of a key are its values, as in a latent cache (MLA).
TILEWISE_FN bool values_are_in_keys(const Problem& p) {
  return p.v.data == p.k.data && p.head_dim_v <= p.head_dim &&
         p.v.stride_batch == p.k.stride_batch && p.v.stride_row == p.k.stride_row &&
         (p.heads_kv == 1 || p.v.stride_head == p.k.stride_head);
}

// Query rows of all sequences, in the order of out and lse: batch * seqlen_q, or the rows of the
// whole varlen batch.
TILEWISE_FN int64_t total_rows(const Problem& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : p.batch * p.seqlen_q;
}

// Rows of sequence b in the tensors, whether in use or not. Where GPU kernels derive addresses from
// them, cu_seqlens_q is a copy that has been made valid (cuda/common/prepare.h).
TILEWISE_FN Range query_rows(const Problem& p, int64_t b) {
  if (p.cu_seqlens_q == nullptr) return {0, p.seqlen_q};
  return {p.cu_seqlens_q[b], p.cu_seqlens_q[b + 1]};
}

// A length from the index arrays, and whether it is valid.
struct Length {
  int64_t value;
  bool fits;
};

// Rows of sequence b that are in use. An invalid `seqused_q` is ignored: all rows are then in use.
TILEWISE_FN Length used_rows(const Problem& p, int64_t b) {
  Length used = {query_rows(p, b).size(), true};
  if (p.seqused_q != nullptr) {
    const int64_t given = p.seqused_q[b];
    used.fits = given >= 0 && given <= used.value;
    if (used.fits) used.value = given;
  }
  if (p.max_seqlen_q == 0 || used.value <= p.max_seqlen_q) return used;
  return {p.max_seqlen_q, false};
}

// Rows that k and v have for one sequence.
TILEWISE_FN int64_t key_capacity(const Problem& p) {
  return p.block_table != nullptr ? p.block_table_width * p.page_size : p.seqlen_k;
}

// The keys of a sequence: the number of rows before key 0 (in the tensor, or in the pages of the
// sequence), the number of keys, and the index along stride_batch. There are no keys if an entry is
// invalid.
struct SequenceKeys {
  int64_t first;
  int64_t count;
  int64_t batch_index;
  bool fits;
};

TILEWISE_FN SequenceKeys sequence_keys(const Problem& p, int64_t b) {
  SequenceKeys keys = {0, 0, 0, true};
  int64_t capacity = key_capacity(p);
  int64_t used = capacity;
  if (p.block_table != nullptr) {
    if (p.pages == 0) capacity = 0;
    if (p.cu_seqlens_k != nullptr) used = int64_t{p.cu_seqlens_k[b + 1]} - p.cu_seqlens_k[b];
  } else if (p.cu_seqlens_k != nullptr) {
    keys.first = p.cu_seqlens_k[b];
    const int64_t end = p.cu_seqlens_k[b + 1];
    keys.fits = keys.first >= 0 && end <= capacity;
    capacity = used = end - keys.first;
  } else {
    keys.batch_index = b;
    if (p.kv_batch_idx != nullptr) {
      keys.batch_index = p.kv_batch_idx[b];
      keys.fits = keys.batch_index >= 0 && keys.batch_index < p.kv_batch;
    }
  }
  if (p.seqused_k != nullptr) used = p.seqused_k[b];
  keys.fits = keys.fits && used >= 0 && used <= capacity;
  int64_t padding = 0;
  if (p.leftpad_k != nullptr) {
    padding = p.leftpad_k[b];
    keys.fits = keys.fits && padding >= 0 && padding <= capacity;
  }
  keys.count = max(int64_t{0}, used - padding);
  if (p.max_seqlen_k != 0) keys.fits = keys.fits && keys.count <= p.max_seqlen_k;
  if (!keys.fits) return {0, 0, 0, false};
  keys.first += padding;
  return keys;
}

TILEWISE_FN int64_t key_count(const Problem& p, int64_t b) { return sequence_keys(p, b).count; }

// The number of keys by which `diagonal` moves the band of sequence b. It is limited so that
// positions fit into 32 bits; a band that is moved by 2^30 keys has left every sequence behind.
TILEWISE_FN int64_t diagonal_of(const Problem& p, int64_t b) {
  constexpr int64_t kMaxDiagonal = int64_t{1} << 30;
  return p.diagonal == nullptr ? 0 : clamp(p.diagonal[b], -kMaxDiagonal, kMaxDiagonal);
}

TILEWISE_FN Sequence sequence_of(const Problem& p, int64_t b) {
  const Length rows = used_rows(p, b);
  const SequenceKeys keys = sequence_keys(p, b);
  Sequence s;
  s.batch = b;
  s.batch_index = p.cu_seqlens_q == nullptr ? b : 0;
  s.first_row = query_rows(p, b).begin;
  s.band = Band::make(rows.value, keys.count, p.window_left, p.window_right, diagonal_of(p, b));
  s.kv.first = keys.first;
  s.kv.batch_index = keys.batch_index;
  if (p.block_table != nullptr) {
    s.kv.pages = p.block_table + b * p.block_table_stride;
    s.kv.page_size = p.page_size;
    s.kv.last_page = static_cast<uint32_t>(p.pages - 1);
  }
  s.fits = rows.fits && keys.fits;
  return s;
}

// Whether dk and dv have rows for every sequence, [batch, key capacity], because sequences may
// share keys: k and v are pages or are selected by kv_batch_idx.
TILEWISE_FN bool keys_per_sequence(const Problem& p) {
  return p.block_table != nullptr || p.kv_batch_idx != nullptr;
}

// The keys of a sequence in dk and dv, which are never paged.
TILEWISE_FN KvSource gradient_source(const Problem& p, const Sequence& s) {
  return keys_per_sequence(p) ? s.kv.dense(s.batch) : s.kv;
}

// Whether no array gives positions, lengths or diagonals: all sequences then have the lengths and
// the band of the shape.
TILEWISE_FN bool has_uniform_sequences(const Problem& p) {
  return p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr && p.seqused_q == nullptr &&
         p.seqused_k == nullptr && p.leftpad_k == nullptr && p.kv_batch_idx == nullptr &&
         p.block_table == nullptr && p.diagonal == nullptr;
}

// `sequence_of` for a problem with uniform sequences.
TILEWISE_FN Sequence uniform_sequence(const Problem& p, int64_t b) {
  Sequence s;
  s.batch = b;
  s.batch_index = b;
  s.first_row = 0;
  s.band = Band::make(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right);
  s.kv.first = 0;
  s.kv.batch_index = b;
  return s;
}

TILEWISE_FN Score score_of(const Problem& p) {
  return {p.scale_ptr != nullptr ? *p.scale_ptr : p.scale, p.softcap};
}

// The scale factors of the float8_e4m3 cache of a problem or an append; 1 for all other caches. The
// factor of k is part of the scale of the scores.
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

// The factor of the scores of float8 queries.
TILEWISE_FN float score_descale(const Problem& p, int64_t batch, int64_t kv_head) {
  const float of_keys = k_descale(p, batch, kv_head);
  if (p.q_descale == nullptr) return of_keys;
  return p.q_descale[batch * p.q_descale_stride_batch + kv_head * p.q_descale_stride_head] *
         of_keys;
}

TILEWISE_FN Score score_of(const Problem& p, int64_t batch, int64_t kv_head) {
  Score score = score_of(p);
  score.scale *= k_descale(p, batch, kv_head);
  return score;
}

TILEWISE_FN Dropout dropout_of(const Problem& p) {
  const bool in_memory = p.dropout_state != nullptr;
  const uint64_t seed = in_memory ? p.dropout_state[0] : p.dropout_seed;
  const uint64_t offset = in_memory ? p.dropout_state[1] : p.dropout_offset;
  return Dropout::make(p.dropout_p, seed, offset).from(p.row_offset, p.key_offset);
}

// The number of a query head among all heads of all sequences, as dropout counts them.
TILEWISE_FN uint32_t dropout_head(const Problem& p, int64_t batch, int64_t head) {
  return static_cast<uint32_t>((batch + p.batch_offset) * p.heads_q_total + head + p.head_offset);
}

// Whether the problem needs the general form of a kernel, which has the options that cost time in
// the inner loop; the plain form lacks them.
TILEWISE_FN bool is_general(const Problem& p) {
  return p.softcap != 0.0f || p.alibi_slopes != nullptr || p.bias != nullptr || p.dropout_p > 0.0f;
}

}  // namespace tilewise
