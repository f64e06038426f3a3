/* Tilewise: exact attention computed tile by tile. The C ABI.
 *
 * Copyright (c) 2026 The Tilewise authors. BSD-3-Clause.
 *
 * One struct, `tilewise_attention`, describes the problem. `tilewise_plan` says which kernel will
 * run and how much workspace it needs; `tilewise_forward` and `tilewise_backward` run it. A launch
 * allocates no workspace and no GPU memory (a check of index arrays may allocate host memory). No
 * exception crosses this interface: functions that can fail return a status, and
 * `tilewise_last_error` returns one sentence about the last failure of the calling thread.
 *
 * Definition (FlashAttention-2, arXiv 2307.08691, with the conventions of the FlashAttention
 * packages; B sequences of Sq rows and Sk keys, Hq query heads that share Hkv key/value heads):
 *
 *     s_ij = scale * q_i . k_j                      raw score
 *     s_ij = softcap * tanh(s_ij / softcap)         if softcap > 0
 *     a_i  = i + Sk - Sq + diagonal                 the key that row i is aligned with
 *     s_ij = s_ij - slope_h * |a_i - j|             if alibi_slopes
 *     s_ij = s_ij + bias_ij                         if bias
 *     key j is visible to row i when  a_i - window_left <= j <= a_i + window_right,
 *                                     and the mask allows it
 *     lse_i = log(sum over visible j of exp(s_ij) + exp(sink_h))
 *     out_i = sum over visible j of dropout(exp(s_ij - lse_i)) v_j
 *
 * `diagonal` is 0 unless the rows or keys are a shard of longer sequences.
 *
 * A row that sees no key and has no sink gives out = 0, lse = -inf and gradients 0, never NaN.
 *
 * Conventions: sizes and strides are int64 and count elements. The last dimension of every tensor
 * is contiguous; other strides are arbitrary (0 broadcasts an input). A NULL pointer switches an
 * option off.
 */
#ifndef TILEWISE_TILEWISE_H
#define TILEWISE_TILEWISE_H

#include <stdint.h>

#include "tilewise/version.h"

#if defined(_WIN32)
#define TILEWISE_API
#else
#define TILEWISE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tilewise_status {
  TILEWISE_OK = 0,
  TILEWISE_INVALID_ARGUMENT = 1, /* the message names the argument, its value and what is allowed */
  TILEWISE_UNSUPPORTED = 2,      /* valid, but without a kernel in this build or on this device */
  TILEWISE_WORKSPACE_TOO_SMALL = 3, /* tilewise_plan for the same structs gives the size */
  TILEWISE_INTERNAL = 4
} tilewise_status;

typedef enum tilewise_dtype {
  TILEWISE_FLOAT32 = 0,
  TILEWISE_FLOAT16 = 1,
  TILEWISE_BFLOAT16 = 2,
  TILEWISE_FLOAT8_E4M3 = 3
} tilewise_dtype;

typedef enum tilewise_device { TILEWISE_CPU = 0, TILEWISE_CUDA = 1 } tilewise_device;

typedef enum tilewise_pass {
  TILEWISE_PASS_FORWARD = 0,
  TILEWISE_PASS_BACKWARD = 1,
  TILEWISE_PASS_JVP = 2,
  TILEWISE_PASS_SECOND = 3
} tilewise_pass;

/* A view of [batch, row, head, column]. Strides count elements; the column stride is 1.
 * Variable length: [row, head, column]; stride_batch is not read.
 * Paged: [page, row in page, head, column]; stride_batch is the stride between pages. */
typedef struct tilewise_tensor {
  void* data;
  int64_t stride_batch;
  int64_t stride_row;
  int64_t stride_head;
} tilewise_tensor;

/* Optional hook that runs CPU tasks on the caller's threads. `parallel_for` must call
 * task(context, i) exactly once for every i in [0, tasks), in any order and on any threads (one
 * after the other is legal), and return when all calls have returned. At most `threads` tasks may
 * run at a time; scratch memory is sized accordingly. Results do not depend on the hook. Without
 * one the library uses its own thread pool (TILEWISE_NUM_THREADS). */
typedef void (*tilewise_task)(void* context, int64_t index);
typedef struct tilewise_parallel {
  void (*parallel_for)(void* user, int64_t tasks, tilewise_task task, void* context);
  void* user;
  int32_t threads;  /* 0: as many as the library's own pool has */
  int32_t reserved; /* 0 */
} tilewise_parallel;

/* A mask: which pairs of a row and a key of a sequence are visible, if the band allows them as
 * well. Rows and keys are counted within a sequence, keys from the first one after leftpad_k on.
 * Set struct_size = sizeof(tilewise_mask). All arrays are in the memory of the device.
 *
 * Ranges: a set of rectangles; a pair is visible if at least one shows it. Entry e is
 * {row_begin, row_end, key_begin, key_end, kind}. What lies beyond the rows and keys of a sequence
 * is ignored.
 *
 * Blocks of 128 rows and 128 keys: list l = (b * heads + h) * ceil(rows / 128) + row block has the
 * visible key blocks in ascending order, without overlaps. Entry e is {block_begin, block_end,
 * bits}: with bits < 0 all pairs of these key blocks are visible; otherwise it is one key block,
 * and bits is its index in `bits`. Pairs beyond `rows` and `keys` are hidden. */
typedef enum tilewise_mask_kind {
  TILEWISE_MASK_RANGES = 1,
  TILEWISE_MASK_BLOCKS = 2
} tilewise_mask_kind;

/* The pairs of a rectangle of R rows and C keys: row i and key j of the rectangle. */
typedef enum tilewise_range_kind {
  TILEWISE_RANGE_FULL = 0,
  TILEWISE_RANGE_CAUSAL = 1,         /* j <= i + C - R: its last row sees its last key */
  TILEWISE_RANGE_INVERSE_CAUSAL = 2, /* j >= i: its first row sees its first key */
  TILEWISE_RANGE_BOTH = 3            /* i <= j <= i + C - R */
} tilewise_range_kind;

typedef struct tilewise_mask {
  uint32_t struct_size;
  int32_t kind;  /* tilewise_mask_kind */
  int64_t batch; /* B, or 1: the same mask for every sequence */
  int64_t heads; /* Hq, or 1: the same mask for every head; ranges: 1 */
  int64_t rows;  /* of a mask of blocks; ranges: not read */
  int64_t keys;
  const int32_t* first;   /* list l has entries first[l]..first[l + 1] - 1. Ranges have a list per
                             sequence of the mask: [batch + 1] */
  const int32_t* entries; /* [entry_count, 5] for ranges, [entry_count, 3] for blocks */
  int64_t entry_count;
  const uint32_t* bits; /* [bit_blocks, 128, 4]: bit j % 32 of word j / 32 is key j of the block */
  int64_t bit_blocks;
} tilewise_mask;

/* An attention problem. Zero-initialise it, set struct_size = sizeof(tilewise_attention), then fill
 * in the fields. The library accepts any struct_size from the first published one up to its own
 * (missing fields read as 0), and a larger one if all bytes that it does not know are 0. */
typedef struct tilewise_attention {
  uint32_t struct_size;
  int32_t device;       /* tilewise_device */
  int32_t device_index; /* ordinal of the GPU; 0 for the CPU */
  int32_t dtype;        /* tilewise_dtype of q, k, v, out */
  void* stream;         /* CUDA stream; not read for the CPU */

  int64_t batch;      /* B, the number of sequences: 0..2^31-1 */
  int64_t seqlen_q;   /* Sq, rows per sequence; with cu_seqlens_q: T, all rows of q */
  int64_t seqlen_k;   /* Sk, keys per sequence; with cu_seqlens_k: Tk, all rows of k; paged: not
                         read */
  int64_t heads_q;    /* Hq: 1..2^31-1, a multiple of heads_kv */
  int64_t heads_kv;   /* Hkv: 1..2^31-1 */
  int64_t head_dim;   /* D, columns of q and k: 1..512 */
  int64_t head_dim_v; /* Dv, columns of v and out: 1..512; 0 means head_dim */

  tilewise_tensor q;   /* [B, Sq, Hq, D] or [T, Hq, D] */
  tilewise_tensor k;   /* [kv_batch, Sk, Hkv, D], [Tk, Hkv, D] or [pages, page_size, Hkv, D] */
  tilewise_tensor v;   /* as k, with Dv columns */
  tilewise_tensor out; /* [B, Sq, Hq, Dv] or [T, Hq, Dv]; written by the forward, read by the
                          backward */
  float* lse; /* fp32 [B, Hq, Sq] or [Hq, T], rows contiguous; natural log; written by the forward,
                 where it may be NULL, read by the backward */
  int64_t lse_stride_batch;
  int64_t lse_stride_head;

  /* Band, aligned bottom-right unless `diagonal` is given. Negative: no limit. Causal attention is
   * window_right = 0. */
  int64_t window_left;
  int64_t window_right;

  /* Score */
  float scale;                /* factor of q.k; read if scale_ptr is NULL */
  float softcap;              /* 0: off; otherwise at least FLT_MIN */
  const float* scale_ptr;     /* optional: one float in device memory that replaces `scale` */
  const float* alibi_slopes;  /* fp32 [Hq] or [B, Hq] */
  int64_t alibi_stride_batch; /* 0 for [Hq] */
  const void* bias;           /* [B, Hq, Sq, Sk] of bias_dtype; key stride 1 */
  int64_t bias_stride_batch;  /* 0 broadcasts. Variable length: row i and key j of sequence b use
                                 bias[b, h, i, j]; it must have the rows and keys of the longest
                                 sequence, which the library cannot check */
  int64_t bias_stride_head;
  int64_t bias_stride_row;
  int32_t bias_dtype; /* fp32 or the dtype of q */
  float dropout_p;    /* 0 <= p < 1 */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t* dropout_state; /* optional: {seed, offset} in device memory replace the two */
  const float* sinks;            /* fp32 [Hq]: a logit per head that takes part in the softmax;
                                    +inf gives out = 0 and lse = +inf */

  /* Variable length. The arrays are int32 in the memory of the device. */
  const int32_t* cu_seqlens_q; /* [B + 1]: starts at 0, does not decrease, last entry <= T */
  const int32_t* cu_seqlens_k; /* [B + 1]; with block_table only the differences (lengths) matter */
  const int32_t* seqused_q;    /* [B]: rows in use per sequence, at most its length */
  const int32_t*
      seqused_k;        /* [B]: keys in use, leftpad_k included; also for dense and paged caches */
  int64_t max_seqlen_q; /* optional upper bound of the rows per sequence; 0: not known */
  int64_t max_seqlen_k; /* the same for keys */

  /* Key/value cache */
  const int32_t* block_table;  /* [B, block_table_width]: the page of each page_size keys */
  int64_t block_table_stride;  /* entries from one row to the next */
  int64_t block_table_width;   /* without seqused_k, Sk is block_table_width * page_size */
  int64_t page_size;           /* keys per page, at least 1; read if block_table is given */
  int64_t pages;               /* number of pages in k and v */
  const int32_t* kv_batch_idx; /* [B]: sequence b uses batch row kv_batch_idx[b] of k and v;
                                  not together with block_table or cu_seqlens_k */
  int64_t kv_batch;            /* batch rows of k and v; 0 means `batch` */
  const int32_t* leftpad_k;    /* [B]: number of padding keys before the first key */

  int32_t num_splits; /* splits of the keys in the forward, 0..256; 0: the planner chooses, by shape
                         alone */
  int32_t deterministic; /* 1: repeated calls give bitwise equal results on the same device; on the
                            CPU they always do */
  int32_t check; /* GPU: 1 checks the entries of the index arrays before the launch. That waits
                    for the stream, so it must be 0 during capture. The CPU always checks */
  int32_t tf32;  /* GPU: 1 allows rounding fp32 operands to TF32 */
  const tilewise_parallel* parallel; /* CPU only; NULL: the library's own pool */

  int32_t batch_invariant; /* 1: out, lse and the gradients of q, k and v of a sequence are
                              bitwise independent of the other sequences in the batch; num_splits
                              must be 0 */
  int32_t kv_float8;       /* 1: k and v are float8_e4m3, and q is float16 or bfloat16; their values
                              are multiplied by the descales. Forward only */
  const float* k_descale;  /* fp32 [B, Hkv]; NULL: 1 */
  const float* v_descale;
  int64_t k_descale_stride_batch; /* 0 broadcasts */
  int64_t k_descale_stride_head;
  int64_t v_descale_stride_batch;
  int64_t v_descale_stride_head;
  float* lse_low; /* optional; needs lse and has its shape and strides. The rounding error of lse:
                     lse + lse_low is the log-sum-exp to twice the precision of fp32, which is
                     needed where scores are huge. 0 in rows whose lse is infinite. Written by the
                     forward. The weights of the backward are exp(score - lse - lse_low); with
                     lse alone they have a relative error of |lse| * 6e-8. Giving lse_low also
                     asserts that lse covers exactly the keys of this backward */

  /* A shard: the rows, keys, heads or sequences of this problem are those of a larger one from the
   * offsets on. With the fields below, results are those of the larger problem. bias, alibi_slopes
   * and all other tensors are the shard's own: pointers into those of the larger problem, with its
   * strides. All 0: the problem is not a shard. */
  const int32_t* diagonal; /* [B], in the memory of the device: the key with which row i of a
                              sequence is aligned is i + Sk - Sq + diagonal. For rows and keys from
                              row_offset and key_offset on of a sequence of Sq' rows and Sk' keys,
                              it is row_offset - key_offset + (Sk' - Sq') - (Sk - Sq). Any value is
                              valid; one beyond 2^30 in magnitude counts as 2^30 */
  int64_t row_offset;      /* 0..2^31-1: the decisions of dropout for row i and key j are those of
                              row row_offset + i and key key_offset + j of the larger problem */
  int64_t key_offset;
  int64_t batch_offset;  /* 0..2^31-1: likewise for sequences */
  int64_t head_offset;   /* likewise for query heads; at most heads_q_total - heads_q */
  int64_t heads_q_total; /* query heads of the larger problem; 0 means heads_q */

  const tilewise_mask* mask; /* in host memory, with arrays on the device; NULL: none */
} tilewise_attention;

/* Gradients. dq, dk and dv have the shapes of q, k and v, except that with block_table or
 * kv_batch_idx dk and dv are [B, capacity, Hkv, D], where capacity is block_table_width * page_size
 * or seqlen_k: they have one row per key of each sequence, leftpad_k included. A key that several
 * sequences share then has several gradients, which the caller adds. Any pointer except that of
 * dout may be NULL; its gradient is then not computed. Every requested gradient is written in full;
 * unused rows and keys get 0. Sums run in fp32 or fp64, in an order fixed by the shapes; only dq
 * and dscale are summed in any order, on a GPU without `deterministic`. */
typedef struct tilewise_gradients {
  uint32_t struct_size;
  int32_t reserved;
  tilewise_tensor dout; /* the incoming gradient of out, with the shape and dtype of out */
  tilewise_tensor dq;
  tilewise_tensor dk;
  tilewise_tensor dv;
  const float* dlse; /* optional incoming gradient of lse, with the shape of lse; fp32 */
  int64_t dlse_stride_batch;
  int64_t dlse_stride_head;
  float* dbias;               /* fp32; summed over the dimensions that bias broadcasts (stride 0) */
  int64_t dbias_stride_batch; /* each stride must be 0 exactly where that of bias is 0 */
  int64_t dbias_stride_head;
  int64_t dbias_stride_row;
  int64_t dbias_keys; /* columns of bias and dbias: at least the keys of every sequence */
  int64_t dbias_rows; /* rows of bias and dbias: at least the rows of every sequence; not read if
                          dbias_stride_row is 0 */
  float* dsinks;      /* fp32 [Hq] */
  float* dscale;      /* one fp32 number: the gradient of the scale */
} tilewise_gradients;

/* Tangents: derivatives along one direction of the inputs (forward mode). A tangent has the shape
 * and dtype of its tensor, and strides of its own; NULL is 0 and costs no product. With x = q.k,
 * x' = q'.k + q.k', the softcap f, P = exp(s - lse) and the factors D of dropout:
 *     s'_ij   = f'(scale * x_ij) * (scale * x'_ij + scale' * x_ij) + bias'_ij
 *     lse'_i  = sum over visible j of P_ij s'_ij + exp(sink_h - lse_i) sink'_h
 *     out'_i  = sum over visible j of D_ij P_ij (v'_j + (s'_ij - lse'_i) v_j)
 * Rows without keys and sink have tangents 0; where sink_h is +inf, out' is 0 and lse' is sink'_h.
 * Keys that a row does not see change nothing. ALiBi slopes have no tangent. */
typedef struct tilewise_tangents {
  uint32_t struct_size;
  int32_t reserved;
  tilewise_tensor q;
  tilewise_tensor k;
  tilewise_tensor v;
  tilewise_tensor out; /* out': written by tilewise_jvp, read by tilewise_second */
  float* lse;          /* lse', fp32: likewise; tilewise_jvp takes NULL */
  int64_t lse_stride_batch;
  int64_t lse_stride_head;
  const void* bias; /* of bias_dtype; needs bias; strides of 0 broadcast */
  int64_t bias_stride_batch;
  int64_t bias_stride_head;
  int64_t bias_stride_row;
  const float* sinks;   /* fp32 [Hq]; needs sinks */
  const float* scale;   /* one float in the memory of the device */
  tilewise_tensor dout; /* tilewise_second, which needs it: the gradient of out' */
  const float* dlse;    /* tilewise_second: the gradient of lse'; NULL: 0 */
  int64_t dlse_stride_batch;
  int64_t dlse_stride_head;
} tilewise_tangents;

/* A plan: what will run. With struct_size = offsetof(tilewise_plan_info, kernel) the two texts are
 * omitted, which halves the time of planning. */
typedef struct tilewise_plan_info {
  uint32_t struct_size;
  int32_t threads;         /* CPU: tasks that may run at a time */
  int64_t workspace_bytes; /* of the planned pass; the memory must be 64-byte aligned */
  int64_t splits;          /* splits of the keys; backward on the CPU: key chunks */
  int32_t tile_q;          /* query rows per tile */
  int32_t tile_k;          /* keys per tile */
  char kernel[64];         /* e.g. "cpu.avx512_bf16.forward.bf16" */
  char why[256];           /* one line: why this kernel, and why not the faster one */
} tilewise_plan_info;

/* These functions validate their arguments in full and write nothing if that fails. `pass` is
 * TILEWISE_PASS_FORWARD, with gradients NULL, or TILEWISE_PASS_BACKWARD. tilewise_plan dereferences
 * no data pointer, so they may be NULL; a pointer of an option must still be non-NULL for the
 * option to be on. The workspace has at least the planned workspace_bytes. */
TILEWISE_API tilewise_status tilewise_plan(const tilewise_attention* attention,
                                           const tilewise_gradients* gradients, int32_t pass,
                                           tilewise_plan_info* plan);
TILEWISE_API tilewise_status tilewise_forward(const tilewise_attention* attention, void* workspace,
                                              int64_t workspace_bytes);
TILEWISE_API tilewise_status tilewise_backward(const tilewise_attention* attention,
                                               const tilewise_gradients* gradients, void* workspace,
                                               int64_t workspace_bytes);

/* Forward mode and second derivatives, on the CPU; a GPU, block_table, float8_e4m3 and
 * batch_invariant are TILEWISE_UNSUPPORTED. Both read out and lse of the forward, which must cover
 * exactly the keys of this problem. tilewise_second gives dq, dk, dv, dbias, dsinks and dscale of
 *     L = dout . out + dlse . lse + tangents.dout . out' + tangents.dlse . lse'
 * in which out, lse, out' and lse' are functions of q, k, ...; gradients.dout may be NULL (0).
 * docs/c-api.md has the gradients of the tangents, double backward and Hessian-vector products.
 * tilewise_plan_tangents is tilewise_plan for TILEWISE_PASS_JVP (gradients NULL) or _SECOND. */
TILEWISE_API tilewise_status tilewise_plan_tangents(const tilewise_attention* attention,
                                                    const tilewise_tangents* tangents,
                                                    const tilewise_gradients* gradients,
                                                    int32_t pass, tilewise_plan_info* plan);
TILEWISE_API tilewise_status tilewise_jvp(const tilewise_attention* attention,
                                          const tilewise_tangents* tangents, void* workspace,
                                          int64_t workspace_bytes);
TILEWISE_API tilewise_status tilewise_second(const tilewise_attention* attention,
                                             const tilewise_tangents* tangents,
                                             const tilewise_gradients* gradients, void* workspace,
                                             int64_t workspace_bytes);

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

/* The first invalid entry of an index array that GPU kernels have found since the last call; this
 * call clears it. Launches on a GPU do not read index arrays on the host. An invalid entry is
 * never followed: nothing outside the tensors is read or written. The rows of its sequence become
 * NaN (out and lse; in the backward the gradients of its rows and keys), and an append skips what
 * would lie outside the cache. Entries that no row uses are not faults.
 *
 * This call waits for GPU `device_index` and is therefore not possible while a stream is captured;
 * launches wait for nothing. With `check` in tilewise_attention and tilewise_kv_append the same
 * faults are rejected before anything is launched. */
typedef struct tilewise_index_error {
  uint32_t struct_size;
  int32_t found;      /* 0: no fault; all following fields are then 0 */
  int64_t index;      /* index of the sequence, or of the entry of a cu_seqlens array */
  int64_t entry;      /* for block_table: the entry in the row of sequence `index` */
  int64_t value;      /* the invalid value */
  int64_t allowed;    /* the bound that it violates, as in the sentence */
  char array[32];     /* "block_table" */
  char sentence[256]; /* "block_table[0, 3] is 99: it must be at least 0 and less than ..." */
} tilewise_index_error;
TILEWISE_API tilewise_status tilewise_last_index_error(int32_t device_index,
                                                       tilewise_index_error* error);

/* Queries about this library and this machine. */
TILEWISE_API const char* tilewise_version(void);
TILEWISE_API uint32_t tilewise_abi_version(void);
TILEWISE_API const char* tilewise_last_error(void); /* of this thread; "" after a success */

/* CPU instruction sets in this build, slowest first. tilewise_cpu_isa returns the name of row
 * `index` and whether this machine can run it, or NULL past the end. tilewise_select_cpu forces one
 * for the whole process (NULL: the best one again) and fails if the machine lacks it;
 * TILEWISE_CPU=<name> does the same at start-up. */
TILEWISE_API const char* tilewise_cpu_isa(int32_t index, int32_t* available);
TILEWISE_API const char* tilewise_current_cpu(void);
TILEWISE_API tilewise_status tilewise_select_cpu(const char* name);
TILEWISE_API int32_t tilewise_cpu_threads(void); /* size of the library's own pool */

/* Row `index` of the support matrix: one kernel family for one dtype. */
typedef struct tilewise_kernel_info {
  uint32_t struct_size;
  int32_t device;       /* tilewise_device */
  int32_t dtype;        /* tilewise_dtype */
  int32_t max_head_dim; /* inclusive */
  int32_t forward;      /* 1: has a forward */
  int32_t backward;
  int32_t available; /* 1: can run on this machine */
  int32_t reserved;
  char name[64];      /* e.g. "cpu.amx" */
  char requires_[96]; /* e.g. "AVX2, FMA and F16C" */
  int32_t jvp;
  int32_t second;
} tilewise_kernel_info;
TILEWISE_API tilewise_status tilewise_kernel(int32_t index, tilewise_kernel_info* info);

/* GPU `index` of this machine, in CUDA's order. Without a GPU the status is TILEWISE_UNSUPPORTED
 * and the message includes the driver's reason. */
typedef struct tilewise_gpu_info {
  uint32_t struct_size;
  int32_t sm;              /* compute capability as major * 10 + minor */
  int32_t multiprocessors; /* number of SMs */
  int32_t shared_bytes;    /* maximum shared memory per block */
  int32_t l2_bytes;
  int32_t table; /* architecture whose tile table is used; TILEWISE_FORCE_ARCH overrides it */
  int32_t tensor_cores; /* 1: the GPU can run tensor-core kernels of that table in this library */
  int32_t plain_cores;  /* 1: the GPU can run kernels without tensor cores in this library */
  int64_t memory_bytes;
  char name[128];
} tilewise_gpu_info;
TILEWISE_API tilewise_status tilewise_gpu(int32_t index, tilewise_gpu_info* info);

/* Row `index` of the list of CUDA machine code in this library. */
typedef struct tilewise_cuda_code_info {
  uint32_t struct_size;
  int32_t table; /* architecture whose tile table the kernels use; 0: none, they suit any GPU */
  int32_t sm;    /* compute capability that it was compiled for */
  int32_t ptx;   /* 1: PTX, which the driver compiles for that GPU and newer ones; 0: SASS */
} tilewise_cuda_code_info;
TILEWISE_API tilewise_status tilewise_cuda_code(int32_t index, tilewise_cuda_code_info* info);

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_TILEWISE_H */
