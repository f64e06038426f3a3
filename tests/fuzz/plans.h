// Checks of a call before it runs.
#pragma once

#include "tilewise/tilewise.h"

namespace fuzz {

// Unless `condition` holds, prints `what` with the library's last error and aborts.
void expect(bool condition, const char* what);
// Checks that there is an error message if and only if the call failed, and that the status is one
// that an input may cause.
void check_message(tilewise_status status);

// Plans the call, a backward if `g` is given, for this CPU and for described GPUs; `info` receives
// the plan for the CPU. Aborts unless the call is rejected with an error message or every plan is
// consistent.
tilewise_status plan(const tilewise_attention& a, const tilewise_gradients* g,
                     tilewise_plan_info* info);

}  // namespace fuzz
