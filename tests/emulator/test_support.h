// Support for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "emulator/grid.h"

namespace tilewise::cuda::emulator {

// The message of the Fault that running a kernel raises, or "".
template <class Body>
std::string fault_of(int64_t blocks, int threads, int shared_bytes, Body body) {
  try {
    run_grid(blocks, threads, shared_bytes, body);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

inline void expect_contains(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos)
      << "expected: " << part << "\nmessage: " << message;
}

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

}  // namespace tilewise::cuda::emulator
