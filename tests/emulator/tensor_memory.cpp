#include "emulator/tensor_memory.h"

#include <algorithm>
#include <bit>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr uint32_t kPoisonWord = uint32_t{SharedMemory::kPoison} << 16 | SharedMemory::kPoison;
constexpr int kMinAllocation = 32;

int column_of(uint32_t address) { return static_cast<int>(address & 0xffff); }
int lane_of(uint32_t address) { return static_cast<int>(address >> 16); }

}  // namespace

void TensorMemory::start(int rank) {
  rank_ = rank;
  allocations_.clear();
  relinquished_ = false;
  fences_before_.resize(kMaxThreads);
  known_at_fence_after_.resize(kMaxThreads);
  for (auto& loads : loads_) loads.clear();
  for (auto& stores : stores_) stores.clear();
  for (auto& times : fences_before_) times.clear();
  for (Clock& known : known_at_fence_after_) known.clear();
}

// --- allocation ----------------------------------------------------------------------------------

uint32_t TensorMemory::alloc(int columns) {
  Block& b = block();
  b.clocks().activate();
  const int warp = b.warp_of_block();
  if (columns < kMinAllocation || columns > kColumns ||
      !std::has_single_bit(static_cast<unsigned>(columns))) {
    fault(text("tcgen05_alloc of %d columns: it must be 32, 64, 128, 256 or 512", columns));
  }
  if (relinquished_) fault("tcgen05_alloc after tcgen05_relinquish_alloc_permit");
  int begin = 0;
  for (const Allocation& a : allocations_) {
    if (a.warp != warp) {
      fault(text("tcgen05_alloc by warp %d, but warp %d has allocated before", warp, a.warp));
    }
    begin = std::max(begin, a.begin + a.columns);
  }
  if (begin + columns > kColumns) {
    fault(text("tcgen05_alloc of %d columns waits forever: %d of %d are allocated", columns, begin,
               kColumns));
  }
  if (allocations_.empty()) {
    memory_.assign(static_cast<size_t>(kLanes) * kColumns, kPoisonWord);
    cells_.assign(static_cast<size_t>(kQuarters) * kColumns, {});
  }
  allocations_.push_back({begin, columns, warp});
  return static_cast<uint32_t>(begin);
}

void TensorMemory::dealloc(uint32_t address, int columns) {
  const auto found =
      std::find_if(allocations_.begin(), allocations_.end(), [&](const Allocation& a) {
        return static_cast<uint32_t>(a.begin) == address && a.columns == columns;
      });
  if (found == allocations_.end()) {
    fault(text("tcgen05_dealloc of %d columns at address %08x, which were not allocated together",
               columns, address));
  }
  const Access access = by_warp("tcgen05_dealloc", true);
  if (found->warp != access.warp) {
    fault(text("tcgen05_dealloc by warp %d of columns that warp %d has allocated", access.warp,
               found->warp));
  }
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    for (int column = found->begin; column < found->begin + columns; ++column) {
      check_access(cell(quarter, column), access, quarter, column);
      check_products(cell(quarter, column), access, quarter, column);
    }
  }
  allocations_.erase(found);
}

int TensorMemory::checked_columns(uint32_t address, int n, const char* what) const {
  const int begin = column_of(address);
  for (const Allocation& a : allocations_) {
    if (begin >= a.begin && begin + n <= a.begin + a.columns) return begin;
  }
  fault(text("%s of columns %d to %d of tensor memory, which are not allocated", what, begin,
             begin + n - 1));
}

int TensorMemory::own_quarter(uint32_t address, const char* what) const {
  const int warp = block().warp_of_block();
  const int quarter = warp % kQuarters;
  const int first = quarter * kWarpLanes;
  if (lane_of(address) != first) {
    fault(text("%s at lane %d of tensor memory by warp %d, which can access lanes %d to %d", what,
               lane_of(address), warp, first, first + kWarpLanes - 1));
  }
  return quarter;
}

std::string TensorMemory::unfinished() const {
  if (allocations_.empty()) return "";
  return text("the block ended with %d columns of tensor memory allocated",
              allocations_.front().columns);
}

// --- order ---------------------------------------------------------------------------------------

int TensorMemory::first_thread(int warp) const {
  return rank_ * block().launch().threads + warp * kWarpLanes;
}

TensorMemory::Access TensorMemory::by_warp(const char* what, bool writes) const {
  const int warp = block().warp_of_block();
  return {what, first_thread(warp), kWarpLanes, writes, warp};
}

void TensorMemory::fence_before() {
  Block& b = block();
  fences_before_[static_cast<size_t>(b.thread())].push_back(b.tick());
}

void TensorMemory::fence_after() {
  Block& b = block();
  b.clocks().activate();
  Clock& known = known_at_fence_after_[static_cast<size_t>(b.thread())];
  known = b.clocks().nothing();
  const Moment moment = b.moment();
  std::fill_n(known.begin() + first_thread(0), b.launch().threads, moment.block_barrier);
  b.clocks().release(b.thread(), b.tick(), moment.warp_barrier, known);
}

// Whether `thread` knows, with both fences between, that what `actor` did at `time` is done. The
// lanes of a warp act together, so the fence of one of them is enough.
bool TensorMemory::knows(int thread, int actor, uint32_t time) const {
  const Clock& known = known_at_fence_after_[static_cast<size_t>(thread)];
  if (known.empty()) return false;
  const Clocks& clocks = block().clocks();
  if (actor == kTensorCore) return clocks.includes(known, Clocks::tensor_core(rank_), time);
  const int first = first_thread(actor);
  for (int lane = first; lane < first + kWarpLanes; ++lane) {
    const std::vector<uint32_t>& fences = fences_before_[static_cast<size_t>(lane)];
    const auto fence = std::upper_bound(fences.begin(), fences.end(), time);
    if (fence != fences.end() && clocks.includes(known, lane, *fence)) return true;
  }
  return false;
}

// The instruction that would have ordered what `actor` did at `time` before an access by `thread`.
std::string TensorMemory::missing(int thread, int actor, uint32_t time) const {
  Moment moment = block().moment();
  moment.thread = thread;
  if (actor == kTensorCore) {
    return ordered(moment, Clocks::tensor_core(rank_), time)
               ? "tcgen05_fence_after behind the wait for its mbarrier"
               : "wait for the mbarrier of its tcgen05_commit";
  }
  const int first = first_thread(actor);
  bool fenced = false;
  for (int lane = first; lane < first + kWarpLanes; ++lane) {
    const std::vector<uint32_t>& fences = fences_before_[static_cast<size_t>(lane)];
    const auto fence = std::upper_bound(fences.begin(), fences.end(), time);
    if (fence == fences.end()) continue;
    fenced = true;
    if (ordered(moment, lane, *fence)) return "tcgen05_fence_after behind the barrier";
  }
  return fenced ? "barrier" : "tcgen05_fence_before by that warp";
}

void TensorMemory::check_known(const Access& access, int actor, uint32_t time, int quarter,
                               int column, const char* did) const {
  for (int i = 0; i < access.threads; ++i) {
    const int thread = access.first_thread + i;
    if (knows(thread, actor, time)) continue;
    const int lane = quarter * kWarpLanes;
    const std::string who = actor == kTensorCore ? "a tcgen05.mma" : text("warp %d", actor);
    fault(
        text("race: %s of column %d, lanes %d to %d, of tensor memory, which %s %s with no %s "
             "between",
             access.what, column, lane, lane + kWarpLanes - 1, who.c_str(), did,
             missing(thread, actor, time).c_str()));
  }
}

// Checks an access against the loads and stores of warps.
void TensorMemory::check_access(const Cell& c, const Access& access, int quarter,
                                int column) const {
  if (c.storing != kNone) {
    fault(
        text("race: %s of column %d of tensor memory, to which warp %d stores with no "
             "tcgen05_wait_st",
             access.what, column, c.storing));
  }
  if (c.loading != 0 && access.writes) {
    fault(
        text("race: %s of column %d of tensor memory, from which a warp loads with no "
             "tcgen05_wait_ld",
             access.what, column));
  }
  if (c.writer >= 0 && c.writer != access.warp) {
    check_known(access, c.writer, c.write_time, quarter, column, "wrote");
  }
  if (!access.writes) return;
  for (size_t i = 0; i < c.read_times.size(); ++i) {
    const int reader = static_cast<int>(i) * kQuarters + quarter;
    if (c.read_times[i] == 0 || reader == access.warp) continue;
    check_known(access, reader, c.read_times[i], quarter, column, "read");
  }
}

// Checks an access of a warp against the products that were issued before.
void TensorMemory::check_products(const Cell& c, const Access& access, int quarter,
                                  int column) const {
  if (c.writer == kTensorCore) {
    check_known(access, kTensorCore, c.write_time, quarter, column, "writes");
  }
  if (access.writes && c.operand_time != 0) {
    check_known(access, kTensorCore, c.operand_time, quarter, column, "reads");
  }
}

// --- loads and stores ----------------------------------------------------------------------------

void TensorMemory::load(const LaneRegisters<uint32_t>& d, int n, uint32_t from) {
  const Access access = by_warp("tcgen05_ld", false);
  const int quarter = own_quarter(from, access.what);
  const int begin = checked_columns(from, n, access.what);
  for (int column = begin; column < begin + n; ++column) {
    Cell& c = cell(quarter, column);
    if (c.writer == kNone && c.storing == kNone) {
      fault(text("tcgen05_ld of column %d, lanes %d to %d, of tensor memory, which was not written",
                 column, quarter * kWarpLanes, quarter * kWarpLanes + kWarpLanes - 1));
    }
    check_access(c, access, quarter, column);
    check_products(c, access, quarter, column);
    ++c.loading;
  }
  const Load load{d, {from, n}};
  if (block().options().early_copies) {
    copy_to_registers(load);
  } else {
    for (uint32_t* registers : d) std::fill_n(registers, n, kPoisonWord);
  }
  loads_[static_cast<size_t>(access.warp)].push_back(load);
  block().counts().tensor_loads += n;
}

void TensorMemory::copy_to_registers(const Load& load) {
  const int first = lane_of(load.from.address);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    std::copy_n(at(first + lane, column_of(load.from.address)), load.from.n,
                load.d[static_cast<size_t>(lane)]);
  }
}

void TensorMemory::wait_load() {
  Block& b = block();
  const int warp = b.warp_of_block();
  const uint32_t now = b.tick();
  for (const Load& load : loads_[static_cast<size_t>(warp)]) {
    if (!b.options().early_copies) copy_to_registers(load);
    for (int i = 0; i < load.from.n; ++i) {
      Cell& c = cell(warp % kQuarters, column_of(load.from.address) + i);
      --c.loading;
      c.read_times[static_cast<size_t>(warp / kQuarters)] = now;
    }
  }
  loads_[static_cast<size_t>(warp)].clear();
}

void TensorMemory::store(const LaneRegisters<const uint32_t>& d, int n, uint32_t to) {
  const Access access = by_warp("tcgen05_st", true);
  const int quarter = own_quarter(to, access.what);
  const int begin = checked_columns(to, n, access.what);
  for (int column = begin; column < begin + n; ++column) {
    Cell& c = cell(quarter, column);
    check_access(c, access, quarter, column);
    check_products(c, access, quarter, column);
    c.storing = access.warp;
  }
  // Nothing may access these columns until the store is waited for.
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    std::copy_n(d[static_cast<size_t>(lane)], n, at(lane_of(to) + lane, begin));
  }
  stores_[static_cast<size_t>(access.warp)].push_back({to, n});
  block().counts().tensor_stores += n;
}

void TensorMemory::wait_store() {
  const int warp = block().warp_of_block();
  const uint32_t now = block().tick();
  for (const Columns& to : stores_[static_cast<size_t>(warp)]) {
    for (int i = 0; i < to.n; ++i) {
      Cell& c = cell(warp % kQuarters, column_of(to.address) + i);
      c = {};
      c.writer = warp;
      c.write_time = now;
    }
  }
  stores_[static_cast<size_t>(warp)].clear();
}

void TensorMemory::check_exit() const {
  const auto warp = static_cast<size_t>(block().warp_of_block());
  if (!loads_[warp].empty()) fault("the thread exits with no tcgen05_wait_ld after tcgen05_ld");
  if (!stores_[warp].empty()) fault("the thread exits with no tcgen05_wait_st after tcgen05_st");
}

// --- products ------------------------------------------------------------------------------------

void TensorMemory::issue(const Product& product, uint32_t time) {
  Block& b = block();
  const Access access{"tcgen05.mma", b.thread(), 1, true, b.warp_of_block()};
  if (lane_of(product.d) != 0 || (product.a_in_tensor && lane_of(product.a) != 0)) {
    fault(text("tcgen05.mma at lane %d of tensor memory: a product with M = 128 starts at lane 0",
               std::max(lane_of(product.d), product.a_in_tensor ? lane_of(product.a) : 0)));
  }
  const int a = column_of(product.a);
  const int d = column_of(product.d);
  if (product.a_in_tensor && a < d + product.n && d < a + Product::kOperandColumns) {
    fault(text("tcgen05.mma of an operand in column %d of tensor memory, which it overwrites", a));
  }
  bool by_issue = false;
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    if (product.a_in_tensor) issue_operand(product, access, quarter, time);
    by_issue |= issue_sums(product, access, quarter, time);
  }
  ++b.counts().tensor_products;
  b.counts().tensor_products_by_issue += by_issue ? 1 : 0;
}

void TensorMemory::issue_operand(const Product& product, const Access& access, int quarter,
                                 uint32_t time) {
  Access read = access;
  read.what = "tcgen05.mma with an operand";
  read.writes = false;
  const int begin = checked_columns(product.a, Product::kOperandColumns, access.what);
  for (int column = begin; column < begin + Product::kOperandColumns; ++column) {
    Cell& c = cell(quarter, column);
    if (c.writer == kNone && c.storing == kNone) {
      fault(text("tcgen05.mma of an operand in column %d of tensor memory, which was not written",
                 column));
    }
    check_access(c, read, quarter, column);
    check_products(c, read, quarter, column);
    c.operand_time = time;
  }
}

// The ISA promises the order of products with the same sums, shape and kind, and no other
// (9.7.16.6.2). GPUs run all products of a block in the order of issue.
bool TensorMemory::issue_sums(const Product& product, const Access& access, int quarter,
                              uint32_t time) {
  bool by_issue = false;
  const int begin = checked_columns(product.d, product.n, access.what);
  for (int column = begin; column < begin + product.n; ++column) {
    Cell& c = cell(quarter, column);
    if (product.add && c.writer == kNone && c.storing == kNone) {
      fault(text("tcgen05.mma adds to column %d of tensor memory, which was not written", column));
    }
    check_access(c, access, quarter, column);
    const auto relies_on_issue = [&](uint32_t earlier, const char* did) {
      if (knows(access.first_thread, kTensorCore, earlier)) return;
      if (block().options().strict) {
        fault(
            text("tcgen05.mma writes column %d of tensor memory, which an unfinished product %s: "
                 "GPUs run them in the order of issue, but the ISA does not promise it",
                 column, did));
      }
      by_issue = true;
    };
    if (c.operand_time != 0) relies_on_issue(c.operand_time, "reads as its operand");
    if (c.writer == kTensorCore) {
      if (c.issuer != access.first_thread) {
        check_known(access, kTensorCore, c.write_time, quarter, column, "of another thread writes");
      }
      if (c.d != product.d || c.kind != product.kind) {
        relies_on_issue(c.write_time, "of other sums or another shape writes");
      }
    }
    c = {};
    c.writer = kTensorCore;
    c.write_time = time;
    c.d = product.d;
    c.kind = product.kind;
    c.issuer = access.first_thread;
  }
  return by_issue;
}

}  // namespace tilewise::cuda::emulator
