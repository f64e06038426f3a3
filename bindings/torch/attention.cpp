#include "attention.h"

namespace tilewise::torch_binding {
namespace {

void describe_bias(const Tensor& bias, const Problem& problem, tilewise_attention& a) {
  expect_place(bias, "bias", problem.place);
  expect_contiguous_columns(bias, "bias");
  const bool varlen =
      a.cu_seqlens_q != nullptr || a.cu_seqlens_k != nullptr || a.block_table != nullptr;
  expect_shape(bias, "bias", {any_size, any_size, any_size, varlen ? any_size : a.seqlen_k});
  const int64_t full[3] = {a.batch, a.heads_q, varlen ? bias.size(2) : a.seqlen_q};
  const char* meaning[3] = {"batch", "heads_q", "seqlen_q"};
  for (int64_t i = 0; i < 3; ++i)
    if (bias.size(i) != 1 && bias.size(i) != full[i])
      invalid("bias has " + std::to_string(bias.size(i)) + " elements in dimension " +
              std::to_string(i) + ", but must have 1 or " + meaning[i] + " = " +
              std::to_string(full[i]));
  a.bias = address_of(bias);
  a.bias_stride_batch = stride_of(bias, 0);
  a.bias_stride_head = stride_of(bias, 1);
  a.bias_stride_row = stride_of(bias, 2);
  a.bias_dtype = element_type(bias, "bias");
  // For q of float8 the allowed dtypes follow from out, and the library checks them.
  const bool float8 = a.dtype == TILEWISE_FLOAT8_E4M3;
  if (a.bias_dtype != TILEWISE_FLOAT32 && a.bias_dtype != a.dtype && !float8)
    invalid("bias has dtype " + dtype_text(dtype_of(bias)) +
            ", but must be float32 or the dtype of q");
}

void describe_alibi(const Tensor& slopes, const Problem& problem, tilewise_attention& a) {
  expect_place(slopes, "alibi_slopes", problem.place);
  expect_dtype(slopes, "alibi_slopes", aoti_torch_dtype_float32(), "float32");
  if (slopes.dim() == 2)
    expect_shape(slopes, "alibi_slopes", {a.batch, a.heads_q});
  else
    expect_shape(slopes, "alibi_slopes", {a.heads_q});
  expect_contiguous_columns(slopes, "alibi_slopes");
  a.alibi_slopes = static_cast<const float*>(address_of(slopes));
  a.alibi_stride_batch = slopes.dim() == 2 ? slopes.stride(0) : 0;
}

void describe_cache(const Options& options, const Problem& problem, tilewise_attention& a) {
  if (options.block_table) {
    const Tensor& table = *options.block_table;
    expect_place(table, "block_table", problem.place);
    expect_dtype(table, "block_table", aoti_torch_dtype_int32(), "int32");
    expect_shape(table, "block_table", {a.batch, any_size});
    expect_contiguous_columns(table, "block_table");
    a.block_table = static_cast<const int32_t*>(address_of(table));
    a.block_table_stride = table.stride(0);
    a.block_table_width = table.size(1);
  }
  a.kv_batch_idx = int32_vector(options.kv_batch_idx, "kv_batch_idx", a.batch, problem.place);
  a.leftpad_k = int32_vector(options.leftpad_k, "leftpad_k", a.batch, problem.place);
}

void describe_lengths(const Tensor& q, const Options& options, Problem& problem) {
  tilewise_attention& a = problem.attention;
  if (options.cu_seqlens_q) {
    expect_shape(*options.cu_seqlens_q, "cu_seqlens_q", {any_size});
    a.batch = options.cu_seqlens_q->size(0) - 1;
    if (a.batch < 0) invalid("cu_seqlens_q is empty, but needs batch + 1 entries");
    expect_shape(q, "q", {any_size, any_size, any_size});
  } else {
    expect_shape(q, "q", {any_size, any_size, any_size, any_size});
    a.batch = q.size(0);
  }
  a.cu_seqlens_q = int32_vector(options.cu_seqlens_q, "cu_seqlens_q", a.batch + 1, problem.place);
  a.cu_seqlens_k = int32_vector(options.cu_seqlens_k, "cu_seqlens_k", a.batch + 1, problem.place);
  a.seqused_q = int32_vector(options.seqused_q, "seqused_q", a.batch, problem.place);
  a.seqused_k = int32_vector(options.seqused_k, "seqused_k", a.batch, problem.place);
  a.max_seqlen_q = options.max_seqlen_q;
  a.max_seqlen_k = options.max_seqlen_k;
}

void describe_keys(const Tensor& k, const Tensor& v, tilewise_attention& a) {
  if (a.cu_seqlens_k != nullptr) {
    expect_shape(k, "k", {any_size, any_size, a.head_dim});
    expect_shape(v, "v", {k.size(0), k.size(1), any_size});
    a.seqlen_k = k.size(0);
    a.heads_kv = k.size(1);
  } else {
    expect_shape(k, "k", {any_size, any_size, any_size, a.head_dim});
    expect_shape(v, "v", {k.size(0), k.size(1), k.size(2), any_size});
    a.seqlen_k = k.size(1);
    a.heads_kv = k.size(2);
    if (a.block_table != nullptr) {
      a.pages = k.size(0);
      a.page_size = k.size(1);
    } else if (a.kv_batch_idx != nullptr) {
      a.kv_batch = k.size(0);
    } else if (k.size(0) != a.batch) {
      invalid("k has batch size " + std::to_string(k.size(0)) + ", but q has " +
              std::to_string(a.batch));
    }
  }
  a.head_dim_v = v.size(v.dim() - 1);
}

void describe_score(const Options& options, const Problem& problem, tilewise_attention& a) {
  const RoundToNearest rounding;
  a.window_left = options.window_left;
  a.window_right = options.window_right;
  a.scale = static_cast<float>(options.scale);
  a.softcap = static_cast<float>(options.softcap);
  if (a.softcap == 0 && options.softcap != 0)  // the library would treat it as off
    invalid("softcap is " + std::to_string(options.softcap) + ", which rounds to 0 in float32");
  a.scale_ptr = float_vector(options.scale_tensor, "scale_tensor", 1, problem.place);
  if (options.alibi_slopes) describe_alibi(*options.alibi_slopes, problem, a);
  if (options.bias) describe_bias(*options.bias, problem, a);
  a.sinks = float_vector(options.sinks, "sinks", a.heads_q, problem.place);
  a.dropout_p = static_cast<float>(options.dropout_p);
  if (options.dropout_p > 0) {
    if (!options.dropout_state) invalid("dropout_p is positive, but dropout_state is not given");
    const Tensor& state = *options.dropout_state;
    expect_place(state, "dropout_state", problem.place);
    expect_dtype(state, "dropout_state", aoti_torch_dtype_int64(), "int64");
    expect_shape(state, "dropout_state", {2});
    expect_contiguous_columns(state, "dropout_state");
    a.dropout_state = static_cast<const uint64_t*>(address_of(state));
  }
}

void describe_shard(const Options& options, const Problem& problem, tilewise_attention& a) {
  a.diagonal = int32_vector(options.diagonal, "diagonal", a.batch, problem.place);
  a.row_offset = options.row_offset;
  a.key_offset = options.key_offset;
  a.batch_offset = options.batch_offset;
  a.head_offset = options.head_offset;
  a.heads_q_total = options.heads_q_total;
}

void describe_mask(const Options& options, Problem& problem) {
  expect_both(options.mask_first, "mask_first", options.mask_entries, "mask_entries");
  if (!options.mask_bits && (options.mask_heads | options.mask_rows | options.mask_keys) != 0)
    invalid("mask_heads, mask_rows and mask_keys must be 0 without mask_bits, but are " +
            std::to_string(options.mask_heads) + ", " + std::to_string(options.mask_rows) +
            " and " + std::to_string(options.mask_keys));
  if (!options.mask_first) {
    if (options.mask_bits) invalid("mask_bits is given, but mask_first is not");
    return;
  }
  constexpr int64_t kBlock = 128;
  problem.mask = std::make_unique<tilewise_mask>();
  tilewise_mask& m = *problem.mask;
  m.struct_size = sizeof(m);
  const auto array = [&](const Tensor& tensor, const char* name,
                         std::initializer_list<int64_t> shape) {
    expect_place(tensor, name, problem.place);
    expect_dtype(tensor, name, aoti_torch_dtype_int32(), "int32");
    expect_shape(tensor, name, shape);
    if (!tensor.is_contiguous()) invalid(std::string(name) + " must be contiguous");
    return static_cast<const int32_t*>(address_of(tensor));
  };
  m.first = array(*options.mask_first, "mask_first", {any_size});
  m.batch = options.mask_first->size(0) - 1;
  m.heads = 1;
  m.entry_count = options.mask_entries->size(0);
  problem.attention.mask = &m;
  if (!options.mask_bits) {
    m.kind = TILEWISE_MASK_RANGES;
    m.entries = array(*options.mask_entries, "mask_entries", {any_size, 5});
    return;
  }
  m.kind = TILEWISE_MASK_BLOCKS;
  m.entries = array(*options.mask_entries, "mask_entries", {any_size, 3});
  m.bits = reinterpret_cast<const uint32_t*>(
      array(*options.mask_bits, "mask_bits", {any_size, kBlock, kBlock / 32}));
  m.bit_blocks = options.mask_bits->size(0);
  m.heads = options.mask_heads;
  m.rows = options.mask_rows;
  m.keys = options.mask_keys;
  const int64_t lists = m.batch;
  const int64_t of_sequence = m.heads > 0 && m.rows > 0 ? m.heads * ((m.rows - 1) / kBlock + 1) : 0;
  if (of_sequence <= 0 || lists % of_sequence != 0)
    invalid("mask_first has " + std::to_string(lists + 1) +
            " entries, but must have batch * mask_heads * ceil(mask_rows / 128) + 1");
  m.batch = lists / of_sequence;
}

void set_out_dtype(Problem& problem, int64_t out_dtype) {
  switch (out_dtype) {
    case TILEWISE_OUT_DEFAULT:
      return;
    case TILEWISE_OUT_FLOAT32:
      problem.out_dtype = aoti_torch_dtype_float32();
      break;
    case TILEWISE_OUT_FLOAT16:
      problem.out_dtype = aoti_torch_dtype_float16();
      break;
    case TILEWISE_OUT_BFLOAT16:
      problem.out_dtype = aoti_torch_dtype_bfloat16();
      break;
    default:
      invalid("out_dtype is " + std::to_string(out_dtype) +
              ", but must be a tilewise_out_dtype, 0 to 3");
  }
  problem.attention.out_dtype = static_cast<int32_t>(out_dtype);
}

void expect_lse(const Tensor& lse, const char* name, const Problem& problem, bool with_lse_low) {
  const tilewise_attention& a = problem.attention;
  expect_place(lse, name, problem.place);
  expect_dtype(lse, name, aoti_torch_dtype_float32(), "float32");
  if (problem.varlen_q() && with_lse_low)
    expect_shape(lse, name, {2, a.heads_q, a.seqlen_q});
  else if (problem.varlen_q())
    expect_shape(lse, name, {a.heads_q, a.seqlen_q});
  else if (with_lse_low)
    expect_shape(lse, name, {2, a.batch, a.heads_q, a.seqlen_q});
  else
    expect_shape(lse, name, {a.batch, a.heads_q, a.seqlen_q});
  expect_contiguous_columns(lse, name);
}

}  // namespace

Options::Options(Arguments& arguments)
    : bias(arguments.optional_tensor()),
      alibi_slopes(arguments.optional_tensor()),
      sinks(arguments.optional_tensor()),
      cu_seqlens_q(arguments.optional_tensor()),
      cu_seqlens_k(arguments.optional_tensor()),
      seqused_q(arguments.optional_tensor()),
      seqused_k(arguments.optional_tensor()),
      block_table(arguments.optional_tensor()),
      kv_batch_idx(arguments.optional_tensor()),
      leftpad_k(arguments.optional_tensor()),
      q_descale(arguments.optional_tensor()),
      k_descale(arguments.optional_tensor()),
      v_descale(arguments.optional_tensor()),
      scale_tensor(arguments.optional_tensor()),
      dropout_state(arguments.optional_tensor()),
      diagonal(arguments.optional_tensor()),
      mask_first(arguments.optional_tensor()),
      mask_entries(arguments.optional_tensor()),
      mask_bits(arguments.optional_tensor()),
      scale(arguments.real()),
      window_left(arguments.integer()),
      window_right(arguments.integer()),
      softcap(arguments.real()),
      dropout_p(arguments.real()),
      max_seqlen_q(arguments.integer()),
      max_seqlen_k(arguments.integer()),
      num_splits(arguments.integer()),
      deterministic(arguments.flag()),
      tf32(arguments.flag()),
      check(arguments.flag()),
      batch_invariant(arguments.flag()),
      row_offset(arguments.integer()),
      key_offset(arguments.integer()),
      batch_offset(arguments.integer()),
      head_offset(arguments.integer()),
      heads_q_total(arguments.integer()),
      mask_heads(arguments.integer()),
      mask_rows(arguments.integer()),
      mask_keys(arguments.integer()),
      out_dtype(arguments.integer()),
      heads_first(arguments.flag()) {}

Descale descale_of(const OptionalTensor& given, const char* name, int64_t batch, int64_t heads_kv,
                   const Place& place) {
  if (!given) return {};
  expect_place(*given, name, place);
  expect_dtype(*given, name, aoti_torch_dtype_float32(), "float32");
  expect_shape(*given, name, {batch, heads_kv});
  return {static_cast<const float*>(address_of(*given)), stride_of(*given, 0),
          stride_of(*given, 1)};
}

int64_t Problem::keys() const {
  return attention.block_table != nullptr ? attention.block_table_width * attention.page_size
                                          : attention.seqlen_k;
}

Problem new_problem(const Tensor& q) {
  Problem problem;
  problem.place = place_of(q);
  problem.torch_dtype = problem.out_dtype = dtype_of(q);
  if (problem.torch_dtype == aoti_torch_dtype_float8_e4m3fn())
    problem.out_dtype = aoti_torch_dtype_bfloat16();
  tilewise_attention& a = problem.attention;
  a.struct_size = sizeof(a);
  a.device =
      problem.place.device_type == aoti_torch_device_type_cuda() ? TILEWISE_CUDA : TILEWISE_CPU;
  a.device_index = a.device == TILEWISE_CUDA ? problem.place.device_index : 0;
  a.dtype = element_type(q, "q");
  return problem;
}

Problem describe(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  Problem problem = new_problem(q);
  tilewise_attention& a = problem.attention;
  expect_place(k, "k", problem.place);
  expect_place(v, "v", problem.place);
  const bool float8 = dtype_of(k) == aoti_torch_dtype_float8_e4m3fn();
  if (!float8) expect_dtype(k, "k", problem.torch_dtype, "the dtype of q, or float8_e4m3fn");
  expect_dtype(v, "v", dtype_of(k), "the dtype of k");
  a.kv_float8 = float8 ? 1 : 0;
  set_out_dtype(problem, options.out_dtype);

  describe_lengths(q, options, problem);
  const int64_t rows_at = q.dim() - 3;
  a.seqlen_q = q.size(rows_at);
  a.heads_q = q.size(rows_at + 1);
  a.head_dim = q.size(rows_at + 2);
  describe_cache(options, problem, a);
  describe_keys(k, v, a);
  a.q = view_of(q, "q");
  a.k = view_of(k, "k");
  a.v = view_of(v, "v");
  describe_score(options, problem, a);
  describe_shard(options, problem, a);
  describe_mask(options, problem);
  a.num_splits = static_cast<int32_t>(options.num_splits);
  if (a.num_splits != options.num_splits)
    invalid("num_splits is " + std::to_string(options.num_splits) + ", but must fit into 32 bits");
  a.deterministic = options.deterministic ? 1 : 0;
  a.tf32 = options.tf32 ? 1 : 0;
  a.check = options.check ? 1 : 0;
  a.batch_invariant = options.batch_invariant ? 1 : 0;
  const Descale of_q =
      descale_of(options.q_descale, "q_descale", a.batch, a.heads_kv, problem.place);
  a.q_descale = of_q.data;
  a.q_descale_stride_batch = of_q.stride_batch;
  a.q_descale_stride_head = of_q.stride_head;
  set_descale(a, options.k_descale, options.v_descale, problem.place);
  return problem;
}

Tensor new_lse(const Problem& problem, bool with_lse_low) {
  const tilewise_attention& a = problem.attention;
  const auto make = [&](std::initializer_list<int64_t> shape) {
    return new_tensor(shape, aoti_torch_dtype_float32(), problem.place);
  };
  if (problem.varlen_q())
    return with_lse_low ? make({2, a.heads_q, a.seqlen_q}) : make({a.heads_q, a.seqlen_q});
  return with_lse_low ? make({2, a.batch, a.heads_q, a.seqlen_q})
                      : make({a.batch, a.heads_q, a.seqlen_q});
}

void set_lse(Problem& problem, const Tensor& lse) {
  tilewise_attention& a = problem.attention;
  const bool with_lse_low = lse.dim() == (problem.varlen_q() ? 3 : 4);
  expect_lse(lse, "lse", problem, with_lse_low);
  a.lse = const_cast<float*>(static_cast<const float*>(lse.const_data_ptr()));
  a.lse_low = with_lse_low && a.lse != nullptr ? a.lse + lse.stride(0) : nullptr;
  a.lse_stride_head = lse.stride(lse.dim() - 2);
  a.lse_stride_batch = problem.varlen_q() ? 0 : lse.stride(lse.dim() - 3);
}

LseView lse_view(const Problem& problem, const OptionalTensor& lse, const char* name) {
  if (!lse) return {};
  expect_lse(*lse, name, problem, false);
  return {const_cast<float*>(static_cast<const float*>(lse->const_data_ptr())),
          problem.varlen_q() ? 0 : lse->stride(0), lse->stride(lse->dim() - 2)};
}

void set_dlse(tilewise_gradients& g, const Problem& problem, const OptionalTensor& dlse) {
  const LseView view = lse_view(problem, dlse, "dlse");
  g.dlse = view.data;
  g.dlse_stride_batch = view.stride_batch;
  g.dlse_stride_head = view.stride_head;
}

}  // namespace tilewise::torch_binding
