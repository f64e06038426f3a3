/* An attention problem, the functions that compute it, and the structs of its derivatives.
 * tilewise.h has the definition of the result. */
#ifndef TILEWISE_ATTENTION_H
#define TILEWISE_ATTENTION_H

#include <stdint.h>

#include "tilewise/mask.h"
#include "tilewise/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An attention problem. Zero-initialise it, set struct_size = sizeof(tilewise_attention), then fill
 * in the fields. The library accepts any struct_size from the first published one up to its own
 * (missing fields read as 0), and a larger one if all bytes that it does not know are 0. */
typedef struct tilewise_attention {
  uint32_t struct_size;
  int32_t device;       /* tilewise_device */
  int32_t device_index; /* ordinal of the GPU; 0 for the CPU */
  int32_t dtype;        /* tilewise_dtype of q; also of k and v, unless kv_float8 is 1, and of out,
                           unless out_dtype is given or q is float8_e4m3 (forward only) */
  void* stream;         /* CUDA stream; not read for the CPU */

  int64_t batch;      /* B, the number of sequences: 0..2^31-1 */
  int64_t seqlen_q;   /* Sq, rows per sequence; with cu_seqlens_q: T, all rows of q */
  int64_t seqlen_k;   /* Sk, keys per sequence; with cu_seqlens_k: Tk, all rows of k; paged: not
                         read */
  int64_t heads_q;    /* Hq: 1..2^31-1, a multiple of heads_kv */
  int64_t heads_kv;   /* Hkv: 1..2^31-1 */
  int64_t head_dim;   /* D, columns of q and k: 1..576 */
  int64_t head_dim_v; /* Dv, columns of v and out: 1..576; 0 means head_dim */

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
  int32_t bias_dtype; /* fp32 or the dtype of q; for q of float8_e4m3, fp32 or fp16 where out has
                         fp16, and otherwise fp32 or bf16 */
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
  int32_t kv_float8;       /* 1: k and v are float8_e4m3, also where q is float16 or bfloat16; their
                              values are multiplied by the descales. Forward only */
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

  int32_t out_dtype;      /* tilewise_out_dtype of out, and of the tangent of out. dout and its
                             tangent have the dtype of q */
  int32_t reserved;       /* 0 */
  const float* q_descale; /* fp32 [B, Hkv]: q of float8_e4m3 is multiplied by it, with one factor
                             for all query heads that share a head of k and v; NULL: 1. Kernels read
                             a 16-bit copy of such a q, which the forward writes to the workspace */
  int64_t q_descale_stride_batch; /* 0 broadcasts */
  int64_t q_descale_stride_head;

  float* max_logits; /* fp32 [B, Hq], contiguous; written by the forward, and read by no pass. The
                        largest scale * q.k over all visible pairs of a sequence and a
                        query head, before softcap, ALiBi and bias, as QK-clip (arXiv 2507.20534)
                        uses it: -inf if no pair is visible, NaN if scale * q.k of one is NaN. The
                        forward may run another kernel than without it. NULL: off */
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
  tilewise_tensor dout; /* the incoming gradient of out, with its shape and the dtype of q */
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
 * and dtype of its tensor (dout the dtype of q), and strides of its own; NULL is 0 and costs no
 * product. With x = q.k, x' = q'.k + q.k', the softcap f, P = exp(s - lse) and the factors D of
 * dropout:
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

/* Forward mode and second derivatives. block_table, float8_e4m3 and batch_invariant are
 * TILEWISE_UNSUPPORTED. Both read out and lse of the forward, which must cover exactly the keys of
 * this problem. tilewise_second gives dq, dk, dv, dbias, dsinks and dscale of
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

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_ATTENTION_H */
