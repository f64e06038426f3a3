// What a call asks for: a pass over a problem, with the tensors that only this pass has.
#pragma once

#include "attention/dtypes.h"
#include "attention/problem.h"

namespace tilewise {

enum class Pass : int32_t { forward = TILEWISE_PASS_FORWARD, backward = TILEWISE_PASS_BACKWARD };

constexpr const char* pass_name(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

inline constexpr Gradients kNoGradients{};

// A view of validated structs, which must outlive it. A problem alone is a request for its forward.
struct Request {
  const Problem& problem;
  Pass pass;
  const Gradients& gradients;  // of Pass::backward; otherwise none are wanted
  const Dtypes dtypes;

  Request(const Problem& p) : Request(p, Pass::forward, kNoGradients) {}
  Request(const Problem& p, const Gradients& g) : Request(p, Pass::backward, g) {}
  Request(const Problem& p, Pass a_pass, const Gradients& g)
      : problem(p), pass(a_pass), gradients(g), dtypes(dtypes_of(p)) {}

  bool is(Pass which) const { return pass == which; }
};

}  // namespace tilewise
