// Accesses between the blocks of a cluster.
#include <algorithm>
#include <array>
#include <cstring>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

// A cluster address has the block's rank plus one in the bits above the block's own address.
constexpr int kRankShift = 24;

struct ClusterAddress {
  int rank;
  uint32_t address;

  explicit ClusterAddress(uint32_t bits)
      : rank(bits >> kRankShift == 0 ? block().rank() : static_cast<int>(bits >> kRankShift) - 1),
        address(bits & ((1u << kRankShift) - 1)) {}
};

// A write to another block, counted by an mbarrier there.
class CountedWrite {
 public:
  CountedWrite(uint32_t to, uint32_t barrier, int bytes, const char* what)
      : target_(to), counted_(barrier), bytes_(bytes), other_(block().state_of(target_.rank)) {
    if (target_.rank != counted_.rank) {
      fault(text("%s: the bytes go to block %d of the cluster, but the mbarrier is in block %d",
                 what, target_.rank, counted_.rank));
    }
    other_.shared.start_async_write(target_.address, bytes, what, block().moment_at(target_.rank));
  }

  // Calls `copy(to)` when the write lands.
  template <class Copy>
  void start(Copy copy) const {
    other_.barriers.start_write(counted_.address, {target_.address, bytes_,
                                                   [&shared = other_.shared, at = target_.address,
                                                    copy] { copy(shared.at(at)); }});
  }

 private:
  ClusterAddress target_;
  ClusterAddress counted_;
  int bytes_;
  BlockState& other_;
};

}  // namespace

uint32_t map_to_rank(uint32_t address, int rank) {
  block().state_of(rank);
  return address | static_cast<uint32_t>(rank + 1) << kRankShift;
}

void mbarrier_arrive_remote(uint32_t barrier) {
  const ClusterAddress at(barrier);
  block().state_of(at.rank).barriers.arrive(at.address, 0);
}

void cp_async_bulk_to_rank(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  constexpr const char* kWhat = "cp.async.bulk to another block";
  const CountedWrite write(to, barrier, bytes, kWhat);
  Block& b = block();
  SharedMemory& source = b.shared();
  source.start_async_read(from, bytes, kWhat, b.moment());
  b.counts().bulk_bytes += bytes;
  write.start([&source, from, bytes](void* there) {
    std::memcpy(there, source.at(from), static_cast<size_t>(bytes));
    source.end_use(from, bytes);
  });
}

void st_async_v4_b32(uint32_t to, const uint32_t (&r)[4], uint32_t barrier) {
  const CountedWrite write(to, barrier, sizeof(r), "st.async to another block");
  std::array<uint32_t, 4> values;
  std::copy_n(r, values.size(), values.begin());
  write.start([values](void* there) { std::memcpy(there, values.data(), sizeof(values)); });
}

}  // namespace tilewise::cuda::emulator
