// What is said of a call before it runs.
#pragma once

#include "tilewise/tilewise.h"

namespace fuzz {

// Ends the process with a finding.
void expect(bool condition, const char* what);
// A status comes with a sentence, and is one that an input may cause.
void check_message(tilewise_status status);

// Whether the call, of the backward when `g` is given, is refused with a sentence or has a sane
// plan: on this CPU, which `info` tells of, and on any GPU.
tilewise_status plan(const tilewise_attention& a, const tilewise_gradients* g,
                     tilewise_plan_info* info);

}  // namespace fuzz
