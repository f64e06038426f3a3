#include "emulator/clocks.h"

#include <algorithm>

namespace tilewise::cuda::emulator {
namespace {

constexpr int kWarpLanes = 32;

void take_later(uint32_t* to, const uint32_t* from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

void Clocks::start(int threads, uint32_t now) {
  active_ = false;
  threads_ = threads;
  start_time_ = now;
  fences_.resize(std::max(fences_.size(), static_cast<size_t>(threads)));
  for (std::vector<uint32_t>& times : fences_) times.clear();
}

void Clocks::activate() {
  if (active_) return;
  active_ = true;
  known_.assign(static_cast<size_t>(threads_) * static_cast<size_t>(width()), 0);
}

void Clocks::release(int thread, uint32_t now, uint32_t warp_barrier, Clock& to) const {
  take_later(to.data(), of(thread), to.size());
  const auto first = static_cast<size_t>(thread / kWarpLanes * kWarpLanes);
  for (size_t i = first; i < first + kWarpLanes; ++i) to[i] = std::max(to[i], warp_barrier);
  to[static_cast<size_t>(thread)] = now;
}

void Clocks::acquire(int thread, const Clock& from) {
  take_later(of(thread), from.data(), from.size());
}

void Clocks::note(Clock& clock, int actor, uint32_t now) const {
  clock[static_cast<size_t>(column(actor))] = now;
}

void Clocks::join(int begin, int end) {
  if (!active_) return;
  const auto count = static_cast<size_t>(width());
  uint32_t* all = of(begin);
  for (int i = begin + 1; i < end; ++i) take_later(all, of(i), count);
  for (int i = begin + 1; i < end; ++i) std::copy_n(all, count, of(i));
}

bool Clocks::knows_any_lane(int thread, int warp, uint32_t time) const {
  if (!active_) return false;
  const uint32_t* lanes = of(thread) + static_cast<size_t>(warp) * kWarpLanes;
  return time < *std::max_element(lanes, lanes + kWarpLanes);
}

uint32_t Clocks::fence_after(int thread, uint32_t time) const {
  const std::vector<uint32_t>& times = fences_[static_cast<size_t>(thread)];
  const auto fence = std::upper_bound(times.begin(), times.end(), time);
  return fence == times.end() ? 0 : *fence;
}

}  // namespace tilewise::cuda::emulator
