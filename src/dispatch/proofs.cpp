#include "dispatch/proofs.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <vector>

namespace tilewise::dispatch {
namespace {

struct Record {
  ProvedOn where;
  cuda::Proof proof;
};

struct State {
  std::mutex mutex;
  std::vector<Record> records;
  // Per GPU, selected from the records when a plan first asks. Lists that records have replaced are
  // kept, because other threads may still be planning with them.
  std::map<int32_t, std::span<const cuda::Proof>> of_gpu;
  std::list<std::vector<cuda::Proof>> lists;
};

State& state() {
  static State all;
  return all;
}

// Nearly always false; plans then do not take the lock.
std::atomic<bool> any_record{false};

bool holds(const ProvedOn& where, int32_t index) {
  return where.sm == cuda::gpu(index).sm && where.driver == cuda::cuda_versions().driver &&
         where.gpu_name == cuda::gpu_name(index);
}

}  // namespace

void set_proof(const ProvedOn& where, const cuda::Proof& proof) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.records, [&](const Record& record) {
    return record.proof.family == proof.family && record.where.sm == where.sm &&
           record.where.gpu_name == where.gpu_name;
  });
  if (!proof.head_dims.empty()) all.records.push_back({where, proof});
  all.of_gpu.clear();
  any_record = !all.records.empty();
}

std::span<const cuda::Proof> proofs_of(int32_t index) {
  if (!any_record) return {};
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto known = all.of_gpu.find(index);
  if (known != all.of_gpu.end()) return known->second;
  std::vector<cuda::Proof> found;
  for (const Record& record : all.records) {
    if (holds(record.where, index)) found.push_back(record.proof);
  }
  all.lists.push_back(std::move(found));
  return all.of_gpu[index] = all.lists.back();
}

}  // namespace tilewise::dispatch
