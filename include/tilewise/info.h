/* Queries about this library and this machine, and about faults that GPU kernels found. */
#ifndef TILEWISE_INFO_H
#define TILEWISE_INFO_H

#include <stdint.h>

#include "tilewise/types.h"

#ifdef __cplusplus
extern "C" {
#endif

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
  int32_t max_head_dim; /* inclusive, of the forward; other passes may take fewer columns */
  int32_t forward;      /* 1: has a forward */
  int32_t backward;
  int32_t available; /* 1: can run on this machine */
  int32_t reserved;
  char name[64];      /* e.g. "cpu.amx" */
  char requires_[96]; /* e.g. "AVX2, FMA and F16C" */
  int32_t jvp;
  int32_t second;
  int32_t proved; /* 0: no GPU has proved its results, so it is used only after tilewise_set_proof
                     or with TILEWISE_UNPROVED=1 */
} tilewise_kernel_info;
TILEWISE_API tilewise_status tilewise_kernel(int32_t index, tilewise_kernel_info* info);

/* Says that a family whose `proved` is 0 has been proved on a GPU: from now on this process uses it
 * there, with the tiles of the given head dimensions. `tilewise doctor --prove` does the proof and
 * records it, and the Python package passes its records to this function. With TILEWISE_UNPROVED=1
 * such families are used without a proof, and with TILEWISE_UNPROVED=0 they are never used. */
typedef struct tilewise_proof {
  uint32_t struct_size;
  int32_t sm;              /* the GPU: tilewise_gpu_info.sm */
  int32_t driver;          /* tilewise_cuda_versions; with another driver the proof does not hold */
  int32_t head_dims_count; /* 0: withdraws an earlier proof */
  const int32_t* head_dims; /* head dimensions of tiles for which the family is used */
  const char* gpu_name;     /* tilewise_gpu_info.name */
  const char* family;       /* tilewise_kernel_info.name: "cuda.tcgen05" */
} tilewise_proof;
TILEWISE_API tilewise_status tilewise_set_proof(const tilewise_proof* proof);

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

/* CUDA versions as CUDA counts them: 1000 * major + 10 * minor. A driver runs a library whose
 * runtime is of its own major version or an older one. Either pointer may be NULL. */
TILEWISE_API void tilewise_cuda_versions(
    int32_t* runtime, /* the CUDA runtime in this library; 0: built without CUDA */
    int32_t* driver); /* the newest CUDA of the driver; 0: no driver, or built without CUDA */

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_INFO_H */
