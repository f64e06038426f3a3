// The implementations of the operators tilewise::jvp and tilewise::second: the tangents of
// attention and the gradients through them.
#include "attention.h"

namespace tilewise::torch_binding {
namespace {

// q, k, v, out and lse of the forward, in the order of the schemas.
struct State {
  explicit State(Arguments& arguments)
      : q(arguments.tensor()),
        k(arguments.tensor()),
        v(arguments.tensor()),
        out(arguments.tensor()),
        lse(arguments.tensor()) {}
  Tensor q, k, v, out, lse;
};

// The tangents of the inputs, in the order of the schemas; one that is not given is 0.
struct Tangents {
  explicit Tangents(Arguments& arguments)
      : q(arguments.optional_tensor()),
        k(arguments.optional_tensor()),
        v(arguments.optional_tensor()),
        bias(arguments.optional_tensor()),
        sinks(arguments.optional_tensor()),
        scale(arguments.optional_tensor()) {}
  OptionalTensor q, k, v, bias, sinks, scale;
};

Problem describe(const State& state, const Options& options) {
  Problem problem = describe(state.q, state.k, state.v, options);
  expect_out(state.out, "out", problem);
  problem.attention.out = view_of(state.out, "out");
  set_lse(problem, state.lse);
  return problem;
}

// Checks that a tangent is like the tensor that it belongs to; `name` is that of the tangent.
void expect_like(const Tensor& tangent, const char* name, const Tensor& of,
                 const Problem& problem) {
  expect_place(tangent, name, problem.place);
  expect_dtype(tangent, name, dtype_of(of), "the dtype of the tensor that it is a tangent of");
  const auto sizes = of.sizes();
  if (sizes.size() == 4)
    expect_shape(tangent, name, {sizes[0], sizes[1], sizes[2], sizes[3]});
  else
    expect_shape(tangent, name, {sizes[0], sizes[1], sizes[2]});
}

void set_rows(tilewise_tensor& view, const OptionalTensor& tangent, const char* name,
              const Tensor& of, const Problem& problem) {
  if (!tangent) return;
  expect_like(*tangent, name, of, problem);
  view = view_of(*tangent, name);
}

tilewise_tangents describe(const Tangents& given, const State& state, const Options& options,
                           const Problem& problem) {
  tilewise_tangents t{};
  t.struct_size = sizeof(t);
  set_rows(t.q, given.q, "q_tangent", state.q, problem);
  set_rows(t.k, given.k, "k_tangent", state.k, problem);
  set_rows(t.v, given.v, "v_tangent", state.v, problem);
  if (given.bias) {
    if (!options.bias) invalid("bias_tangent is given, but bias is not");
    expect_like(*given.bias, "bias_tangent", *options.bias, problem);
    expect_contiguous_columns(*given.bias, "bias_tangent");
    t.bias = address_of(*given.bias);
    t.bias_stride_batch = stride_of(*given.bias, 0);
    t.bias_stride_head = stride_of(*given.bias, 1);
    t.bias_stride_row = stride_of(*given.bias, 2);
  }
  t.sinks = float_vector(given.sinks, "sinks_tangent", problem.attention.heads_q, problem.place);
  t.scale = float_vector(given.scale, "scale_tangent", 1, problem.place);
  return t;
}

void set_lse_tangent(tilewise_tangents& t, const Problem& problem, const Tensor& lse) {
  const LseView view = lse_view(problem, lse, "lse_tangent");
  t.lse = view.data;
  t.lse_stride_batch = view.stride_batch;
  t.lse_stride_head = view.stride_head;
}

}  // namespace

void jvp(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const State state(arguments);
  const Tangents given(arguments);
  const Options options(arguments);

  Problem problem = describe(state, options);
  tilewise_tangents t = describe(given, state, options, problem);
  const Tensor out = new_out(problem, options);
  const Tensor lse = new_lse(problem, false);
  t.out = view_of(out, "out_tangent");
  set_lse_tangent(t, problem, lse);
  run_jvp(problem, t);
  put(stack, out, lse);
}

void second(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const State state(arguments);
  const Tensor out_tangent = arguments.tensor(), lse_tangent = arguments.tensor();
  const Tangents given(arguments);
  const OptionalTensor dout = arguments.optional_tensor(), dlse = arguments.optional_tensor();
  const Tensor dout_tangent = arguments.tensor();
  const OptionalTensor dlse_tangent = arguments.optional_tensor();
  const Options options(arguments);
  const int64_t wanted = arguments.integer();

  Problem problem = describe(state, options);
  tilewise_tangents t = describe(given, state, options, problem);
  expect_out(out_tangent, "out_tangent", problem);
  t.out = view_of(out_tangent, "out_tangent");
  set_lse_tangent(t, problem, lse_tangent);
  expect_dout(dout_tangent, "dout_tangent", problem);
  t.dout = view_of(dout_tangent, "dout_tangent");
  const LseView dlse_view = lse_view(problem, dlse_tangent, "dlse_tangent");
  t.dlse = dlse_view.data;
  t.dlse_stride_batch = dlse_view.stride_batch;
  t.dlse_stride_head = dlse_view.stride_head;

  tilewise_gradients g{};
  g.struct_size = sizeof(g);
  if (dout) {
    expect_dout(*dout, "dout", problem);
    g.dout = view_of(*dout, "dout");
  }
  set_dlse(g, problem, dlse);
  const GradientTensors made = new_gradients(g, problem, options, state.k, state.v, wanted);
  run_second(problem, t, g);
  put(stack, made.dq, made.dk, made.dv, made.dbias, made.dsinks, made.dscale);
}

}  // namespace tilewise::torch_binding
