// Checks of a call before it runs.
#pragma once

#include "tilewise/tilewise.h"

namespace fuzz {

// Reports a finding and ends the process.
void expect(bool condition, const char* what);
// Checks that a status comes with a sentence and is one that an input may cause.
void check_message(tilewise_status status);

// Whether the call is refused with a sentence; otherwise it must have a sane plan on this CPU,
// given by `info`, and on any GPU. The call is a backward if `g` is given.
tilewise_status plan(const tilewise_attention& a, const tilewise_gradients* g,
                     tilewise_plan_info* info);

}  // namespace fuzz
