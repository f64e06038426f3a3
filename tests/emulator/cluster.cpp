// What the blocks of a cluster do to each other.
#include <algorithm>
#include <array>
#include <cstring>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

// An address of the cluster has the rank of the block, plus one, above that of the block.
constexpr int kRankShift = 24;

struct ClusterAddress {
  int rank;
  uint32_t address;

  explicit ClusterAddress(uint32_t bits)
      : rank(bits >> kRankShift == 0 ? block().rank() : static_cast<int>(bits >> kRankShift) - 1),
        address(bits & ((1u << kRankShift) - 1)) {}
};

}  // namespace

uint32_t map_to_rank(uint32_t own, int rank) {
  block().facet_of(rank);
  return own | static_cast<uint32_t>(rank + 1) << kRankShift;
}

void mbarrier_arrive_remote(uint32_t barrier) {
  const ClusterAddress at(barrier);
  block().facet_of(at.rank).barriers.arrive(at.address, 0);
}

void cp_async_bulk_to_rank(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  constexpr const char* kWhat = "cp.async.bulk to another block";
  const ClusterAddress target(to);
  const ClusterAddress counted(barrier);
  Block& b = block();
  if (target.rank != counted.rank) {
    fault(text("%s: bytes for block %d of the cluster, counted by block %d", kWhat, target.rank,
               counted.rank));
  }
  Facet& other = b.facet_of(target.rank);
  SharedMemory& own = b.shared();
  own.start_async_read(from, bytes, kWhat, b.moment());
  other.shared.start_async_write(target.address, bytes, kWhat, b.moment_at(target.rank));
  b.counts().bulk_bytes += bytes;
  other.barriers.start_write(
      counted.address, {target.address, bytes, [&own, &shared = other.shared, target, from, bytes] {
                          std::memcpy(shared.at(target.address), own.at(from),
                                      static_cast<size_t>(bytes));
                          own.end_use(from, bytes);
                        }});
}

void st_async_v4_b32(uint32_t to, const uint32_t (&r)[4], uint32_t barrier) {
  constexpr const char* kWhat = "st.async to another block";
  const ClusterAddress target(to);
  const ClusterAddress counted(barrier);
  Block& b = block();
  if (target.rank != counted.rank) {
    fault(text("%s: bytes for block %d of the cluster, counted by block %d", kWhat, target.rank,
               counted.rank));
  }
  constexpr int kBytes = sizeof(r);
  Facet& other = b.facet_of(target.rank);
  other.shared.start_async_write(target.address, kBytes, kWhat, b.moment_at(target.rank));
  std::array<uint32_t, 4> values;
  std::copy_n(r, values.size(), values.begin());
  other.barriers.start_write(counted.address,
                             {target.address, kBytes, [&shared = other.shared, target, values] {
                                std::memcpy(shared.at(target.address), values.data(), kBytes);
                              }});
}

}  // namespace tilewise::cuda::emulator
