// The runtime of builds without CUDA: no GPU, and every launch throws. Such builds can still plan
// for a described GPU.
#include "cuda/backend.h"
#include "cuda/runtime.h"

namespace tilewise::cuda {
namespace {

constexpr const char* kWhy = "this library was built without CUDA";

}  // namespace

int32_t gpu_count(std::string* why) {
  if (why != nullptr) *why = kWhy;
  return 0;
}

const Gpu& gpu(int32_t) { throw Error(kWhy); }
std::string gpu_name(int32_t) { throw Error(kWhy); }
int64_t gpu_memory_bytes(int32_t) { throw Error(kWhy); }

void launch(const Request&, const Plan&, void*) { throw Error(kWhy); }
void append_kv(const tilewise_kv_append&) { throw Error(kWhy); }
void read_entries(int32_t*, const int32_t*, int64_t, int32_t, void*) { throw Error(kWhy); }
IndexError last_index_error(int32_t, IndexFault*) { throw Error(kWhy); }

}  // namespace tilewise::cuda
