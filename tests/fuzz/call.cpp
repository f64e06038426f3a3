#include "call.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

namespace fuzz {
namespace {

bool too_long(int64_t size) { return size > (int64_t{1} << 20); }

}  // namespace

void AttentionCall::print() const {
  std::fprintf(
      stderr,
      "B %lld, Sq %lld, Sk %lld, Hq %lld, Hkv %lld, D %lld, Dv %lld, dtype %d, window %lld "
      "%lld, pages %lld of %lld, splits %d; given:",
      as_long(a.batch), as_long(a.seqlen_q), as_long(a.seqlen_k), as_long(a.heads_q),
      as_long(a.heads_kv), as_long(a.head_dim), as_long(a.head_dim_v), a.dtype,
      as_long(a.window_left), as_long(a.window_right), as_long(a.pages), as_long(a.page_size),
      a.num_splits);
  const std::pair<const char*, const void*> given[] = {
      {"lse", a.lse},
      {"lse_low", a.lse_low},
      {"alibi", a.alibi_slopes},
      {"bias", a.bias},
      {"sinks", a.sinks},
      {"cu_seqlens_q", a.cu_seqlens_q},
      {"cu_seqlens_k", a.cu_seqlens_k},
      {"seqused_q", a.seqused_q},
      {"seqused_k", a.seqused_k},
      {"block_table", a.block_table},
      {"kv_batch_idx", a.kv_batch_idx},
      {"leftpad_k", a.leftpad_k},
      {"diagonal", a.diagonal},
      {"q_descale", a.q_descale},
      {"max_logits", a.max_logits},
      {"dq", g.dq.data},
      {"dk", g.dk.data},
      {"dv", g.dv.data},
      {"dbias", g.dbias},
      {"dsinks", g.dsinks},
      {"dscale", g.dscale},
      {"dlse", g.dlse},
  };
  for (const auto& [name, pointer] : given)
    if (pointer != nullptr) std::fprintf(stderr, " %s", name);
  std::fprintf(stderr, "\n");
}

void backwards_parallel_for(void*, int64_t tasks, tilewise_task task, void* context) {
  for (int64_t i = tasks; i-- > 0;) task(context, i);
}

tilewise_tensor read_view(Reader& in, Memory& memory, std::array<int64_t, 3> sizes, int64_t columns,
                          int64_t element, Writer writer) {
  std::array<int64_t, 3> strides = {times(times(sizes[1], sizes[2]), columns),
                                    times(sizes[2], columns), columns};
  switch (in.byte() % 16) {
    case 1:
      strides = {times(times(sizes[1], sizes[2]), columns), columns, times(sizes[1], columns)};
      break;
    case 2:
      for (int64_t& stride : strides) stride = times(stride, 2);
      break;
    case 3:
      strides[in.byte() % 3] = 0;
      break;
    case 4:
      strides[in.byte() % 3] = in.bits64();
      break;
    case 5:
      strides[1] = times(strides[1], -1);
      break;
    default:
      break;
  }
  tilewise_tensor view{nullptr, strides[0], strides[1], strides[2]};
  if (in.byte() == 255) return view;  // NULL, as if the caller had forgotten the pointer
  view.data = memory.tensor(sizes, strides, columns, element, writer);
  const uint8_t seed = in.byte();
  if (writer == Writer::none) memory.fill(view.data, element, seed, seed == 255);
  if (seed == 254 && view.data != nullptr) view.data = static_cast<uint8_t*>(view.data) + 1;
  return view;
}

int32_t* read_indices(Reader& in, Memory& memory, int64_t count, int64_t first, int64_t step) {
  auto* indices = memory.array<int32_t>(count);
  if (indices == nullptr || indices == Memory::unmapped()) return indices;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t b = in.byte();
    // Mostly the intended value, sometimes a little less or more, rarely anything.
    uint64_t value = static_cast<uint64_t>(first) + static_cast<uint64_t>(times(i, step));
    if (b < 32) value -= b;
    if (b > 200) value += 228u - b;
    indices[i] = static_cast<int32_t>(b == 255 ? in.bits64() : static_cast<int64_t>(value));
  }
  return indices;
}

AttentionCall::AttentionCall(Reader& in) {
  a.struct_size = in.one_in(250) ? static_cast<uint32_t>(in.bits64()) : sizeof(a);
  // The library reads bytes beyond its own struct, so a larger size may be claimed only if it
  // exists.
  if (a.struct_size > sizeof(a) && a.struct_size <= 65536) a.struct_size = sizeof(a);
  a.device = in.one_in(100) ? static_cast<int32_t>(in.byte()) : TILEWISE_CPU;
  a.dtype = in.pick32({0, 1, 2, 0, 1, 2, 3, 4});
  read_sizes(in);
  read_cache(in);
  read_lengths(in);
  read_tensors(in);
  read_options(in);
  read_gradients(in);
}

void AttentionCall::read_sizes(Reader& in) {
  a.batch = in.pick({2, 1, 3, 0, 5});
  a.seqlen_q = in.pick({5, 1, 0, 17, 33, 64, 70, 130});
  a.seqlen_k = in.pick({7, 1, 0, 16, 31, 65, 128, 200});
  a.heads_kv = in.pick({2, 1, 3});
  a.heads_q = times(a.heads_kv, in.pick({2, 1, 3, 8})) | (in.one_in(100) ? 1 : 0);
  a.head_dim = in.pick({8, 1, 3, 16, 33, 64, 80, 256, 512});
  a.head_dim_v = in.pick({0, 8, 5, 16, 64, 100, 512});
  a.max_seqlen_q = in.pick({0, 0, 0, 1000, 5});
  a.max_seqlen_k = in.pick({0, 0, 0, 1000, 7});
  a.window_left = in.pick({-1, -1, 0, 3, 100});
  a.window_right = in.pick({-1, 0, 0, 2, 100});
}

void AttentionCall::read_cache(Reader& in) {
  a.kv_batch = in.pick({0, 0, 0, 2, 7});
  a.kv_float8 = in.one_in(8) ? 1 : 0;
  const bool float8_queries = a.dtype == TILEWISE_FLOAT8_E4M3;
  a.out_dtype = float8_queries  ? in.pick32({0, 1, 2, 3})
                : in.one_in(16) ? TILEWISE_OUT_FLOAT32
                                : TILEWISE_OUT_DEFAULT;
  switch (in.byte() % 8) {
    case 5:
      a.page_size = in.pick({4, 1, 3, 16, 128});
      a.pages = in.pick({9, 1, 0, 40});
      a.block_table_width = in.pick({3, 1, 0, 8});
      a.block_table_stride = in.one_in(20) ? in.bits64() : a.block_table_width;
      a.block_table = static_cast<int32_t*>(memory.tensor(
          {1, 1, a.batch}, {0, 0, a.block_table_stride}, a.block_table_width, 4, Writer::none));
      if (a.block_table == nullptr) a.block_table = memory.array<int32_t>(1);
      if (!memory.exceeded() && a.batch > 0 && a.block_table_width > 0 &&
          a.block_table_stride == a.block_table_width)
        for (int64_t i = 0; i < times(a.batch, a.block_table_width); ++i)
          const_cast<int32_t*>(a.block_table)[i] = in.pick32({0, 1, 2, 3, 8});
      break;
    case 6:
      a.kv_batch_idx = read_indices(in, memory, a.batch, 0, 1);
      break;
    default:
      break;
  }
}

void AttentionCall::read_lengths(Reader& in) {
  const uint8_t which = in.byte();
  const int64_t sequences = a.batch == INT64_MAX ? a.batch : a.batch + 1;
  const int64_t parts = std::max<int64_t>(a.batch, 1);
  if ((which & 1) != 0) a.cu_seqlens_q = read_indices(in, memory, sequences, 0, a.seqlen_q / parts);
  if ((which & 2) != 0) a.cu_seqlens_k = read_indices(in, memory, sequences, 0, a.seqlen_k / parts);
  if ((which & 4) != 0) a.seqused_q = read_indices(in, memory, a.batch, a.seqlen_q / parts, 0);
  if ((which & 8) != 0) a.seqused_k = read_indices(in, memory, a.batch, a.seqlen_k / parts, 0);
  if ((which & 16) != 0) a.leftpad_k = read_indices(in, memory, a.batch, 1, 0);
}

tilewise_tensor AttentionCall::rows(Reader& in, int64_t columns, Writer writer) {
  const int64_t batch = a.cu_seqlens_q != nullptr ? 1 : a.batch;
  const int64_t bytes =
      writer == Writer::forward ? tilewise::element_bytes(tilewise::out_dtype_of(a)) : element();
  return read_view(in, memory, {batch, a.seqlen_q, a.heads_q}, columns, bytes, writer);
}

tilewise_tensor AttentionCall::keys(Reader& in, int64_t columns, Writer writer) {
  std::array<int64_t, 3> sizes = {a.kv_batch != 0 ? a.kv_batch : a.batch, a.seqlen_k, a.heads_kv};
  const bool gradient = writer == Writer::backward;
  if (a.block_table != nullptr) {
    const __int128 capacity = static_cast<__int128>(a.block_table_width) * a.page_size;
    const bool fits = capacity >= 0 && capacity < (1 << 24);
    sizes = gradient
                ? std::array<int64_t, 3>{a.batch, fits ? static_cast<int64_t>(capacity) : 1 << 24,
                                         a.heads_kv}
                : std::array<int64_t, 3>{a.pages, a.page_size, a.heads_kv};
  } else if (a.cu_seqlens_k != nullptr) {
    sizes[0] = 1;
  } else if (a.kv_batch_idx != nullptr && gradient) {
    sizes[0] = a.batch;
  }
  const int64_t bytes = a.kv_float8 != 0 && !gradient ? 1 : element();
  return read_view(in, memory, sizes, columns, bytes, writer);
}

void AttentionCall::read_tensors(Reader& in) {
  const int64_t columns_v = a.head_dim_v != 0 ? a.head_dim_v : a.head_dim;
  a.q = rows(in, a.head_dim, Writer::none);
  a.k = keys(in, a.head_dim, Writer::none);
  a.v = keys(in, columns_v, Writer::none);
  a.out = rows(in, columns_v, Writer::forward);
  const int64_t batch = a.cu_seqlens_q != nullptr ? 1 : a.batch;
  const tilewise_tensor lse =
      read_view(in, memory, {batch, 1, a.heads_q}, a.seqlen_q, 4, Writer::forward);
  a.lse = static_cast<float*>(lse.data);
  a.lse_stride_batch = lse.stride_batch;
  a.lse_stride_head = lse.stride_head;
  if (!in.one_in(4)) return;
  a.lse_low = static_cast<float*>(memory.tensor({batch, 1, a.heads_q},
                                                {lse.stride_batch, lse.stride_row, lse.stride_head},
                                                a.seqlen_q, 4, Writer::forward));
}

const float* AttentionCall::floats(Reader& in, int64_t count) {
  auto* values = memory.array<float>(count);
  memory.fill(values, 4, in.byte(), false);
  return values;
}

void AttentionCall::read_options(Reader& in) {
  const uint8_t which = in.byte();
  a.scale = 0.25f;
  a.softcap = (which & 1) != 0 ? 5.0f : 0.0f;
  if ((which & 2) != 0) a.alibi_slopes = floats(in, a.heads_q);
  if ((which & 4) != 0) {
    // Rows and keys of the longest possible sequence.
    const int64_t keys = a.block_table != nullptr ? times(a.block_table_width, 128) : a.seqlen_k;
    a.bias_dtype = in.one_in(3) ? tilewise::dtypes_of(a).widened_q() : TILEWISE_FLOAT32;
    const int64_t size = a.bias_dtype == TILEWISE_FLOAT32 ? 4 : 2;
    const tilewise_tensor bias =
        read_view(in, memory, {a.batch, a.seqlen_q, a.heads_q}, keys, size, Writer::none);
    a.bias = bias.data;
    a.bias_stride_batch = bias.stride_batch;
    a.bias_stride_row = bias.stride_row;
    a.bias_stride_head = bias.stride_head;
    g.dbias_keys = keys;
    g.dbias_rows = a.seqlen_q;
  }
  if ((which & 8) != 0) a.dropout_p = 0.3f;
  if ((which & 16) != 0) a.sinks = floats(in, a.heads_q);
  if ((which & 32) != 0) a.scale_ptr = floats(in, 1);
  if ((which & 64) != 0) {
    auto* state = memory.array<uint64_t>(2);
    memory.fill(state, 4, in.byte(), true);
    a.dropout_state = state;
  }
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(), -1.0f, 1e30f};
  if (in.one_in(60)) a.scale = odd[in.byte() % 3];
  if (in.one_in(60)) a.softcap = odd[in.byte() % 3];
  if (in.one_in(60)) a.dropout_p = odd[in.byte() % 3];
  if (in.one_in(4)) {
    auto* const diagonal = memory.array<int32_t>(a.batch);
    for (int64_t b = 0; diagonal != nullptr && !memory.exceeded() && b < a.batch; ++b)
      diagonal[b] = in.pick32({0, 1, -3, 40, -40, INT32_MAX, INT32_MIN});
    a.diagonal = diagonal;
    a.row_offset = in.pick({0, 5, INT32_MAX, -1});
    a.key_offset = in.pick({0, 16, 21, INT32_MAX});
    a.batch_offset = in.pick({0, 1, INT32_MAX});
    a.head_offset = in.pick({0, 0, 2});
    a.heads_q_total = in.pick({0, 100, 1});
  }
  a.num_splits = in.pick32({0, 0, 1, 2, 3, 7, 256, -1});
  a.deterministic = in.byte() % 2;
  a.batch_invariant = in.one_in(8) ? 1 : 0;
  if (in.one_in(3)) {
    a.k_descale = floats(in, times(a.batch, a.heads_kv));
    a.k_descale_stride_batch = a.heads_kv;
    a.k_descale_stride_head = 1;
  }
  if (in.one_in(3)) a.v_descale = floats(in, 1);
  if (in.one_in(a.dtype == TILEWISE_FLOAT8_E4M3 ? 2 : 16)) {
    a.q_descale = floats(in, times(a.batch, a.heads_kv));
    a.q_descale_stride_batch = a.heads_kv;
    a.q_descale_stride_head = 1;
  }
  if (in.one_in(4)) a.max_logits = memory.array<float>(times(a.batch, a.heads_q), Writer::forward);
  a.dropout_seed = static_cast<uint64_t>(in.pick({0, 1, -1}));
  if (in.one_in(8)) return;  // the library's own pool
  parallel = {backwards_parallel_for, nullptr, in.pick32({1, 2, 3, 5}), 0};
  a.parallel = &parallel;
}

void AttentionCall::read_gradients(Reader& in) {
  const int64_t columns_v = a.head_dim_v != 0 ? a.head_dim_v : a.head_dim;
  const uint8_t which = in.byte();
  g.struct_size = sizeof(g);
  g.dout = rows(in, columns_v, Writer::none);
  if ((which & 1) == 0) g.dq = rows(in, a.head_dim, Writer::backward);
  if ((which & 2) == 0) g.dk = keys(in, a.head_dim, Writer::backward);
  if ((which & 4) == 0) g.dv = keys(in, columns_v, Writer::backward);
  if ((which & 8) != 0 && a.bias != nullptr) {
    const std::array<int64_t, 3> strides = {
        a.bias_stride_batch == 0 ? 0 : times(times(g.dbias_rows, a.heads_q), g.dbias_keys),
        a.bias_stride_row == 0 ? 0 : times(a.heads_q, g.dbias_keys),
        a.bias_stride_head == 0 ? 0 : g.dbias_keys};
    const auto size = [&](int64_t size_of, int64_t stride) { return stride == 0 ? 1 : size_of; };
    g.dbias_stride_batch = strides[0];
    g.dbias_stride_row = strides[1];
    g.dbias_stride_head = strides[2];
    g.dbias = static_cast<float*>(memory.tensor(
        {size(a.batch, strides[0]), size(a.seqlen_q, strides[1]), size(a.heads_q, strides[2])},
        strides, g.dbias_keys, 4, Writer::backward));
  }
  if ((which & 16) != 0 && a.sinks != nullptr)
    g.dsinks = memory.array<float>(a.heads_q, Writer::backward);
  if ((which & 32) != 0) g.dscale = memory.array<float>(1, Writer::backward);
  if ((which & 64) != 0) {
    const int64_t batch = a.cu_seqlens_q != nullptr ? 1 : a.batch;
    const tilewise_tensor dlse =
        read_view(in, memory, {batch, 1, a.heads_q}, a.seqlen_q, 4, Writer::none);
    g.dlse = static_cast<const float*>(dlse.data);
    g.dlse_stride_batch = dlse.stride_batch;
    g.dlse_stride_head = dlse.stride_head;
  }
}

bool AttentionCall::runnable() const {
  const int64_t keys =
      a.block_table != nullptr ? times(a.block_table_width, a.page_size) : a.seqlen_k;
  for (int64_t size : {a.batch, a.seqlen_q, keys, a.heads_q, a.heads_kv, a.kv_batch})
    if (too_long(size)) return false;
  const double work = static_cast<double>(a.batch) * static_cast<double>(a.heads_q) *
                      static_cast<double>(a.seqlen_q) * static_cast<double>(keys) *
                      (static_cast<double>(a.head_dim) + static_cast<double>(a.head_dim_v));
  return !memory.exceeded() && work < 3e7;
}

AppendCall::AppendCall(Reader& in) {
  a.struct_size = sizeof(a);
  a.dtype = in.pick32({0, 1, 2, 0, 1, 2, 3, 4});
  a.batch = in.pick({2, 1, 3, 0});
  a.seqlen_q = in.pick({3, 1, 0, 9});
  a.seqlen_new = in.pick({3, 1, 0, 9});
  a.seqlen_k = in.pick({16, 1, 40});
  a.heads_kv = in.pick({2, 1, 3});
  a.heads_q = in.pick({4, 1, 6});
  a.head_dim = in.pick({8, 1, 3, 64, 512});
  a.head_dim_v = in.pick({0, 8, 5, 16});
  a.kv_batch = in.pick({0, 0, 2, 7});
  a.rotary_dim = in.pick({4, 0, 8, 2, 3});
  a.rotary_rows = in.pick({32, 8, 0, 1});
  a.rotary_interleaved = in.pick32({0, 1});
  a.q_single_position = in.pick32({0, 1});
  parallel = {backwards_parallel_for, nullptr, in.pick32({1, 2, 3}), 0};
  a.parallel = &parallel;
  read_arrays(in);
  read_tensors(in);
}

void AppendCall::read_arrays(Reader& in) {
  const uint8_t which = in.byte();
  const int64_t sequences = a.batch == INT64_MAX ? a.batch : a.batch + 1;
  const int64_t parts = std::max<int64_t>(a.batch, 1);
  if ((which & 1) == 0) a.cache_seqlens = read_indices(in, memory, a.batch, 2, 1);
  if ((which & 2) != 0) a.cu_seqlens_q = read_indices(in, memory, sequences, 0, a.seqlen_q / parts);
  if ((which & 4) != 0)
    a.cu_seqlens_new = read_indices(in, memory, sequences, 0, a.seqlen_new / parts);
  if ((which & 8) != 0) a.rotary_seqlens = read_indices(in, memory, a.batch, 1, 1);
  if ((which & 16) != 0) a.leftpad_k = read_indices(in, memory, a.batch, 1, 0);
  if ((which & 32) != 0) a.kv_batch_idx = read_indices(in, memory, a.batch, 0, 1);
  if ((which & 64) == 0) return;
  a.page_size = in.pick({4, 1, 3, 16});
  a.pages = in.pick({9, 1, 0, 40});
  a.block_table_width = in.pick({4, 1, 0, 8});
  a.block_table_stride = a.block_table_width;
  int64_t entries = 0;
  if (__builtin_mul_overflow(a.batch, a.block_table_width, &entries)) entries = INT64_MAX;
  a.block_table = read_indices(in, memory, entries, 0, 1);
}

void AppendCall::read_tensors(Reader& in) {
  const int64_t element = a.dtype == TILEWISE_FLOAT32 ? 4 : 2;
  const int64_t columns_v = a.head_dim_v != 0 ? a.head_dim_v : a.head_dim;
  const auto rows = [&](const int32_t* cu_seqlens, int64_t count, int64_t heads, int64_t columns,
                        Writer writer) {
    const int64_t batch = cu_seqlens != nullptr ? 1 : a.batch;
    return read_view(in, memory, {batch, count, heads}, columns, element, writer);
  };
  const bool paged = a.block_table != nullptr;
  const std::array<int64_t, 3> cache = {paged             ? a.pages
                                        : a.kv_batch != 0 ? a.kv_batch
                                                          : a.batch,
                                        paged ? a.page_size : a.seqlen_k, a.heads_kv};
  const uint8_t which = in.byte();
  if ((which & 1) == 0) {
    a.q = rows(a.cu_seqlens_q, a.seqlen_q, a.heads_q, a.head_dim, Writer::none);
    a.q_out = rows(a.cu_seqlens_q, a.seqlen_q, a.heads_q, a.head_dim, Writer::forward);
  }
  if ((which & 2) == 0) {
    a.k_new = rows(a.cu_seqlens_new, a.seqlen_new, a.heads_kv, a.head_dim, Writer::none);
    a.v_new = rows(a.cu_seqlens_new, a.seqlen_new, a.heads_kv, columns_v, Writer::none);
    a.k_cache = read_view(in, memory, cache, a.head_dim, element, Writer::forward);
    a.v_cache = read_view(in, memory, cache, columns_v, element, Writer::forward);
  }
  if ((which & 4) == 0) return;
  const std::array<int64_t, 3> one = {1, 1, 1};
  int64_t entries = 0;
  if (__builtin_mul_overflow(a.rotary_rows, a.rotary_dim / 2, &entries)) entries = INT64_MAX;
  a.rotary_cos =
      memory.tensor(one, {0, 0, 0}, std::max<int64_t>(entries, 1), element, Writer::none);
  a.rotary_sin =
      memory.tensor(one, {0, 0, 0}, std::max<int64_t>(entries, 1), element, Writer::none);
}

bool AppendCall::runnable() const {
  for (int64_t size : {a.batch, a.seqlen_q, a.seqlen_new, a.seqlen_k, a.heads_q, a.heads_kv})
    if (too_long(size)) return false;
  return !memory.exceeded();
}

}  // namespace fuzz
