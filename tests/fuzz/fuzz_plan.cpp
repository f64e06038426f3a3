// libFuzzer target: structs with any sizes and options, without memory behind them. Each is either
// rejected with an error message or gets a consistent plan for this CPU and for any GPU.
#include <array>
#include <cstddef>
#include <cstdint>

#include "call.h"
#include "plans.h"

namespace {

using fuzz::Reader;
using fuzz::times;

// An aligned address that is never mapped, because planning dereferences no pointer.
template <class T = void>
T* unmapped() {
  return reinterpret_cast<T*>(uintptr_t{4096});
}

// Sizes from 0 to beyond the largest valid one, with all orders of magnitude equally likely.
int64_t size(Reader& in, int64_t usual) {
  const uint8_t magnitude = in.byte();
  if (magnitude == 0) return usual;
  const uint8_t digits = in.byte();
  return ((int64_t{8} + (digits & 7)) << (magnitude % 42) >> 3) + (digits >> 6) - 1;
}

tilewise_tensor view(Reader& in, const std::array<int64_t, 3>& sizes, int64_t columns) {
  tilewise_tensor t = {unmapped(), times(times(sizes[1], sizes[2]), columns),
                       times(sizes[2], columns), columns};
  switch (in.byte() % 8) {
    case 5:
      t.stride_batch = 0;
      break;
    case 6:
      t.stride_head = 0;
      break;
    case 7:
      t.stride_row = size(in, 1);
      break;
    default:
      break;
  }
  return t;
}

struct DescribedCall {
  tilewise_attention a{};
  tilewise_gradients g{};

  explicit DescribedCall(Reader& in) {
    a.struct_size = sizeof(a);
    g.struct_size = sizeof(g);
    a.dtype = in.pick32({2, 1, 0});
    read_sizes(in);
    read_arrays(in);
    read_options(in);
    read_tensors(in);
  }

 private:
  void read_sizes(Reader& in) {
    a.batch = size(in, 2);
    a.seqlen_q = size(in, 1);
    a.seqlen_k = size(in, 1000);
    a.heads_kv = size(in, 2);
    a.heads_q = times(a.heads_kv, size(in, 1));
    a.head_dim = in.pick({128, 64, 8, 40, 96, 192, 256, 512, 1});
    a.head_dim_v = in.pick({0, 0, 64, 128, 512, 1});
    a.max_seqlen_q = in.one_in(4) ? size(in, 1) : 0;
    a.max_seqlen_k = in.one_in(4) ? size(in, 1) : 0;
    a.window_left = in.one_in(4) ? size(in, 0) : -1;
    a.window_right = in.one_in(3) ? size(in, 0) : -1;
  }

  void read_arrays(Reader& in) {
    const uint8_t which = in.byte();
    const auto given = [which](int bit) {
      return (which >> bit & 1) != 0 ? unmapped<const int32_t>() : nullptr;
    };
    a.cu_seqlens_q = given(0);
    a.cu_seqlens_k = given(1);
    a.seqused_q = given(2);
    a.seqused_k = given(3);
    a.leftpad_k = given(4);
    a.kv_batch_idx = given(5);
    a.block_table = given(6);
    a.kv_batch = in.one_in(4) ? size(in, 1) : 0;
    if (a.block_table == nullptr) return;
    a.page_size = size(in, 16);
    a.pages = size(in, 100);
    a.block_table_width = size(in, 50);
    a.block_table_stride = in.one_in(4) ? 0 : a.block_table_width;
  }

  void read_options(Reader& in) {
    const uint8_t which = in.byte();
    const auto given = [which](int bit) {
      return (which >> bit & 1) != 0 ? unmapped<const float>() : nullptr;
    };
    a.scale = 0.25f;
    a.softcap = (which & 1) != 0 ? 5.0f : 0.0f;
    a.alibi_slopes = given(1);
    a.bias = given(2);  // broadcast in all dimensions
    a.dropout_p = (which & 8) != 0 ? 0.5f : 0.0f;
    a.sinks = given(4);
    a.scale_ptr = given(5);
    a.check = which >> 6 & 1;
    a.tf32 = which >> 7;
    a.num_splits = in.pick32({0, 0, 0, 1, 2, 100, 256});
    a.deterministic = in.one_in(4) ? 1 : 0;
    a.batch_invariant = in.one_in(4) ? 1 : 0;
    a.kv_float8 = in.one_in(4) ? 1 : 0;
    a.out_dtype = in.pick32({0, 0, 0, 1, 2, 3, 4});
    if (in.one_in(16)) a.q_descale = unmapped<const float>();
    if (in.one_in(8)) a.max_logits = unmapped<float>();
    if (in.one_in(4)) a.diagonal = unmapped<const int32_t>();
    a.key_offset = in.one_in(4) ? size(in, 1) : 0;
  }

  void read_tensors(Reader& in) {
    const int64_t columns_v = a.head_dim_v != 0 ? a.head_dim_v : a.head_dim;
    const bool paged = a.block_table != nullptr;
    const std::array<int64_t, 3> rows = {a.batch, a.seqlen_q, a.heads_q};
    const std::array<int64_t, 3> keys = {a.batch, paged ? a.page_size : a.seqlen_k, a.heads_kv};
    const std::array<int64_t, 3> capacity = {
        a.batch, paged ? times(a.block_table_width, a.page_size) : a.seqlen_k, a.heads_kv};
    a.q = view(in, rows, a.head_dim);
    a.k = view(in, keys, a.head_dim);
    a.v = view(in, keys, columns_v);
    a.out = g.dout = view(in, rows, columns_v);
    a.lse = unmapped<float>();
    a.lse_stride_batch = times(a.heads_q, a.seqlen_q);
    a.lse_stride_head = a.seqlen_q;
    const uint8_t which = in.byte();
    const bool per_sequence = paged || a.kv_batch_idx != nullptr;
    if ((which & 1) == 0) g.dq = view(in, rows, a.head_dim);
    if ((which & 2) == 0) g.dk = view(in, per_sequence ? capacity : keys, a.head_dim);
    if ((which & 4) == 0) g.dv = view(in, per_sequence ? capacity : keys, columns_v);
    if ((which & 8) != 0 && a.sinks != nullptr) g.dsinks = unmapped<float>();
    if ((which & 16) != 0) g.dscale = unmapped<float>();
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t bytes) {
  Reader in(data, bytes);
  const DescribedCall call(in);
  tilewise_plan_info info;
  fuzz::plan(call.a, nullptr, &info);
  fuzz::plan(call.a, &call.g, &info);
  return 0;
}
