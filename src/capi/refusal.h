// How a call is rejected: a check throws an exception with an error message, and the entry point
// turns it into a status and the last error.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "base/thread_state.h"
#include "tilewise/tilewise.h"

namespace tilewise::capi {

struct Refusal {
  tilewise_status status;
  std::string sentence;
};

template <class... Parts>
[[noreturn]] void refuse(tilewise_status status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Refusal{status, text.str()};
}

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) refuse(TILEWISE_INVALID_ARGUMENT, parts...);
}

// The message of the calling thread. It is truncated to fit, never allocated.
void set_last_error(const char* sentence) noexcept;
const char* last_error() noexcept;

// The status for the exception in flight; its message becomes the last error.
tilewise_status status_of_exception() noexcept;

// Runs the body of an entry point. No exception leaves it, and no floating-point setting of the
// calling thread affects it.
template <class Body>
tilewise_status guarded(const Body& body) noexcept {
  const NoCancellation no_cancellation;
  const DefaultFloatState float_state;
  try {
    body();
    set_last_error("");
    return TILEWISE_OK;
  } catch (...) {
    return status_of_exception();
  }
}

}  // namespace tilewise::capi
