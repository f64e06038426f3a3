// Parts of the keys of a sequence (EqualParts) that the block of a tile that is done last merges.
// Nobody waits for anybody, and a tile of one part has nothing to do with it.
#pragma once

#include "cuda/mma_sync/forward_merge.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class PartsMerge {
 public:
  TILEWISE_DEVICE PartsMerge(const ForwardParams& p, const BlockWork& work)
      : p_(p), work_(work), record_(p.arrivals[tile_of_part(p, work)]) {}

  // While the first keys are on their way: nobody has written the record before the launch, so each
  // block makes sure that it is one before it counts itself.
  TILEWISE_DEVICE void expect() const {
    if (ptx::thread_index() != 0) return;
    if (work_.split > 0)
      record_.second =
          p_.order.heads.quotient(static_cast<int32_t>(ptx::block_index())) - (work_.split - 1);
    const uint64_t found = ptx::atom_cas(&record_.state, 0, p_.launch);
    if (found != 0 && !PartArrivals::is_of(found, p_.launch))
      ptx::atom_cas(&record_.state, found, p_.launch);  // or another block has done it
  }

  TILEWISE_DEVICE void send(const LanePlace& place, const Outputs<C>& o,
                            const RowResults<1>& result) const {
    char* const own = part(place_of_part(p_, work_));
    visit_part<C>(place, o, result, work_.rows.count, [&](int h, int byte, const uint32_t (&x)[4]) {
      ptx::st_global_v4_b32(own + place.row(0, h) * kPartBytes + byte, x);
    });
  }

  // Stores the rows of the tile when all its other blocks have come here before.
  TILEWISE_DEVICE void store(IdleRing ring) const {
    ptx::sync_warp();
    uint64_t before = 0;
    if (ptx::thread_index() == 0) before = ptx::atom_acq_rel_add(&record_.state, 1);
    ptx::sync_warp();
    const auto arrived = static_cast<uint32_t>(PartArrivals::arrived(before));
    if (static_cast<int32_t>(ptx::shuffle(arrived, 0)) != work_.splits - 1) return;
    const int32_t second = record_.second;
    if (ptx::thread_index() == 0) record_.state = 0;
    join_flags(second);
    ptx::fence_proxy_async_all();  // bulk copies take what other blocks have stored
    const int32_t rows = min(work_.rows.count, kMostPartsInRing / work_.splits);
    const MergedRows<C> merged(p_, work_, rows * kPartBytes);
#pragma unroll 1
    for (int32_t first = 0; first < work_.rows.count; first += rows) {
      const int32_t count = min(rows, work_.rows.count - first);
      ptx::sync_warp();
      load(second, first, count, rows, ring);
#pragma unroll 1
      for (int32_t r = 0; r < count; ++r)
        merged.store(first + r, ring.base + static_cast<uint32_t>(r * kPartBytes), ring);
      ring.parity ^= 1;
    }
  }

 private:
  static constexpr int kPartBytes = kMergedPartBytes<C>;
  static constexpr int kMostPartsInRing = C::kForward.stages * kSlotBytes<C> / kPartBytes;
  static_assert(PartArrivals::kMost <= kMostPartsInRing);

  // What a block has left: its rows follow each other.
  TILEWISE_DEVICE char* part(int64_t place) const {
    return reinterpret_cast<char*>(p_.partial_out) + place * p_.packed_rows * kPartBytes;
  }
  TILEWISE_DEVICE int64_t place_of(int32_t second, int32_t split) const {
    const int64_t place = split == 0 ? work_.sequence.batch : second + split - 1;
    const Divisor& heads = p_.order.heads;
    return place * heads + heads.remainder(static_cast<int32_t>(ptx::block_index()));
  }

  // Rows of all splits into the ring, where a split has room for `room` of them.
  TILEWISE_DEVICE void load(int32_t second, int32_t first, int32_t count, int32_t room,
                            const IdleRing& ring) const {
    const int lane = ptx::lane_index();
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(ring.barrier, work_.splits * count * kPartBytes);
    ptx::sync_warp();
#pragma unroll 1
    for (int32_t split = lane; split < work_.splits; split += ptx::kWarpSize)
      ptx::cp_async_bulk_load(ring.base + static_cast<uint32_t>(split * room * kPartBytes),
                              part(place_of(second, split)) + first * kPartBytes,
                              count * kPartBytes, ring.barrier);
  }

  // The flags of the blocks of a tile become one.
  TILEWISE_DEVICE void join_flags(int32_t second) const {
    if (p_.flags.data == nullptr) return;
    bool flagged = false;
    for (int32_t split = ptx::lane_index(); split < work_.splits; split += ptx::kWarpSize)
      flagged |= *p_.flags.of_part(place_of(second, split)) != 0;
    flagged = ptx::any(flagged);
    if (ptx::lane_index() == 0) p_.flags.data[tile_of_part(p_, work_)] = flagged ? 1 : 0;
  }

  const ForwardParams& p_;
  const BlockWork& work_;
  PartArrivals& record_;
};

}  // namespace tilewise::cuda::mma_sync
