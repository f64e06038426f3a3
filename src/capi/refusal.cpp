#include "capi/refusal.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

namespace tilewise::capi {
namespace {

thread_local char message[512];

}  // namespace

void set_last_error(const char* sentence) noexcept {
  const std::size_t length = std::min(std::strlen(sentence), sizeof(message) - 1);
  std::memcpy(message, sentence, length);
  message[length] = '\0';
}

const char* last_error() noexcept { return message; }

tilewise_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Refusal& refusal) {
    set_last_error(refusal.sentence.c_str());
    return refusal.status;
  } catch (const std::bad_alloc&) {
    set_last_error("the host is out of memory");
  } catch (const std::exception& error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("an unknown exception was caught");
  }
  return TILEWISE_INTERNAL;
}

}  // namespace tilewise::capi
