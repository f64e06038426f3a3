// What a call asks for: a pass over a problem, with the tensors that only this pass has.
#pragma once

#include "attention/dtypes.h"
#include "attention/problem.h"

namespace tilewise {

enum class Pass : int32_t {
  forward = TILEWISE_PASS_FORWARD,
  backward = TILEWISE_PASS_BACKWARD,
  jvp = TILEWISE_PASS_JVP,
  second = TILEWISE_PASS_SECOND
};

constexpr const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::backward:
      return "backward";
    case Pass::jvp:
      return "jvp";
    case Pass::second:
      return "second";
  }
  return "";
}

inline constexpr Gradients kNoGradients{};
inline constexpr Tangents kNoTangents{};

// A view of validated structs, which must outlive it. A problem alone is a request for its forward.
struct Request {
  const Problem& problem;
  Pass pass;
  const Gradients& gradients;  // of Pass::backward and Pass::second; otherwise none are wanted
  const Tangents& tangents;    // of Pass::jvp and Pass::second; otherwise all are 0
  const Dtypes dtypes;

  Request(const Problem& p) : Request(p, Pass::forward, kNoGradients) {}
  Request(const Problem& p, const Gradients& g) : Request(p, Pass::backward, g) {}
  Request(const Problem& p, Pass a_pass, const Gradients& g, const Tangents& t = kNoTangents)
      : problem(p), pass(a_pass), gradients(g), tangents(t), dtypes(dtypes_of(p)) {}

  bool is(Pass which) const { return pass == which; }
};

}  // namespace tilewise
