/* Appending to a key/value cache in place, with rotary embedding. */
#ifndef TILEWISE_APPEND_H
#define TILEWISE_APPEND_H

#include <stdint.h>

#include "tilewise/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Appends new keys and values to a cache in place, and applies rotary embedding (RoFormer,
 * arXiv 2104.09864) to the new keys and to q. New key r of sequence b is written at key
 * cache_seqlens[b] + r (leftpad_k included). It and row r of q are rotated at position
 * cache_seqlens[b] - leftpad_k[b] + r or, with rotary_seqlens, at rotary_seqlens[b] + r. (The
 * FlashAttention packages count the padding: they rotate at cache_seqlens[b] + r.) With
 * q_single_position every row of q is rotated at the position of row 0, as those packages do
 * without causal and window. */
typedef struct tilewise_kv_append {
  uint32_t struct_size;
  int32_t device;
  int32_t device_index;
  int32_t dtype;
  void* stream;
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_new; /* new keys per sequence; with cu_seqlens_new: all rows of k_new */
  int64_t seqlen_k;   /* capacity of a dense cache, even if only q is rotated; paged: not read */
  int64_t heads_q;
  int64_t heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;
  tilewise_tensor q;       /* [B, Sq, Hq, D] or [T, Hq, D]; data NULL: no query rotation */
  tilewise_tensor q_out;   /* the rotated copy of q; may be q itself */
  tilewise_tensor k_new;   /* [B, Snew, Hkv, D] or [Tnew, Hkv, D]; data NULL: nothing is appended */
  tilewise_tensor v_new;   /* as k_new, with Dv columns */
  tilewise_tensor k_cache; /* as k and v of tilewise_attention */
  tilewise_tensor v_cache;
  const int32_t* cache_seqlens;  /* [B]: keys already in the cache, leftpad_k included; NULL: 0 */
  const int32_t* cu_seqlens_q;   /* [B + 1], optional */
  const int32_t* cu_seqlens_new; /* [B + 1], optional */
  const int32_t* rotary_seqlens; /* [B], optional: the rotary position of row 0 */
  const int32_t* block_table;    /* sequences may share pages, but every row that is written must
                                    belong to one sequence only */
  int64_t block_table_stride;
  int64_t block_table_width;
  int64_t page_size;
  int64_t pages;
  const int32_t* kv_batch_idx;
  int64_t kv_batch;
  const int32_t* leftpad_k;
  const void* rotary_cos; /* [rotary_rows, rotary_dim / 2] of `dtype`, contiguous; NULL: off */
  const void* rotary_sin;
  int64_t rotary_rows;
  int64_t rotary_dim;         /* leading columns that are rotated: even, at most head_dim */
  int32_t rotary_interleaved; /* 1: pairs (2i, 2i+1) (GPT-J); 0: (i, i + rotary_dim/2) (GPT-NeoX) */
  int32_t q_single_position;
  const tilewise_parallel* parallel;
  int32_t kv_float8; /* 1: the caches are float8_e4m3. A new x is written as x / descale, rounded to
                        nearest even and limited to 448 in magnitude */
  int32_t check;     /* as in tilewise_attention */
  const float* k_descale; /* as in tilewise_attention */
  const float* v_descale;
  int64_t k_descale_stride_batch;
  int64_t k_descale_stride_head;
  int64_t v_descale_stride_batch;
  int64_t v_descale_stride_head;
} tilewise_kv_append;
TILEWISE_API tilewise_status tilewise_append_kv(const tilewise_kv_append* append);

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_APPEND_H */
