/* Tilewise: exact attention computed tile by tile. The C ABI.
 *
 * Copyright (c) 2026 The Tilewise authors. BSD-3-Clause.
 *
 * One struct, `tilewise_attention`, describes what is asked. `tilewise_plan` says which kernel will
 * run and how much workspace it needs; `tilewise_forward` and `tilewise_backward` run it. A launch
 * allocates no workspace and nothing on a GPU (a check of index arrays may take some host memory),
 * no exception crosses this boundary, and every function returns a status; `tilewise_last_error`
 * holds one sentence about the last failure of the calling thread.
 *
 * Meaning (FlashAttention-2, arXiv 2307.08691, with the conventions of the FlashAttention
 * packages):
 *
 *     s_ij = scale * q_i . k_j                      raw score
 *     s_ij = softcap * tanh(s_ij / softcap)         if softcap > 0
 *     s_ij = s_ij - slope_h * |i + Sk - Sq - j|     if alibi_slopes
 *     s_ij = s_ij + bias_ij                         if bias
 *     key j is visible to row i when  i + Sk - Sq - window_left <= j <= i + Sk - Sq + window_right
 *     lse_i = log(sum over visible j of exp(s_ij) + exp(sink_h))
 *     out_i = sum over visible j of dropout(exp(s_ij - lse_i)) v_j
 *
 * A row that sees no key and has no sink gives out = 0, lse = -inf and gradients 0, never NaN.
 *
 * Conventions: sizes and strides are int64 and count elements; the last dimension of every tensor
 * is contiguous; other strides are free (0 broadcasts an input). A NULL pointer switches an option
 * off.
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
  TILEWISE_INVALID_ARGUMENT = 1,    /* the message names the argument, its value, what is allowed */
  TILEWISE_UNSUPPORTED = 2,         /* valid, but no kernel in this build or on this device */
  TILEWISE_WORKSPACE_TOO_SMALL = 3, /* call tilewise_plan with the same struct */
  TILEWISE_INTERNAL = 4
} tilewise_status;

typedef enum tilewise_dtype {
  TILEWISE_FLOAT32 = 0,
  TILEWISE_FLOAT16 = 1,
  TILEWISE_BFLOAT16 = 2,
  TILEWISE_FLOAT8_E4M3 = 3
} tilewise_dtype;

typedef enum tilewise_device { TILEWISE_CPU = 0, TILEWISE_CUDA = 1 } tilewise_device;

typedef enum tilewise_pass { TILEWISE_PASS_FORWARD = 0, TILEWISE_PASS_BACKWARD = 1 } tilewise_pass;

/* A view of [batch, row, head, column] elements. Strides in elements; the column stride is 1.
 * Variable length: [row, head, column]; stride_batch is not read.
 * Paged: [page, row in page, head, column]; stride_batch is the stride between pages. */
typedef struct tilewise_tensor {
  void* data;
  int64_t stride_batch;
  int64_t stride_row;
  int64_t stride_head;
} tilewise_tensor;

/* Optional parallelism hook. `parallel_for` must call task(context, i) exactly once for every i in
 * [0, tasks), in any order and on any threads (one after the other is legal), and return when all
 * have returned. `threads` is how many tasks may run at once: scratch memory is sized by it.
 * Results do not depend on it. Without a hook the library's own pool runs (TILEWISE_NUM_THREADS).
 */
typedef void (*tilewise_task)(void* context, int64_t index);
typedef struct tilewise_parallel {
  void (*parallel_for)(void* user, int64_t tasks, tilewise_task task, void* context);
  void* user;
  int32_t threads; /* 0: as many as the library's own pool has */
  int32_t reserved;
} tilewise_parallel;

/* What is asked. Zero-initialise, set struct_size = sizeof(tilewise_attention), then fill in.
 * A library accepts any struct_size from the first published one up to its own (missing fields read
 * as 0), and a larger one when all bytes it does not know are 0. */
typedef struct tilewise_attention {
  uint32_t struct_size;
  int32_t device;       /* tilewise_device */
  int32_t device_index; /* ordinal of the GPU; 0 for the CPU */
  int32_t dtype;        /* tilewise_dtype of q, k, v, out */
  void* stream;         /* CUDA stream; not read for the CPU */

  int64_t batch;      /* number of sequences B, 0..2^31-1 */
  int64_t seqlen_q;   /* rows of a sequence Sq; with cu_seqlens_q: all rows T of q */
  int64_t seqlen_k;   /* keys of a sequence Sk; with cu_seqlens_k: all rows of k; paged: not read */
  int64_t heads_q;    /* Hq, 1..2^31-1, a multiple of heads_kv */
  int64_t heads_kv;   /* Hkv, 1..2^31-1 */
  int64_t head_dim;   /* D, 1..512 */
  int64_t head_dim_v; /* Dv, 1..512; 0 means head_dim */

  tilewise_tensor q;   /* [B, Sq, Hq, D] or [T, Hq, D] */
  tilewise_tensor k;   /* [kv_batch, Sk, Hkv, D], [Tk, Hkv, D] or [pages, page_size, Hkv, D] */
  tilewise_tensor v;   /* the same with Dv */
  tilewise_tensor out; /* [B, Sq, Hq, Dv] or [T, Hq, Dv]; written by forward, read by backward */
  float* lse; /* [B, Hq, Sq] or [Hq, T], rows contiguous; natural log; may be NULL in forward */
  int64_t lse_stride_batch;
  int64_t lse_stride_head;

  /* Band. Negative: no limit. Causal is window_right = 0. Aligned bottom-right. */
  int64_t window_left;
  int64_t window_right;

  /* Score */
  float scale;                /* multiplies q.k; used when scale_ptr is NULL */
  float softcap;              /* 0: off; else at least FLT_MIN */
  const float* scale_ptr;     /* optional: one float in device memory, replaces `scale` */
  const float* alibi_slopes;  /* [Hq] or [B, Hq] fp32 */
  int64_t alibi_stride_batch; /* 0 for [Hq] */
  const void* bias;           /* [B, Hq, Sq, Sk]; bias_dtype; key stride 1 */
  int64_t bias_stride_batch;  /* 0 broadcasts; varlen: row i of sequence b is bias[b, h, i, j], with
                                 the rows and keys of the longest one, which nothing can check */
  int64_t bias_stride_head;
  int64_t bias_stride_row;
  int32_t bias_dtype; /* fp32 or the dtype of q */
  float dropout_p;    /* 0 <= p < 1 */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t* dropout_state; /* optional: {seed, offset} in device memory, replaces the two */
  const float* sinks;            /* [Hq] fp32: a logit per head that takes part in the softmax; of
                                    +inf: out = 0, lse = +inf */

  /* Variable length. Entries are int32 in the memory of the device. */
  const int32_t* cu_seqlens_q; /* [B+1], from 0, not decreasing, last <= T */
  const int32_t* cu_seqlens_k; /* [B+1]; with block_table only the lengths count */
  const int32_t* seqused_q;    /* [B]: rows in use of each sequence; <= its length */
  const int32_t* seqused_k; /* [B]: keys in use; includes leftpad_k; dense and paged caches too */
  int64_t max_seqlen_q;     /* optional upper bound, 0: not known; never required */
  int64_t max_seqlen_k;

  /* Key/value cache */
  const int32_t* block_table;  /* [B, block_table_width]: page of each run of page_size keys */
  int64_t block_table_stride;  /* elements between rows */
  int64_t block_table_width;   /* Sk = block_table_width * page_size unless seqused_k */
  int64_t page_size;           /* any number >= 1; read when block_table is given */
  int64_t pages;               /* pages in k and v */
  const int32_t* kv_batch_idx; /* [B]: sequence b reads batch row kv_batch_idx[b] of k and v;
                                  not with block_table or cu_seqlens_k */
  int64_t kv_batch;            /* batch rows of k and v; 0 means batch */
  const int32_t* leftpad_k;    /* [B]: first key of each sequence */

  int32_t num_splits;    /* key splits of the forward; 0: the planner chooses (by shape alone) */
  int32_t deterministic; /* bitwise equal results on the same device; the CPU always is */
  int32_t check;         /* GPU: verify the entries of the index arrays first, by a kernel for which
                            the stream is waited for: 0 while it is captured; the CPU always does */
  int32_t tf32;          /* GPU: 1 lets fp32 operands be rounded to TF32 */
  const tilewise_parallel* parallel; /* CPU; NULL: the library's own pool */

  int32_t batch_invariant; /* 1: a sequence's rows of out and lse are to the bit what they are
                              without the other sequences, and so are its gradients of q, k and v;
                              num_splits is 0 then */
  int32_t kv_float8;       /* 1: k and v are float8_e4m3, for q of float16 or bfloat16; their values
                              are multiplied by the descales. Forward only */
  const float* k_descale;  /* [B, Hkv]; NULL: 1 */
  const float* v_descale;
  int64_t k_descale_stride_batch; /* 0 broadcasts */
  int64_t k_descale_stride_head;
  int64_t v_descale_stride_batch;
  int64_t v_descale_stride_head;
  float* lse_low; /* optional, with the shape and strides of lse, which it needs: what rounding lse
                     to fp32 left. lse + lse_low is the log-sum-exp to twice the precision of fp32:
                     m + log l exactly where |m| is huge. 0 in rows whose lse is infinite. Written
                     by forward. The backward weighs with exp(score - lse - lse_low); NULL means 0,
                     and its weights are then off by |lse| * 6e-8, relatively */
} tilewise_attention;

/* Gradients. dq, dk, dv have the shapes of q, k, v, except that with block_table or kv_batch_idx dk
 * and dv are [B, capacity, Hkv, D], capacity being block_table_width * page_size or seqlen_k: one
 * row per key of each sequence, leftpad_k included (a key that several sequences share has several
 * gradients; adding them is the caller's). Any of the pointers may be NULL: that gradient is not
 * wanted. Everything that is given is written in full: rows and keys that take part in nothing
 * get 0. Reductions run in fp32 in an order fixed by the shapes. */
typedef struct tilewise_gradients {
  uint32_t struct_size;
  int32_t reserved;
  tilewise_tensor dout; /* as out; its dtype is the dtype of q */
  tilewise_tensor dq;
  tilewise_tensor dk;
  tilewise_tensor dv;
  const float* dlse; /* optional incoming gradient of lse, with lse's strides below */
  int64_t dlse_stride_batch;
  int64_t dlse_stride_head;
  float* dbias;               /* fp32; dimensions that bias broadcasts (stride 0) are summed */
  int64_t dbias_stride_batch; /* must be 0 exactly where the bias stride is 0 */
  int64_t dbias_stride_head;
  int64_t dbias_stride_row;
  int64_t dbias_keys; /* columns of bias and dbias: the Sk of the dense problem, or the largest */
  int64_t dbias_rows; /* rows of bias and dbias likewise; not read when dbias_stride_row is 0 */
  float* dsinks;      /* [Hq] */
  float* dscale;      /* one float */
} tilewise_gradients;

/* What will run. A struct_size of offsetof(tilewise_plan_info, kernel) leaves the two texts out,
 * which take as long as the rest of a plan. */
typedef struct tilewise_plan_info {
  uint32_t struct_size;
  int32_t threads;         /* CPU tasks that may run at once */
  int64_t workspace_bytes; /* for forward or backward; 64-byte aligned memory */
  int64_t splits;          /* key splits */
  int32_t tile_q;          /* query rows of a tile */
  int32_t tile_k;          /* keys of a tile */
  char kernel[64];         /* e.g. "cpu.avx512_bf16.forward.bf16" */
  char why[256];           /* one line: why this kernel, and why not the faster one */
} tilewise_plan_info;

/* Both validate `attention` in full; nothing is written when they fail. `gradients` is NULL for the
 * forward. Data pointers are not dereferenced by tilewise_plan: they may be NULL there, except that
 * whether an option pointer is NULL decides whether the option is on. */
TILEWISE_API tilewise_status tilewise_plan(const tilewise_attention* attention,
                                           const tilewise_gradients* gradients, int32_t pass,
                                           tilewise_plan_info* plan);
TILEWISE_API tilewise_status tilewise_forward(const tilewise_attention* attention, void* workspace,
                                              int64_t workspace_bytes);
TILEWISE_API tilewise_status tilewise_backward(const tilewise_attention* attention,
                                               const tilewise_gradients* gradients, void* workspace,
                                               int64_t workspace_bytes);

/* Appends new keys and values to a cache in place, and applies rotary embedding (RoFormer,
 * arXiv 2104.09864) to the new keys and to q. New key r of sequence b is written at key
 * cache_seqlens[b] + r (leftpad included); it and row r of q are rotated at position
 * cache_seqlens[b] - leftpad_k[b] + r, or, given rotary_seqlens, at rotary_seqlens[b] + r (the
 * FlashAttention packages count the padding: they rotate at cache_seqlens[b] + r). With
 * q_single_position every row of q is rotated at the position of row 0 (what those packages do when
 * neither causal nor window is on). */
typedef struct tilewise_kv_append {
  uint32_t struct_size;
  int32_t device;
  int32_t device_index;
  int32_t dtype;
  void* stream;
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_new; /* new keys per sequence; with cu_seqlens_new: all rows of k_new */
  int64_t seqlen_k;   /* capacity of a dense cache, if only q is rotated, too; paged: not read */
  int64_t heads_q;
  int64_t heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;
  tilewise_tensor q;     /* [B, Sq, Hq, D] or [T, Hq, D]; data NULL: no query rotation */
  tilewise_tensor q_out; /* rotated copy; may be q itself */
  tilewise_tensor k_new; /* [B, Snew, Hkv, D]; data NULL: nothing is appended */
  tilewise_tensor v_new;
  tilewise_tensor k_cache;
  tilewise_tensor v_cache;
  const int32_t* cache_seqlens;  /* [B]: keys already in the cache (leftpad included) */
  const int32_t* cu_seqlens_q;   /* [B+1] optional */
  const int32_t* cu_seqlens_new; /* [B+1] optional */
  const int32_t* rotary_seqlens; /* [B] optional: replaces cache_seqlens as rotary position */
  const int32_t* block_table;    /* sequences may share pages; a row that is written belongs to one
                                    of them alone */
  int64_t block_table_stride;
  int64_t block_table_width;
  int64_t page_size;
  int64_t pages;
  const int32_t* kv_batch_idx;
  int64_t kv_batch;
  const int32_t* leftpad_k;
  const void*
      rotary_cos; /* [rotary_rows, rotary_dim / 2] of `dtype`, contiguous; NULL: no rotary */
  const void* rotary_sin;
  int64_t rotary_rows;
  int64_t rotary_dim;         /* even, <= head_dim */
  int32_t rotary_interleaved; /* 1: pairs (2i, 2i+1) (GPT-J); 0: (i, i + rotary_dim/2) (GPT-NeoX) */
  int32_t q_single_position;
  const tilewise_parallel* parallel;
  int32_t kv_float8; /* 1: the caches are float8_e4m3: a new x is written as x / descale, rounded to
                        nearest even, at most 448 in magnitude */
  int32_t check;     /* GPU: verify the entries of the index arrays first, for which the stream is
                        waited for: 0 while it is captured; the CPU always does */
  const float* k_descale; /* as in tilewise_attention */
  const float* v_descale;
  int64_t k_descale_stride_batch;
  int64_t k_descale_stride_head;
  int64_t v_descale_stride_batch;
  int64_t v_descale_stride_head;
} tilewise_kv_append;
TILEWISE_API tilewise_status tilewise_append_kv(const tilewise_kv_append* append);

/* What the kernels of a GPU have found wrong with index arrays, which are read there alone. An
 * entry that does not fit is not followed: nothing outside of the tensors is read or written. The
 * rows of its sequence (out and lse, and in a backward the gradients of its rows and keys) are NaN,
 * and what an append would write to no row of the cache is not written. Entries that no row reads
 * are no faults. The first fault since the last call is kept; reading it clears it.
 *
 * Waits for the GPU `device_index`, so not while a stream is captured; launches themselves wait for
 * nothing. `check` in tilewise_attention and tilewise_kv_append refuses the same faults before
 * anything is launched. */
typedef struct tilewise_index_error {
  uint32_t struct_size;
  int32_t found;      /* 0: no fault, and what follows is 0 */
  int64_t index;      /* of the sequence, or of the entry of a cu_seqlens */
  int64_t entry;      /* of block_table: entry in the row of sequence `index` */
  int64_t value;      /* what is there */
  int64_t allowed;    /* the bound that it breaks, as the sentence has it */
  char array[32];     /* "block_table" */
  char sentence[256]; /* "block_table[0, 3] is 99: from 0 and less than pages, ..." */
} tilewise_index_error;
TILEWISE_API tilewise_status tilewise_last_index_error(int32_t device_index,
                                                       tilewise_index_error* error);

/* Facts about this library and this machine. */
TILEWISE_API const char* tilewise_version(void);
TILEWISE_API uint32_t tilewise_abi_version(void);
TILEWISE_API const char* tilewise_last_error(void); /* of this thread; "" after a success */

/* CPU instruction sets in this build, best last: name, whether this machine can run it. Returns
 * NULL past the end. tilewise_select_cpu forces one for the whole process (NULL: the best again)
 * and fails when the machine lacks it; TILEWISE_CPU=<name> does the same at start. */
TILEWISE_API const char* tilewise_cpu_isa(int32_t index, int32_t* available);
TILEWISE_API const char* tilewise_current_cpu(void);
TILEWISE_API tilewise_status tilewise_select_cpu(const char* name);
TILEWISE_API int32_t tilewise_cpu_threads(void); /* of the library's own pool */

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
  char requires_[96]; /* e.g. "AMX-BF16" */
} tilewise_kernel_info;
TILEWISE_API tilewise_status tilewise_kernel(int32_t index, tilewise_kernel_info* info);

/* GPU `index` of this machine, counted as CUDA counts them. Without one the status is
 * TILEWISE_UNSUPPORTED and the message says what the driver says. */
typedef struct tilewise_gpu_info {
  uint32_t struct_size;
  int32_t sm;              /* compute capability as major * 10 + minor */
  int32_t multiprocessors; /* streaming multiprocessors */
  int32_t shared_bytes;    /* shared memory that a block may use */
  int32_t l2_bytes;
  int32_t table;        /* architecture whose tiles are used; TILEWISE_FORCE_ARCH chooses another */
  int32_t tensor_cores; /* 1: this library has tensor-core kernels of that table it can run */
  int32_t plain_cores;  /* 1: likewise kernels that use no tensor cores */
  int64_t memory_bytes;
  char name[128];
} tilewise_gpu_info;
TILEWISE_API tilewise_status tilewise_gpu(int32_t index, tilewise_gpu_info* info);

/* Row `index` of the CUDA machine code inside this library. */
typedef struct tilewise_cuda_code_info {
  uint32_t struct_size;
  int32_t table; /* architecture whose tiles the kernels use; 0: they have none, any GPU's */
  int32_t sm;    /* compute capability it was compiled for */
  int32_t ptx;   /* 1: PTX, which the driver compiles for this GPU and newer ones; 0: SASS */
} tilewise_cuda_code_info;
TILEWISE_API tilewise_status tilewise_cuda_code(int32_t index, tilewise_cuda_code_info* info);

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_TILEWISE_H */
