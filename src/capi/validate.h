// From the structs of the caller to structs that every kernel may trust.
//
// `Contents::unread` checks everything that can be said without pointers: what tilewise_plan does.
// `Contents::pointers` also checks that pointers are given and aligned: what a launch on a GPU
// does, whose memory is never read here. `Contents::read` reads the entries of the index arrays,
// too: what a launch on the CPU does.
#pragma once

#include "attention/problem.h"

namespace tilewise::capi {

enum class Contents { unread, pointers, read };

// `pass` decides what is written and what must be there.
Problem validated_problem(const tilewise_attention* given, int32_t pass, Contents contents);
Gradients validated_gradients(const tilewise_gradients* given, const Problem& problem,
                              Contents contents);
tilewise_kv_append validated_append(const tilewise_kv_append* given);
// Of a validated append on a GPU: the entries of its index arrays, read back to the host.
void check_entries_of_gpu(const tilewise_kv_append& append);

void check_pass(int32_t pass);
void check_device(int32_t device, int32_t device_index);
void check_parallel(const tilewise_parallel* parallel);

// A float8_e4m3 cache and the factors of its entries.
struct Descale {
  const float* data;
  int64_t stride_batch;
  int64_t stride_head;
};
void check_float8(int32_t kv_float8, int32_t dtype, const Descale& k, const Descale& v,
                  int64_t batch, int64_t heads_kv);

// Entries of cu_seqlens, seqused, block_table, kv_batch_idx and leftpad_k.
void check_index_arrays(const Problem& problem);

// The pieces that attention and append share. A batch of 0 has one entry in cu_seqlens, 0.
void check_cu_seqlens(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                      const char* rows_name);
void check_kv_batch_idx(const int32_t* kv_batch_idx, int64_t batch, int64_t kv_batch);
void check_distinct(const int32_t* kv_batch_idx, int64_t batch);
void check_pages(const int32_t* block_table, int64_t stride, int64_t sequence, Range keys,
                 int64_t page_size, int64_t pages);

}  // namespace tilewise::capi
