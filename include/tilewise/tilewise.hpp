/* Tilewise for C++20: a thin, header-only layer over the C ABI in tilewise.h.
 *
 * Copyright (c) 2026 The Tilewise authors. BSD-3-Clause.
 *
 *     std::vector<float> q(2 * 128 * 8 * 64), out(q.size());      // [batch, row, head, column]
 *     tilewise::ConstTensor in = tilewise::view(q, {2, 128, 8, 64});
 *     tilewise::attention(in, in, in, tilewise::view(out, {2, 128, 8, 64}), {.causal = true});
 *
 * Views check their rank and that they stay inside the memory they are given, and `describe` checks
 * that they fit each other; the library checks everything else. All errors are thrown as
 * tilewise::Error. For options that this layer lacks, fill in the struct that `describe` returns.
 */
#ifndef TILEWISE_TILEWISE_HPP
#define TILEWISE_TILEWISE_HPP

#if __cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L)
#error "tilewise.hpp needs C++20: -std=c++20, or target_compile_features(... cxx_std_20) in CMake"
#endif

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "tilewise/tilewise.h"

namespace tilewise {

class Error : public std::runtime_error {
 public:
  Error(tilewise_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  tilewise_status status() const noexcept { return status_; }

 private:
  tilewise_status status_;
};

// Throws an Error unless a call of the C ABI has succeeded.
inline void check(tilewise_status status) {
  if (status != TILEWISE_OK) throw Error(status, tilewise_last_error());
}

// The dtype of an element type. Specialise it for the 16-bit types of a program:
//     template <> inline constexpr tilewise_dtype tilewise::dtype_of<my_bf16> = TILEWISE_BFLOAT16;
template <class T>
inline constexpr tilewise_dtype dtype_of = T::no_dtype_is_known_for_this_type;
template <>
inline constexpr tilewise_dtype dtype_of<float> = TILEWISE_FLOAT32;

// A non-owning view with 4 dimensions [batch, row, head, column], or 3 [row, head, column] for
// variable length. Strides count elements; the last one is 1.
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;
  tilewise_dtype dtype = TILEWISE_FLOAT32;
  int rank = 0;
  std::array<int64_t, 4> sizes{};  // a view of rank 3 does not use the first entry
  std::array<int64_t, 4> strides{};

  int64_t batch() const { return sizes[0]; }
  int64_t rows() const { return sizes[1]; }
  int64_t heads() const { return sizes[2]; }
  int64_t columns() const { return sizes[3]; }

  // A writable view converts to a read-only one.
  operator BasicTensor<const void*>() const { return {data, dtype, rank, sizes, strides}; }

  // The struct of the C ABI, whose pointer is never const; the library does not write to inputs.
  tilewise_tensor raw() const {
    return {const_cast<void*>(static_cast<const void*>(data)), strides[0], strides[1], strides[2]};
  }
};
using Tensor = BasicTensor<void*>;
using ConstTensor = BasicTensor<const void*>;

using Sizes = std::initializer_list<int64_t>;

namespace detail {

[[noreturn]] inline void invalid(const std::string& sentence) {
  throw Error(TILEWISE_INVALID_ARGUMENT, sentence);
}

template <class Pointer>
BasicTensor<Pointer> make_view(Pointer data, tilewise_dtype dtype, Sizes sizes, Sizes strides) {
  if (sizes.size() != 3 && sizes.size() != 4)
    invalid("sizes has " + std::to_string(sizes.size()) + " entries: 3 or 4 are allowed");
  if (strides.size() != 0 && strides.size() != sizes.size())
    invalid("strides has " + std::to_string(strides.size()) +
            " entries: it must have as many as sizes, " + std::to_string(sizes.size()));
  BasicTensor<Pointer> view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int>(sizes.size());
  const std::size_t first = 4 - sizes.size();
  for (std::size_t i = 0; i < sizes.size(); ++i) view.sizes[first + i] = sizes.begin()[i];
  int64_t packed = 1;
  for (std::size_t i = 4; i-- > first;) {
    if (view.sizes[i] < 0)
      invalid("sizes has the entry " + std::to_string(view.sizes[i]) + ": 0 or more is allowed");
    view.strides[i] = strides.size() != 0 ? strides.begin()[i - first] : packed;
    if (__builtin_mul_overflow(packed, view.sizes[i], &packed))
      invalid("the product of sizes does not fit into 64 bits");
  }
  if (view.strides[3] != 1)
    invalid("the last stride is " + std::to_string(view.strides[3]) +
            ": it must be 1, because the columns must be contiguous");
  return view;
}

// Checks that all elements of the view lie in [0, count).
template <class Pointer>
void check_inside(const BasicTensor<Pointer>& view, std::size_t count) {
  int64_t lowest = 0;
  int64_t highest = 0;
  for (std::size_t i = static_cast<std::size_t>(4 - view.rank); i < 4; ++i) {
    if (view.sizes[i] == 0) return;
    int64_t reach = 0;
    int64_t& end = view.strides[i] < 0 ? lowest : highest;
    if (__builtin_mul_overflow(view.sizes[i] - 1, view.strides[i], &reach) ||
        __builtin_add_overflow(end, reach, &end))
      invalid("the offsets that sizes and strides give do not fit into 64 bits");
  }
  if (lowest < 0 || static_cast<std::size_t>(highest) >= count)
    invalid("sizes and strides reach from element " + std::to_string(lowest) + " to " +
            std::to_string(highest) + ", but the memory has " + std::to_string(count) +
            " elements");
}

}  // namespace detail

// A view of memory whose extent is known (std::vector, std::array, std::span), contiguous unless
// strides are given.
template <class Range>
  requires std::ranges::borrowed_range<Range>  // rejects temporaries that own their elements
auto view(Range&& range, Sizes sizes, Sizes strides = {}) {
  const std::span span(range);
  using Element = typename decltype(span)::element_type;
  using Pointer = std::conditional_t<std::is_const_v<Element>, const void*, void*>;
  constexpr tilewise_dtype dtype = dtype_of<std::remove_const_t<Element>>;
  const auto result = detail::make_view<Pointer>(span.data(), dtype, sizes, strides);
  detail::check_inside(result, span.size());
  return result;
}

// A view of memory whose extent only the caller knows.
inline Tensor view(void* data, tilewise_dtype dtype, Sizes sizes, Sizes strides = {}) {
  return detail::make_view(data, dtype, sizes, strides);
}
inline ConstTensor view(const void* data, tilewise_dtype dtype, Sizes sizes, Sizes strides = {}) {
  return detail::make_view(data, dtype, sizes, strides);
}

// The options of a call, meant for designated initialisers; everything is off by default.
// tilewise.h defines them.
struct Options {
  bool causal = false;                       // the same as window_right = 0
  std::optional<int64_t> window_left = {};   // keys before the diagonal; none: no limit
  std::optional<int64_t> window_right = {};  // keys after the diagonal; none: no limit
  std::optional<float> scale = {};           // default: 1 / sqrt(head_dim)
  float softcap = 0.0f;
  float dropout_p = 0.0f;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  std::span<const float> alibi_slopes = {};    // one per query head
  std::span<const float> sinks = {};           // one per query head
  std::span<const int32_t> cu_seqlens_q = {};  // with views of rank 3: batch + 1 entries
  std::span<const int32_t> cu_seqlens_k = {};
  std::span<const int32_t> seqused_k = {};  // keys in use per sequence
  int32_t num_splits = 0;
  bool deterministic = false;
  const tilewise_parallel* parallel = nullptr;
  // A shard of a larger problem (tilewise.h).
  std::span<const int32_t> diagonal = {};  // one per sequence
  int64_t row_offset = 0;
  int64_t key_offset = 0;
  int64_t batch_offset = 0;
  int64_t head_offset = 0;
  int64_t heads_q_total = 0;
  const tilewise_mask* mask = nullptr;  // which pairs are visible, besides the band
  // The factors of float8_e4m3 views, contiguous [batch, heads of k]; none: 1.
  std::span<const float> q_descale = {};
  std::span<const float> k_descale = {};
  std::span<const float> v_descale = {};
};

namespace detail {

inline void check_size(const char* name, std::size_t given, int64_t wanted) {
  if (given != 0 && static_cast<int64_t>(given) != wanted)
    invalid(std::string(name) + " has " + std::to_string(given) + " entries: it must have " +
            std::to_string(wanted));
}

template <class Left, class Right>
void check_same(const char* what, const Left& left, const Right& right) {
  if (left != right)
    invalid(std::string(what) + " are " + std::to_string(left) + " and " + std::to_string(right) +
            ": they must be equal");
}

inline void check_rank(const char* name, int rank, bool packed) {
  if (rank != (packed ? 3 : 4))
    invalid(std::string("the rank of ") + name + " is " + std::to_string(rank) +
            (packed ? ": it must be 3 with cu_seqlens_" : ": it must be 4 without cu_seqlens_") +
            name);
}

inline void check_shapes(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                         const ConstTensor& out, const Options& o) {
  check_rank("q", q.rank, !o.cu_seqlens_q.empty());
  check_rank("k", k.rank, !o.cu_seqlens_k.empty());
  check_same("the ranks of k and v", k.rank, v.rank);
  check_same("the ranks of q and out", q.rank, out.rank);
  check_same("the dtypes of k and v", int{k.dtype}, int{v.dtype});
  if (k.dtype != TILEWISE_FLOAT8_E4M3)
    check_same("the dtypes of q and of k or v", int{q.dtype}, int{k.dtype});
  if (q.dtype == TILEWISE_FLOAT8_E4M3 && out.dtype == q.dtype)
    invalid("the dtypes of q and out are float8_e4m3: out must be float32, float16 or bfloat16");
  if (q.dtype != TILEWISE_FLOAT8_E4M3 && out.dtype != TILEWISE_FLOAT32)
    check_same("the dtypes of q and out", int{q.dtype}, int{out.dtype});
  if (q.rank == 4) check_same("the batches of q and out", q.batch(), out.batch());
  if (k.rank == 4) check_same("the batches of k and v", k.batch(), v.batch());
  if (q.rank == 4 && k.rank == 4) check_same("the batches of q and k", q.batch(), k.batch());
  check_same("the rows of q and out", q.rows(), out.rows());
  check_same("the rows of k and v", k.rows(), v.rows());
  check_same("the heads of q and out", q.heads(), out.heads());
  check_same("the heads of k and v", k.heads(), v.heads());
  check_same("the columns of q and k", q.columns(), k.columns());
  check_same("the columns of v and out", v.columns(), out.columns());
}

// The tilewise_out_dtype of an out that has another dtype than q.
inline int32_t out_dtype(tilewise_dtype dtype) {
  if (dtype == TILEWISE_FLOAT32) return TILEWISE_OUT_FLOAT32;
  return dtype == TILEWISE_FLOAT16 ? TILEWISE_OUT_FLOAT16 : TILEWISE_OUT_BFLOAT16;
}

inline void set_descale(const char* name, std::span<const float> given, const tilewise_attention& a,
                        const float*& data, int64_t& stride_batch, int64_t& stride_head) {
  check_size(name, given.size(), a.batch * a.heads_kv);
  if (given.empty()) return;
  data = given.data();
  stride_batch = a.heads_kv;
  stride_head = 1;
}

}  // namespace detail

// The struct of the C ABI for these tensors, on the CPU. k and v have the dtype of q or, for q of
// 16 bits, float8_e4m3. out has the dtype of q or float32; for q of float8_e4m3 it has 16 or 32
// bits. If `lse` and `lse_low` are not empty, they are contiguous: [batch, head, row], or [head,
// row] with cu_seqlens_q. So is `max_logits`: [batch, head].
inline tilewise_attention describe(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                                   const Tensor& out, const Options& options = {},
                                   std::span<float> lse = {}, std::span<float> lse_low = {},
                                   std::span<float> max_logits = {}) {
  detail::check_shapes(q, k, v, out, options);
  const bool varlen = !options.cu_seqlens_q.empty();
  tilewise_attention a{};
  a.struct_size = sizeof(a);
  a.device = TILEWISE_CPU;
  a.dtype = q.dtype;
  a.batch = varlen                          ? static_cast<int64_t>(options.cu_seqlens_q.size()) - 1
            : !options.cu_seqlens_k.empty() ? static_cast<int64_t>(options.cu_seqlens_k.size()) - 1
                                            : q.batch();
  if (!varlen) detail::check_same("the batches of q and of cu_seqlens_k", q.batch(), a.batch);
  if (k.rank == 4) detail::check_same("the batches of k and of the problem", k.batch(), a.batch);
  a.seqlen_q = q.rows();
  a.seqlen_k = k.rows();
  a.heads_q = q.heads();
  a.heads_kv = k.heads();
  a.head_dim = q.columns();
  a.head_dim_v = v.columns();
  a.q = q.raw();
  a.k = k.raw();
  a.v = v.raw();
  a.out = out.raw();
  a.out_dtype = out.dtype == q.dtype ? TILEWISE_OUT_DEFAULT : detail::out_dtype(out.dtype);
  a.kv_float8 = k.dtype == TILEWISE_FLOAT8_E4M3 ? 1 : 0;
  detail::set_descale("q_descale", options.q_descale, a, a.q_descale, a.q_descale_stride_batch,
                      a.q_descale_stride_head);
  detail::set_descale("k_descale", options.k_descale, a, a.k_descale, a.k_descale_stride_batch,
                      a.k_descale_stride_head);
  detail::set_descale("v_descale", options.v_descale, a, a.v_descale, a.v_descale_stride_batch,
                      a.v_descale_stride_head);

  const int64_t lse_rows = (varlen ? 1 : a.batch) * a.heads_q * a.seqlen_q;
  detail::check_size("lse", lse.size(), lse_rows);
  a.lse = lse.empty() ? nullptr : lse.data();
  a.lse_stride_batch = a.heads_q * a.seqlen_q;
  a.lse_stride_head = a.seqlen_q;
  detail::check_size("lse_low", lse_low.size(), lse_rows);
  a.lse_low = lse_low.empty() ? nullptr : lse_low.data();
  detail::check_size("max_logits", max_logits.size(), a.batch * a.heads_q);
  a.max_logits = max_logits.empty() ? nullptr : max_logits.data();

  a.window_left = options.window_left.value_or(-1);
  a.window_right = options.causal ? 0 : options.window_right.value_or(-1);
  a.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(a.head_dim)));
  a.softcap = options.softcap;
  a.dropout_p = options.dropout_p;
  a.dropout_seed = options.dropout_seed;
  a.dropout_offset = options.dropout_offset;
  detail::check_size("alibi_slopes", options.alibi_slopes.size(), a.heads_q);
  detail::check_size("sinks", options.sinks.size(), a.heads_q);
  detail::check_size("cu_seqlens_k", options.cu_seqlens_k.size(), a.batch + 1);
  detail::check_size("seqused_k", options.seqused_k.size(), a.batch);
  const auto pointer_or_null = [](auto span) { return span.empty() ? nullptr : span.data(); };
  a.alibi_slopes = pointer_or_null(options.alibi_slopes);
  a.sinks = pointer_or_null(options.sinks);
  a.cu_seqlens_q = pointer_or_null(options.cu_seqlens_q);
  a.cu_seqlens_k = pointer_or_null(options.cu_seqlens_k);
  a.seqused_k = pointer_or_null(options.seqused_k);
  detail::check_size("diagonal", options.diagonal.size(), a.batch);
  a.diagonal = pointer_or_null(options.diagonal);
  a.row_offset = options.row_offset;
  a.key_offset = options.key_offset;
  a.batch_offset = options.batch_offset;
  a.head_offset = options.head_offset;
  a.heads_q_total = options.heads_q_total;
  a.mask = options.mask;
  a.num_splits = options.num_splits;
  a.deterministic = options.deterministic ? 1 : 0;
  a.parallel = options.parallel;
  return a;
}

// The plan: the kernel that will run, and why.
inline tilewise_plan_info plan(const tilewise_attention& attention,
                               const tilewise_gradients* gradients = nullptr) {
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  check(tilewise_plan(&attention, gradients,
                      gradients != nullptr ? TILEWISE_PASS_BACKWARD : TILEWISE_PASS_FORWARD,
                      &info));
  return info;
}

// Memory that grows to the largest workspace requested and is reused. Not for concurrent calls.
class Workspace {
 public:
  void* reserve(int64_t bytes) {
    if (bytes > capacity()) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(::operator new(static_cast<std::size_t>(bytes), kAlignment));
      capacity_ = bytes;
    }
    return memory_.get();
  }
  int64_t capacity() const noexcept { return memory_ != nullptr ? capacity_ : 0; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<void, Free> memory_;  // null after a move
  int64_t capacity_ = 0;
};

inline void forward(const tilewise_attention& attention, Workspace& workspace) {
  const int64_t bytes = plan(attention).workspace_bytes;
  check(tilewise_forward(&attention, workspace.reserve(bytes), bytes));
}

inline void backward(const tilewise_attention& attention, const tilewise_gradients& gradients,
                     Workspace& workspace) {
  const int64_t bytes = plan(attention, &gradients).workspace_bytes;
  check(tilewise_backward(&attention, &gradients, workspace.reserve(bytes), bytes));
}

// Forward mode and second derivatives: the plan of tilewise_jvp, or with gradients that of
// tilewise_second.
inline tilewise_plan_info plan(const tilewise_attention& attention,
                               const tilewise_tangents& tangents,
                               const tilewise_gradients* gradients = nullptr) {
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  check(tilewise_plan_tangents(&attention, &tangents, gradients,
                               gradients != nullptr ? TILEWISE_PASS_SECOND : TILEWISE_PASS_JVP,
                               &info));
  return info;
}

inline void jvp(const tilewise_attention& attention, const tilewise_tangents& tangents,
                Workspace& workspace) {
  const int64_t bytes = plan(attention, tangents).workspace_bytes;
  check(tilewise_jvp(&attention, &tangents, workspace.reserve(bytes), bytes));
}

inline void second(const tilewise_attention& attention, const tilewise_tangents& tangents,
                   const tilewise_gradients& gradients, Workspace& workspace) {
  const int64_t bytes = plan(attention, tangents, &gradients).workspace_bytes;
  check(tilewise_second(&attention, &tangents, &gradients, workspace.reserve(bytes), bytes));
}

// out = softmax(scale * q k^T) v in one call. Pass a workspace to reuse its memory between calls.
inline void attention(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                      const Tensor& out, const Options& options, Workspace& workspace,
                      std::span<float> lse = {}, std::span<float> max_logits = {}) {
  forward(describe(q, k, v, out, options, lse, {}, max_logits), workspace);
}
inline void attention(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                      const Tensor& out, const Options& options = {}, std::span<float> lse = {},
                      std::span<float> max_logits = {}) {
  Workspace workspace;
  attention(q, k, v, out, options, workspace, lse, max_logits);
}

// The views of a backward; gradients whose view is empty are not computed.
struct GradientViews {
  ConstTensor dout;
  Tensor dq = {};
  Tensor dk = {};
  Tensor dv = {};
};

namespace detail {

// Checks that a view matches a problem: its dtype, its rank and its sizes.
inline void check_gradient(const char* name, const ConstTensor& view, const tilewise_attention& a,
                           bool packed, const std::array<int64_t, 4>& sizes) {
  if (view.data == nullptr) return;
  const auto same = [name](const char* what, int64_t given, int64_t wanted) {
    const std::string both = std::string("the ") + what + " of " + name + " and of the problem";
    check_same(both.c_str(), given, wanted);
  };
  same("dtypes", view.dtype, a.dtype);
  same("ranks", view.rank, packed ? 3 : 4);
  constexpr std::array<const char*, 4> kDimensions = {"batches", "rows", "heads", "columns"};
  for (std::size_t i = packed ? 1 : 0; i < 4; ++i) same(kDimensions[i], view.sizes[i], sizes[i]);
}

}  // namespace detail

// The struct of the C ABI for these views, whose shapes tilewise.h defines.
inline tilewise_gradients describe(const tilewise_attention& a, const GradientViews& views) {
  const bool pages = a.block_table != nullptr;
  const bool packed_q = a.cu_seqlens_q != nullptr;
  const bool packed_k = a.cu_seqlens_k != nullptr && !pages;
  const bool own_batch_rows = pages || a.kv_batch_idx != nullptr || a.kv_batch == 0;
  const int64_t batch_k = own_batch_rows ? a.batch : a.kv_batch;
  const int64_t keys = pages ? a.block_table_width * a.page_size : a.seqlen_k;
  const int64_t columns_v = a.head_dim_v == 0 ? a.head_dim : a.head_dim_v;
  const auto check_q = [&](const char* name, const ConstTensor& view, int64_t columns) {
    detail::check_gradient(name, view, a, packed_q, {a.batch, a.seqlen_q, a.heads_q, columns});
  };
  const auto check_k = [&](const char* name, const ConstTensor& view, int64_t columns) {
    detail::check_gradient(name, view, a, packed_k, {batch_k, keys, a.heads_kv, columns});
  };
  check_q("dout", views.dout, columns_v);
  check_q("dq", views.dq, a.head_dim);
  check_k("dk", views.dk, a.head_dim);
  check_k("dv", views.dv, columns_v);
  tilewise_gradients g{};
  g.struct_size = sizeof(g);
  g.dout = views.dout.raw();
  g.dq = views.dq.raw();
  g.dk = views.dk.raw();
  g.dv = views.dv.raw();
  return g;
}

}  // namespace tilewise

#endif  // TILEWISE_TILEWISE_HPP
