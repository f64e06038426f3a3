/* Types of the C ABI that several of its structs and functions use. */
#ifndef TILEWISE_TYPES_H
#define TILEWISE_TYPES_H

#include <stdint.h>

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

/* The dtype of out. 0 stands for that of q, or for bfloat16 where q is float8_e4m3. It may also be
 * float32 where q has fewer bits, in every pass: the forward then writes its fp32 sums unrounded.
 * For q of float8_e4m3, float16 is allowed as well. Everything else is TILEWISE_UNSUPPORTED. */
typedef enum tilewise_out_dtype {
  TILEWISE_OUT_DEFAULT = 0,
  TILEWISE_OUT_FLOAT32 = 1,
  TILEWISE_OUT_FLOAT16 = 2,
  TILEWISE_OUT_BFLOAT16 = 3
} tilewise_out_dtype;

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

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_TYPES_H */
