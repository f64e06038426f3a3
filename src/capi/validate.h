// Validation: turns the caller's structs into structs that every kernel may trust.
//
// `Contents::unread` checks everything that needs no pointers, for tilewise_plan.
// `Contents::pointers` also checks that pointers are given and aligned, for a launch on a GPU,
// whose memory is never read here. `Contents::read` also checks the entries of the index arrays,
// for a launch on the CPU.
#pragma once

#include "attention/request.h"
#include "capi/views.h"

namespace tilewise::capi {

enum class Contents { unread, pointers, read };

// `pass` determines which tensors are written and which must be given.
Problem validated_problem(const tilewise_attention* given, Pass pass, Contents contents);
// Of Pass::backward, or of Pass::second, which does not need dout.
Gradients validated_gradients(const tilewise_gradients* given, const Problem& problem, Pass pass,
                              Contents contents);
// Of Pass::jvp or Pass::second.
Tangents validated_tangents(const tilewise_tangents* given, const Problem& problem, Pass pass,
                            Contents contents);
tilewise_kv_append validated_append(const tilewise_kv_append* given);
// For a validated append on a GPU: copies its index arrays to the host and checks their entries.
void check_entries_of_gpu(const tilewise_kv_append& append);

// Refuses a pass that is neither `first` nor `second`, the two that an entry point plans.
Pass checked_pass(int32_t pass, Pass first, Pass second);
void check_device(int32_t device, int32_t device_index);
void check_parallel(const tilewise_parallel* parallel);

// The factors of a tensor of float8_e4m3, [batch, heads_kv].
struct Descale {
  const char* name;
  const float* data;
  int64_t stride_batch;
  int64_t stride_head;
};
// `is_float8`: whether the tensor of these factors is float8_e4m3.
void check_descale(const Descale& descale, bool is_float8, int64_t batch, int64_t heads_kv);

// Checks a mask and, with Contents::read, the entries of its arrays. The problem keeps the caller's
// struct, whose fields are all known since its first version.
void check_mask(const Problem& problem, Contents contents);

// Checks the layout of a view and, unless contents are unread, its pointer. An optional view may be
// NULL.
enum class Presence { optional, needed };
void check_view(const View& view, Presence presence, Contents contents);

// Checks the entries of cu_seqlens, seqused, block_table, kv_batch_idx and leftpad_k.
void check_index_arrays(const Problem& problem);

// The checks that attention and append share. With a batch of 0, cu_seqlens has one entry, 0.
void check_cu_seqlens(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                      const char* rows_name);
void check_kv_batch_idx(const int32_t* kv_batch_idx, int64_t batch, int64_t kv_batch);
void check_distinct(const int32_t* kv_batch_idx, int64_t batch);
void check_pages(const int32_t* block_table, int64_t stride, int64_t sequence, Range keys,
                 int64_t page_size, int64_t pages);

}  // namespace tilewise::capi
