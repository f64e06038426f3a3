// Checks of a call before it runs.
#pragma once

#include "tilewise/tilewise.h"

namespace fuzz {

// Unless `condition` holds, prints `what` with the library's last error and aborts.
void expect(bool condition, const char* what);
// Checks that exactly a failure comes with an error message, and that an input may cause the
// status.
void check_message(tilewise_status status);

// Plans the call on this CPU, which `info` receives, and on described GPUs. Aborts unless the call
// is rejected with an error message or every plan is consistent. It is a backward if `g` is given.
tilewise_status plan(const tilewise_attention& a, const tilewise_gradients* g,
                     tilewise_plan_info* info);

}  // namespace fuzz
