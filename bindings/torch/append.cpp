// The implementation of the operator tilewise::append_kv, which writes new keys and values into a
// cache and applies rotary embedding.
#include "attention.h"
#include "launch.h"

namespace tilewise::torch_binding {
namespace {

struct AppendArguments {
  explicit AppendArguments(Arguments& in)
      : k_cache(in.tensor()),
        v_cache(in.tensor()),
        q(in.optional_tensor()),
        k_new(in.optional_tensor()),
        v_new(in.optional_tensor()),
        cache_seqlens(in.tensor()),
        cu_seqlens_q(in.optional_tensor()),
        cu_seqlens_new(in.optional_tensor()),
        rotary_seqlens(in.optional_tensor()),
        block_table(in.optional_tensor()),
        kv_batch_idx(in.optional_tensor()),
        leftpad_k(in.optional_tensor()),
        rotary_cos(in.optional_tensor()),
        rotary_sin(in.optional_tensor()),
        rotary_interleaved(in.flag()),
        q_single_position(in.flag()),
        k_descale(in.optional_tensor()),
        v_descale(in.optional_tensor()) {}
  Tensor k_cache, v_cache;
  OptionalTensor q, k_new, v_new;
  Tensor cache_seqlens;
  OptionalTensor cu_seqlens_q, cu_seqlens_new, rotary_seqlens;
  OptionalTensor block_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin;
  bool rotary_interleaved, q_single_position;
  OptionalTensor k_descale, v_descale;
};

struct Append {
  tilewise_kv_append c{};
  Place place;
  int32_t torch_dtype = 0;  // dtype of q, the new keys and the rotary tables
};

constexpr const char* dtype_rule =
    "the dtype of k_cache or, for a float8_e4m3fn cache, that of k_new";

void describe_cache(const AppendArguments& in, Append& append) {
  tilewise_kv_append& c = append.c;
  expect_shape(in.k_cache, "k_cache", {any_size, any_size, any_size, any_size});
  expect_shape(in.v_cache, "v_cache",
               {in.k_cache.size(0), in.k_cache.size(1), in.k_cache.size(2), any_size});
  expect_place(in.v_cache, "v_cache", append.place);
  expect_dtype(in.v_cache, "v_cache", dtype_of(in.k_cache), "the dtype of k_cache");
  c.heads_kv = in.k_cache.size(2);
  c.head_dim = in.k_cache.size(3);
  c.head_dim_v = in.v_cache.size(3);
  c.k_cache = view_of(in.k_cache, "k_cache");
  c.v_cache = view_of(in.v_cache, "v_cache");
  c.batch = in.cache_seqlens.dim() == 1 ? in.cache_seqlens.size(0) : 0;
  c.cache_seqlens = int32_vector(in.cache_seqlens, "cache_seqlens", c.batch, append.place);
  c.kv_batch_idx = int32_vector(in.kv_batch_idx, "kv_batch_idx", c.batch, append.place);
  c.leftpad_k = int32_vector(in.leftpad_k, "leftpad_k", c.batch, append.place);
  if (in.block_table) {
    expect_place(*in.block_table, "block_table", append.place);
    expect_dtype(*in.block_table, "block_table", aoti_torch_dtype_int32(), "int32");
    expect_shape(*in.block_table, "block_table", {c.batch, any_size});
    expect_contiguous_columns(*in.block_table, "block_table");
    c.block_table = static_cast<const int32_t*>(address_of(*in.block_table));
    c.block_table_stride = in.block_table->stride(0);
    c.block_table_width = in.block_table->size(1);
    c.pages = in.k_cache.size(0);
    c.page_size = in.k_cache.size(1);
    return;
  }
  c.seqlen_k = in.k_cache.size(1);
  c.kv_batch = in.k_cache.size(0);
  if (c.kv_batch_idx == nullptr && c.kv_batch != c.batch)
    invalid("k_cache has batch size " + std::to_string(c.kv_batch) + ", but cache_seqlens has " +
            std::to_string(c.batch) + " entries");
}

void describe_new_keys(const AppendArguments& in, Append& append) {
  tilewise_kv_append& c = append.c;
  expect_both(in.k_new, "k_new", in.v_new, "v_new");
  if (!in.k_new) return;
  const Tensor &k = *in.k_new, &v = *in.v_new;
  if (in.cu_seqlens_new) {
    expect_shape(k, "k_new", {any_size, c.heads_kv, c.head_dim});
    expect_shape(v, "v_new", {k.size(0), c.heads_kv, c.head_dim_v});
    c.cu_seqlens_new = int32_vector(in.cu_seqlens_new, "cu_seqlens_new", c.batch + 1, append.place);
    c.seqlen_new = k.size(0);
  } else {
    expect_shape(k, "k_new", {c.batch, any_size, c.heads_kv, c.head_dim});
    expect_shape(v, "v_new", {c.batch, k.size(1), c.heads_kv, c.head_dim_v});
    c.seqlen_new = k.size(1);
  }
  for (const auto& [tensor, name] : {std::pair{&k, "k_new"}, std::pair{&v, "v_new"}}) {
    expect_place(*tensor, name, append.place);
    expect_dtype(*tensor, name, append.torch_dtype, dtype_rule);
  }
  c.k_new = view_of(k, "k_new");
  c.v_new = view_of(v, "v_new");
}

void describe_rotary(const AppendArguments& in, Append& append) {
  tilewise_kv_append& c = append.c;
  expect_both(in.rotary_cos, "rotary_cos", in.rotary_sin, "rotary_sin");
  c.rotary_interleaved = in.rotary_interleaved ? 1 : 0;
  c.q_single_position = in.q_single_position ? 1 : 0;
  c.rotary_seqlens = int32_vector(in.rotary_seqlens, "rotary_seqlens", c.batch, append.place);
  if (!in.rotary_cos) return;
  const Tensor &cos = *in.rotary_cos, &sin = *in.rotary_sin;
  expect_shape(cos, "rotary_cos", {any_size, any_size});
  expect_shape(sin, "rotary_sin", {cos.size(0), cos.size(1)});
  for (const auto& [tensor, name] :
       {std::pair{&cos, "rotary_cos"}, std::pair{&sin, "rotary_sin"}}) {
    expect_place(*tensor, name, append.place);
    expect_dtype(*tensor, name, append.torch_dtype, dtype_rule);
    if (!tensor->is_contiguous())
      invalid(std::string(name) + " is not contiguous, but must be contiguous");
  }
  c.rotary_cos = address_of(cos);
  c.rotary_sin = address_of(sin);
  c.rotary_rows = cos.size(0);
  c.rotary_dim = cos.size(1) * 2;
}

// Describes q and returns a tensor for its rotated copy, which is empty without q.
Tensor describe_query(const AppendArguments& in, Append& append) {
  tilewise_kv_append& c = append.c;
  if (!in.q) {
    c.heads_q = c.heads_kv;
    return new_tensor({0}, append.torch_dtype, append.place);
  }
  const Tensor& q = *in.q;
  expect_place(q, "q", append.place);
  expect_dtype(q, "q", append.torch_dtype, dtype_rule);
  if (in.cu_seqlens_q)
    expect_shape(q, "q", {any_size, any_size, c.head_dim});
  else
    expect_shape(q, "q", {c.batch, any_size, any_size, c.head_dim});
  c.cu_seqlens_q = int32_vector(in.cu_seqlens_q, "cu_seqlens_q", c.batch + 1, append.place);
  c.seqlen_q = q.size(q.dim() - 3);
  c.heads_q = q.size(q.dim() - 2);
  Tensor out = q.dim() == 3 ? new_tensor({c.seqlen_q, c.heads_q, c.head_dim}, append.torch_dtype,
                                         append.place)
                            : new_tensor({c.batch, c.seqlen_q, c.heads_q, c.head_dim},
                                         append.torch_dtype, append.place);
  c.q = view_of(q, "q");
  c.q_out = view_of(out, "q_out");
  return out;
}

}  // namespace

void append_kv(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const AppendArguments in(arguments);

  Append append;
  append.place = place_of(in.k_cache);
  const bool float8 = dtype_of(in.k_cache) == aoti_torch_dtype_float8_e4m3fn();
  const Tensor& like = float8 && in.k_new ? *in.k_new : in.k_cache;
  append.torch_dtype = dtype_of(like);
  tilewise_kv_append& c = append.c;
  c.struct_size = sizeof(c);
  c.device =
      append.place.device_type == aoti_torch_device_type_cuda() ? TILEWISE_CUDA : TILEWISE_CPU;
  c.device_index = c.device == TILEWISE_CUDA ? append.place.device_index : 0;
  c.dtype = element_type(like, "k_cache");
  c.kv_float8 = float8 ? 1 : 0;
  describe_cache(in, append);
  set_descale(c, in.k_descale, in.v_descale, append.place);
  describe_new_keys(in, append);
  describe_rotary(in, append);
  const DeviceScope device(append.place);
  const Tensor q_out = describe_query(in, append);
  const tilewise_parallel threads = torch_threads();
  c.stream = device.stream();
  c.parallel = &threads;
  check_status(tilewise_append_kv(&c));
  stack[0] = torch::stable::detail::from(q_out);
}

}  // namespace tilewise::torch_binding
