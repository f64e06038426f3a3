#include "emulator/barriers.h"

#include <algorithm>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kMaxArrivals = (1 << 20) - 1;
constexpr int64_t kMaxBytes = (1 << 20) - 1;

uint32_t offset_of(uint32_t address) { return address - SharedMemory::kFirstAddress; }

// Gives `to` everything that this thread has done until now, and everything that it knows of.
void release(Clock& to) {
  Block& b = block();
  const uint32_t now = b.tick();
  b.clocks().release(b.thread(), now, b.moment().warp_barrier, to);
}

}  // namespace

// --- mbarriers -----------------------------------------------------------------------------------

void MemoryBarriers::start(SharedMemory& shared, int rank) {
  shared_ = &shared;
  rank_ = rank;
  barriers_.clear();
}

MemoryBarriers::Barrier& MemoryBarriers::find(uint32_t address, const char* what) {
  Block& current = block();
  for (Barrier& b : barriers_) {
    if (b.address != address) continue;
    if (!ordered(current.moment_at(rank_), b.initialiser, b.initialised)) {
      fault(
          text("race: %s of the mbarrier at byte %u of shared memory, which thread %d "
               "initialised with no sync_block between",
               what, offset_of(address), b.initialiser));
    }
    return b;
  }
  fault(text("%s at byte %d of shared memory, where no mbarrier was initialised", what,
             static_cast<int>(offset_of(address))));
}

void MemoryBarriers::init(uint32_t address, int arrivals) {
  Block& current = block();
  current.clocks().activate();
  if (arrivals < 1 || arrivals > kMaxArrivals) {
    fault(text("mbarrier_init with %d arrivals: it must be 1 to %d", arrivals, kMaxArrivals));
  }
  for (const Barrier& b : barriers_) {
    if (b.address == address) {
      fault(text("mbarrier_init at byte %u of shared memory, where an mbarrier is in use",
                 offset_of(address)));
    }
  }
  shared_->claim_barrier(address, current.moment_at(rank_));
  Barrier b;
  b.address = address;
  b.arrivals = b.pending = arrivals;
  b.initialiser = current.thread();
  b.initialised = current.moment_at(rank_).now;
  b.arriving = b.complete = current.clocks().nothing();
  barriers_.push_back(std::move(b));
}

void MemoryBarriers::check_bytes(const Barrier& b) const {
  if (b.bytes > kMaxBytes || b.bytes < -kMaxBytes) {
    fault(text("%s: more bytes are expected than an mbarrier can count",
               describe(index_of(b)).c_str()));
  }
  if (b.pending == 0 && b.in_flight > b.bytes) {
    fault(text("%s: copies deliver %lld bytes more than were expected",
               describe(index_of(b)).c_str(), static_cast<long long>(b.in_flight - b.bytes)));
  }
}

void MemoryBarriers::check_arrival(const Barrier& b, const char* what) const {
  if (b.pending == 0) {
    fault(text("%s beyond the %d arrivals of a phase; %s", what, b.arrivals,
               describe(index_of(b)).c_str()));
  }
}

void MemoryBarriers::arrive(uint32_t address, int64_t bytes) {
  Barrier& b = find(address, "mbarrier_arrive");
  if (bytes < 0)
    fault(text("mbarrier_arrive_expect_tx of %lld bytes", static_cast<long long>(bytes)));
  check_arrival(b, "mbarrier_arrive");
  release(b.arriving);
  --b.pending;
  b.bytes += bytes;
  check_bytes(b);
  end_phase(b);
}

MemoryBarriers::Barrier& MemoryBarriers::find_for_engine(uint32_t address, const char* what) {
  Block& current = block();
  Barrier& b = find(address, what);
  const uint32_t fence = current.clocks().fence_after(b.initialiser, b.initialised);
  if (fence == 0 || !ordered(current.moment_at(rank_), b.initialiser, fence)) {
    fault(
        text("%s: %s signals it with no fence_mbarrier_init by thread %d, which initialised it, "
             "and no sync_block after that",
             describe(index_of(b)).c_str(), what, b.initialiser));
  }
  return b;
}

void MemoryBarriers::start_write(uint32_t address, AsyncWrite write) {
  add_write(find_for_engine(address, "an asynchronous copy"), std::move(write));
}

int MemoryBarriers::start_commit(uint32_t address) {
  return index_of(find_for_engine(address, "tcgen05.commit"));
}

void MemoryBarriers::finish_commit(int barrier, const Clock& known) {
  Barrier& b = barriers_[static_cast<size_t>(barrier)];
  check_arrival(b, "tcgen05.commit");
  for (size_t i = 0; i < known.size(); ++i) b.arriving[i] = std::max(b.arriving[i], known[i]);
  --b.pending;
  check_bytes(b);
  end_phase(b);
}

void MemoryBarriers::arrive_after(uint32_t address, std::vector<AsyncWrite> writes) {
  int64_t bytes = 0;
  for (const AsyncWrite& write : writes) bytes += write.bytes;
  arrive(address, bytes);
  for (AsyncWrite& write : writes) add_write(find(address, "cp.async"), std::move(write));
}

void MemoryBarriers::add_write(Barrier& b, AsyncWrite write) {
  Block& current = block();
  b.in_flight += write.bytes;
  check_bytes(b);
  if (b.writes.empty()) b.first_write = current.tick();
  b.writes.push_back(std::move(write));
  if (!current.options().early_copies) return;
  AsyncWrite& started = b.writes.back();
  started.land();
  started.land = nullptr;
  b.in_flight -= started.bytes;
  b.bytes -= started.bytes;
  end_phase(b);
}

void MemoryBarriers::end_phase(Barrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  Block& current = block();
  const int index = index_of(b);
  for (const AsyncWrite& write : b.writes) {
    shared_->finish_async_write(write.to, write.bytes, Clocks::copier(rank_, index),
                                current.moment_at(rank_).now);
  }
  b.writes.clear();
  current.clocks().note(b.arriving, Clocks::copier(rank_, index), current.tick());
  b.complete = b.arriving;
  ++b.phase;
  b.pending = b.arrivals;
  for (const int thread : b.waiting) current.wake(thread);
  b.waiting.clear();
}

void MemoryBarriers::wait(uint32_t address, int parity) {
  Block& current = block();
  if (parity != 0 && parity != 1) fault(text("mbarrier_wait_parity of parity %d", parity));
  const int index = index_of(find(address, "mbarrier_wait_parity"));
  const uint32_t first = barriers_[static_cast<size_t>(index)].phase;
  if (static_cast<int>(first & 1) == parity) {
    barriers_[static_cast<size_t>(index)].waiting.push_back(current.thread());
    current.wait({Wait::mbarrier, index, parity});
    const uint32_t last = barriers_[static_cast<size_t>(index)].phase;
    if (last != first + 1) {
      fault(
          text("%s: %u phases ended while the thread waited for one; a wait may see the parity "
               "of the last and wait forever",
               describe(index).c_str(), last - first));
    }
  }
  current.clocks().acquire(current.thread(), barriers_[static_cast<size_t>(index)].complete);
}

void MemoryBarriers::land(Barrier& b) {
  for (AsyncWrite& write : b.writes) {
    write.land();
    write.land = nullptr;
    b.in_flight -= write.bytes;
    b.bytes -= write.bytes;
  }
  end_phase(b);
}

bool MemoryBarriers::land() {
  Barrier* oldest = nullptr;
  for (Barrier& b : barriers_) {
    if (b.waiting.empty() || b.pending != 0 || b.in_flight == 0 || b.in_flight != b.bytes) continue;
    if (oldest == nullptr || b.first_write < oldest->first_write) oldest = &b;
  }
  if (oldest == nullptr) return false;
  land(*oldest);
  return true;
}

std::string MemoryBarriers::unfinished() const {
  for (const Barrier& b : barriers_) {
    if (!b.writes.empty()) {
      return text("the block ended while a copy to byte %u of shared memory was in flight; ",
                  offset_of(b.writes.front().to)) +
             describe(index_of(b));
    }
  }
  return "";
}

std::string MemoryBarriers::describe(int barrier) const {
  const Barrier& b = barriers_[static_cast<size_t>(barrier)];
  std::string line = text("mbarrier at byte %u (phase %u, %d of %d arrivals", offset_of(b.address),
                          b.phase, b.arrivals - b.pending, b.arrivals);
  if (b.bytes != 0 || b.in_flight != 0) {
    line += text(", %lld bytes to come, %lld in flight", static_cast<long long>(b.bytes),
                 static_cast<long long>(b.in_flight));
  }
  return line + ")";
}

// --- named barriers ------------------------------------------------------------------------------

bool NamedBarriers::arrive(int barrier, int threads, bool wait, bool x) {
  Block& current = block();
  current.clocks().activate();
  const char* what = wait ? "bar_sync" : "bar_arrive";
  if (barrier < 1 || barrier >= kCount)
    fault(text("%s of barrier %d: it must be 1 to 15", what, barrier));
  if (threads < kLanes || threads % kLanes != 0 || threads > current.launch().threads) {
    fault(
        text("%s of barrier %d with %d threads: it must be whole warps, at most the %d threads of "
             "the block",
             what, barrier, threads, current.launch().threads));
  }
  Barrier& b = barriers_[static_cast<size_t>(barrier)];
  if (b.arrived == 0) {
    b.threads = threads;
    b.any = false;
    b.known = current.clocks().nothing();
  } else if (b.threads != threads) {
    fault(text("%s of barrier %d with %d threads, but others use it with %d", what, barrier,
               threads, b.threads));
  }
  release(b.known);
  b.any = b.any || x;
  if (++b.arrived < b.threads) {
    if (!wait) return false;
    b.waiting.push_back(current.thread());
    current.wait({Wait::named_barrier, barrier, 0});
    return b.result;
  }
  b.result = b.any;
  for (const int thread : b.waiting) {
    current.clocks().acquire(thread, b.known);
    current.wake(thread);
  }
  if (wait) current.clocks().acquire(current.thread(), b.known);
  b.waiting.clear();
  b.arrived = 0;
  return b.result;
}

std::string NamedBarriers::describe(int barrier) const {
  const Barrier& b = barriers_[static_cast<size_t>(barrier)];
  return text("bar_sync of barrier %d (%d of %d threads)", barrier, b.arrived, b.threads);
}

// --- registers -----------------------------------------------------------------------------------

void Registers::start(int threads) {
  constexpr int kStep = 8;
  constexpr int kMaxPerThread = 255;
  const int count = std::min(kPerSm / threads, kMaxPerThread) / kStep * kStep;
  per_warp_.assign(static_cast<size_t>(threads / kLanes), count);
  waiting_.clear();
  free_ = 0;
}

void Registers::check(int count, const char* what) const {
  constexpr int kMinCount = 24;
  constexpr int kMaxCount = 256;
  if (count < kMinCount || count > kMaxCount || count % 8 != 0) {
    fault(text("%s to %d registers: it must be 24 to 256 in steps of 8", what, count));
  }
}

bool Registers::take(int warp, int count) {
  int& own = per_warp_[static_cast<size_t>(warp)];
  if (own == count) return true;
  if (count - own > free_) return false;
  free_ -= count - own;
  own = count;
  return true;
}

void Registers::increase(int count) {
  Block& current = block();
  check(count, "setmaxnreg_inc");
  const int warp = current.warp_of_block();
  if (per_warp_[static_cast<size_t>(warp)] > count) {
    fault(text("setmaxnreg_inc to %d registers: the warp already has %d", count,
               per_warp_[static_cast<size_t>(warp)]));
  }
  struct None {
  } call;
  current.meet(Collective::setmaxnreg_inc, call, [](std::array<None*, kLanes>&) {});
  while (!take(warp, count)) {
    waiting_.push_back(current.thread());
    current.wait({Wait::registers, count, 0});
  }
}

void Registers::decrease(int count) {
  Block& current = block();
  check(count, "setmaxnreg_dec");
  struct None {
  } call;
  current.meet(Collective::setmaxnreg_dec, call, [&](std::array<None*, kLanes>&) {
    int& own = per_warp_[static_cast<size_t>(current.warp_of_block())];
    if (own < count)
      fault(text("setmaxnreg_dec to %d registers: the warp has only %d", count, own));
    free_ += own - count;
    own = count;
    for (const int thread : waiting_) current.wake(thread);
    waiting_.clear();
  });
}

std::string Registers::disagreement() const {
  constexpr size_t kWarps = 4;
  for (size_t first = 0; first < per_warp_.size(); first += kWarps) {
    for (size_t i = first + 1; i < std::min(first + kWarps, per_warp_.size()); ++i) {
      if (per_warp_[i] == per_warp_[first]) continue;
      return text("setmaxnreg left warp %d with %d registers and warp %d of its warpgroup with %d",
                  static_cast<int>(first), per_warp_[first], static_cast<int>(i), per_warp_[i]);
    }
  }
  return "";
}

std::string Registers::describe(int wanted) const {
  return text("setmaxnreg_inc to %d (%d per lane are free)", wanted, free_);
}

// --- the instructions ----------------------------------------------------------------------------

void mbarrier_init(uint32_t barrier, int arrivals) { block().barriers().init(barrier, arrivals); }
void mbarrier_arrive(uint32_t barrier) { block().barriers().arrive(barrier, 0); }
void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  block().barriers().arrive(barrier, bytes);
}
void mbarrier_wait_parity(uint32_t barrier, int parity) {
  block().barriers().wait(barrier, parity);
}
void fence_mbarrier_init() { fence_proxy_async(); }
void fence_proxy_async() {
  Block& b = block();
  b.clocks().fence(b.thread(), b.tick());
}
void bar_sync(int barrier, int threads) { block().named_barriers().arrive(barrier, threads, true); }
void bar_arrive(int barrier, int threads) {
  block().named_barriers().arrive(barrier, threads, false);
}
bool bar_any(int barrier, int threads, bool x) {
  return block().named_barriers().arrive(barrier, threads, true, x);
}
void setmaxnreg_inc(int registers) { block().registers().increase(registers); }
void setmaxnreg_dec(int registers) { block().registers().decrease(registers); }

}  // namespace tilewise::cuda::emulator
