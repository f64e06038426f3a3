// The operators tilewise::_plain_forward and _plain_backward: dense attention with only a scale and
// a band. Eager code calls them because they are cheaper to dispatch than the general operators: a
// third of the arguments, tensors in the caller's layout, no intermediate views.
#include <cmath>

#include "attention.h"
#include "launch.h"

namespace tilewise::torch_binding {
namespace {

// The arguments after the tensors, in the order of the schema.
struct PlainOptions {
  explicit PlainOptions(Arguments& in)
      : scale(in.optional_real()),
        window_left(in.integer()),
        window_right(in.integer()),
        deterministic(in.flag()),
        tf32(in.flag()),
        heads_first(in.flag()) {}
  std::optional<double> scale;
  int64_t window_left, window_right;
  bool deterministic, tf32, heads_first;
};

// Sizes of a tensor stored as [batch, row, head, column] or as [batch, head, row, column].
struct Shape {
  int64_t batch, rows, heads, columns;
};

Shape shape_of(const Tensor& tensor, const char* name, const PlainOptions& options) {
  if (tensor.dim() != 4) expect_shape(tensor, name, {any_size, any_size, any_size, any_size});
  const int64_t rows_at = options.heads_first ? 2 : 1;
  return {tensor.size(0), tensor.size(rows_at), tensor.size(3 - rows_at), tensor.size(3)};
}

tilewise_tensor view_in_layout(const Tensor& tensor, const char* name,
                               const PlainOptions& options) {
  tilewise_tensor view = view_of(tensor, name);
  if (options.heads_first) std::swap(view.stride_row, view.stride_head);
  return view;
}

void expect_like_q(const Tensor& tensor, const char* name, const Problem& problem) {
  expect_place(tensor, name, problem.place);
  expect_dtype(tensor, name, problem.torch_dtype, "the dtype of q");
}

Problem describe_plain(const Tensor& q, const Tensor& k, const Tensor& v,
                       const PlainOptions& options) {
  const RoundToNearest rounding;
  Problem problem = new_problem(q);
  tilewise_attention& a = problem.attention;
  expect_like_q(k, "k", problem);
  expect_like_q(v, "v", problem);
  const Shape rows = shape_of(q, "q", options);
  const Shape keys = shape_of(k, "k", options);
  expect_shape(k, "k", {rows.batch, any_size, any_size, rows.columns});
  expect_shape(v, "v", {k.size(0), k.size(1), k.size(2), any_size});
  a.batch = rows.batch;
  a.seqlen_q = rows.rows;
  a.seqlen_k = keys.rows;
  a.heads_q = rows.heads;
  a.heads_kv = keys.heads;
  a.head_dim = rows.columns;
  a.head_dim_v = v.size(3);
  a.q = view_in_layout(q, "q", options);
  a.k = view_in_layout(k, "k", options);
  a.v = view_in_layout(v, "v", options);
  a.window_left = options.window_left;
  a.window_right = options.window_right;
  a.scale = static_cast<float>(options.scale.value_or(
      std::pow(static_cast<double>(rows.columns > 0 ? rows.columns : 1), -0.5)));
  a.deterministic = options.deterministic ? 1 : 0;
  a.tf32 = options.tf32 ? 1 : 0;
  return problem;
}

// A new contiguous tensor in the caller's layout: out, or a gradient, which has the dtype of out.
Tensor new_in_layout(int64_t rows, int64_t heads, int64_t columns, const Problem& problem,
                     const PlainOptions& options) {
  const int64_t batch = problem.attention.batch;
  return options.heads_first
             ? new_tensor({batch, heads, rows, columns}, problem.out_dtype, problem.place)
             : new_tensor({batch, rows, heads, columns}, problem.out_dtype, problem.place);
}

void set_plain_result(Problem& problem, const Tensor& out, const Tensor& lse,
                      const PlainOptions& options) {
  tilewise_attention& a = problem.attention;
  expect_like_q(out, "out", problem);
  const int64_t second = options.heads_first ? a.heads_q : a.seqlen_q;
  const int64_t third = options.heads_first ? a.seqlen_q : a.heads_q;
  expect_shape(out, "out", {a.batch, second, third, a.head_dim_v});
  a.out = view_in_layout(out, "out", options);
  set_lse(problem, lse);
}

void set_plain_incoming(tilewise_gradients& g, const Problem& problem, const Tensor& dout,
                        const OptionalTensor& dlse, const Tensor& out,
                        const PlainOptions& options) {
  expect_like_q(dout, "dout", problem);
  expect_shape(dout, "dout", {out.size(0), out.size(1), out.size(2), out.size(3)});
  g.dout = view_in_layout(dout, "dout", options);
  set_dlse(g, problem, dlse);
}

}  // namespace

void plain_forward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const PlainOptions options(arguments);
  const bool with_lse_low = arguments.flag();

  Problem problem = describe_plain(q, k, v, options);
  tilewise_attention& a = problem.attention;
  const Tensor out = new_in_layout(a.seqlen_q, a.heads_q, a.head_dim_v, problem, options);
  const Tensor lse = new_lse(problem, with_lse_low);
  a.out = view_in_layout(out, "out", options);
  set_lse(problem, lse);
  run_forward(problem);
  put(stack, out, lse);
}

void plain_backward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const Tensor dout = arguments.tensor();
  const OptionalTensor dlse = arguments.optional_tensor();
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Tensor out = arguments.tensor(), lse = arguments.tensor();
  const PlainOptions options(arguments);
  const int64_t wanted = arguments.integer();

  Problem problem = describe_plain(q, k, v, options);
  const tilewise_attention& a = problem.attention;
  set_plain_result(problem, out, lse, options);
  tilewise_gradients g{};
  g.struct_size = sizeof(g);
  set_plain_incoming(g, problem, dout, dlse, out, options);

  const auto make = [&](int64_t bit, int64_t rows, int64_t heads, int64_t columns,
                        tilewise_tensor& view, const char* name) {
    if ((wanted & bit) == 0)
      return new_tensor({0}, aoti_torch_dtype_float32(), problem.place);  // results may not alias
    const Tensor tensor = new_in_layout(rows, heads, columns, problem, options);
    view = view_in_layout(tensor, name, options);
    return tensor;
  };
  const Tensor dq = make(want_q, a.seqlen_q, a.heads_q, a.head_dim, g.dq, "dq");
  const Tensor dk = make(want_k, a.seqlen_k, a.heads_kv, a.head_dim, g.dk, "dk");
  const Tensor dv = make(want_v, a.seqlen_k, a.heads_kv, a.head_dim_v, g.dv, "dv");
  run_backward(problem, g);
  put(stack, dq, dk, dv);
}

}  // namespace tilewise::torch_binding
