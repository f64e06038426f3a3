#include "emulator/call_stack.h"

#include <dlfcn.h>
#include <unwind.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string_view>

namespace tilewise::cuda::emulator {
namespace {

constexpr size_t kMaxFrames = 64;

_Unwind_Reason_Code visit(_Unwind_Context* context, void* stack) {
  auto& frames = *static_cast<std::vector<uintptr_t>*>(stack);
  const uintptr_t address = _Unwind_GetIP(context);
  if (address == 0 || frames.size() == kMaxFrames) return _URC_END_OF_STACK;
  frames.push_back(address);
  return _URC_NO_REASON;
}

struct Pipe {
  void operator()(FILE* pipe) const { pclose(pipe); }
};

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, Pipe> pipe(popen(command.c_str(), "r"));
  std::string output;
  std::array<char, 1024> buffer;
  while (pipe != nullptr && std::fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr) {
    output += buffer.data();
  }
  return output;
}

// Quotes a string for the shell.
std::string quoted(std::string_view name) {
  std::string result = "'";
  for (const char c : name) {
    if (c == '\'')
      result += "'\\''";
    else
      result += c;
  }
  return result + "'";
}

bool starts_with(std::string_view line, std::string_view start) {
  return line.substr(0, start.size()) == start;
}

// "function at file:line", outermost last, without the emulator's frames around and below the
// kernel.
std::string kernel_lines(const std::string& output) {
  std::string result;
  for (size_t begin = 0; begin < output.size();) {
    const size_t end = output.find('\n', begin);
    std::string_view line = std::string_view(output).substr(begin, end - begin);
    begin = end == std::string::npos ? output.size() : end + 1;
    constexpr std::string_view kInlined = " (inlined by) ";
    if (starts_with(line, kInlined)) line.remove_prefix(kInlined.size());
    if (line.find("emulator::Block::enter") != std::string_view::npos) break;
    if (line.find("/tests/emulator/") != std::string_view::npos &&
        line.find("_test.cpp") == std::string_view::npos) {
      continue;
    }
    const size_t place = line.rfind(" at ??:");
    if (place != std::string_view::npos) line = line.substr(0, place);
    constexpr std::string_view kNamespace = "tilewise::cuda::emulator::";
    const bool of_emulator = starts_with(line, kNamespace) &&
                             line[kNamespace.size()] != '(';  // tests: an unnamed namespace
    if (of_emulator || starts_with(line, "??") || starts_with(line, "__tsan")) continue;
    result.append("\n  at ").append(line);
  }
  return result;
}

}  // namespace

std::vector<uintptr_t> call_stack() {
  std::vector<uintptr_t> frames;
  frames.reserve(kMaxFrames);
  _Unwind_Backtrace(visit, &frames);
  return frames;
}

std::string describe(const std::vector<uintptr_t>& stack) {
  std::string module;
  std::string addresses;
  for (const uintptr_t address : stack) {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(address - 1), &info) == 0 || info.dli_fname == nullptr) {
      continue;
    }
    if (module.empty()) module = info.dli_fname;  // kernels and emulator are linked together
    if (module != info.dli_fname) continue;
    // The call instruction precedes its return address.
    std::array<char, 32> hexadecimal;
    std::snprintf(hexadecimal.data(), hexadecimal.size(), " %zx",
                  static_cast<size_t>(address - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase)));
    addresses += hexadecimal.data();
  }
  if (addresses.empty()) return "";
  return kernel_lines(output_of("addr2line -Cfipe " + quoted(module) + addresses + " 2>/dev/null"));
}

}  // namespace tilewise::cuda::emulator
