// What a call asks for: a pass over a problem, with the tensors that only this pass has.
#pragma once

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
  Pass pass = Pass::forward;
  const Gradients& gradients = kNoGradients;  // of Pass::backward; otherwise none are wanted

  Request(const Problem& p) : problem(p) {}
  Request(const Problem& p, const Gradients& g) : Request(p, Pass::backward, g) {}
  Request(const Problem& p, Pass a_pass, const Gradients& g)
      : problem(p), pass(a_pass), gradients(g) {}

  bool is(Pass which) const { return pass == which; }
};

}  // namespace tilewise
