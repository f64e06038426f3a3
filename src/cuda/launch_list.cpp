#include "cuda/launch_list.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>

namespace tilewise::cuda {
namespace {

const std::string& folder() {
  static const std::string name = [] {
    const char* text = std::getenv("TILEWISE_LAUNCH_LIST");
    return std::string(text != nullptr ? text : "");
  }();
  return name;
}

}  // namespace

bool lists_launches() {
  static const bool wanted = !folder().empty();
  return wanted;
}

void list_launch(const void* function) {
  static std::mutex mutex;
  static std::set<const void*> listed;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!listed.insert(function).second) return;
  // The file is opened for each line, so that killed and forked processes lose nothing.
  std::ofstream file(folder() + "/" + std::to_string(getpid()), std::ios::app);
  file << kernel_symbol(function) << '\n';
}

}  // namespace tilewise::cuda
