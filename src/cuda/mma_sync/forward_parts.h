// Parts of the keys of a sequence (EqualParts) that the block of a tile that is done last merges.
// Nobody waits for anybody, and a tile of one part has nothing to do with it.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
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

  // What has been sent is complete. Whether all other blocks of the tile have come here before.
  TILEWISE_DEVICE bool is_last() {
    ptx::sync_warp();
    const uint64_t arrival =
        PartArrivals::arrival(work_.split, place_in_line(p_) - p_.order.sequences);
    uint64_t state = 0;
    if (ptx::thread_index() == 0) state = ptx::atom_acq_rel_add(&record_.state, arrival) + arrival;
    ptx::sync_warp();
    if (uniform(PartArrivals::arrived(state)) != work_.splits) return false;
    second_ = p_.order.sequences + uniform(PartArrivals::second(state));
    if (ptx::thread_index() == 0) record_.state = 0;
    join_flags();
    return true;
  }

  // Puts what all parts have in the place of what this one has. Lanes read what lanes of the same
  // number have sent, from the first part to the last, whoever merges them.
  TILEWISE_DEVICE void gather(const LanePlace& place, Outputs<C>& o, RowResults<1>& result) const {
    o.fill(0.0f);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(0, h);
      if (r >= work_.rows.count) continue;
      const float* const sinks = p_.problem.sinks;
      float highest = sinks != nullptr ? sinks[work_.head(r)] : kMinusInfinity;
      float sum = highest != kMinusInfinity ? 1.0f : 0.0f;
#pragma unroll 2
      for (int32_t split = 0; split < work_.splits; ++split) {
        const char* const row = part(place_of(split)) + r * kPartBytes;
        const float lse = ptx::float_of(ptx::ld_global_b32(row + kMergedChunks<C> * 16));
        const float before = highest;
        highest = max(highest, lse);
        const float base = exponent_base(highest);
        const float shrink = common::exponential(above(before, base));
        const float weight = common::exponential(above(lse, base));
        sum = sum * shrink + weight;
        add_row(o, h, row + place.lane_of_quad() * 16, shrink, weight);
      }
      result.factor[0][h] = sum == 0.0f ? 0.0f : 1.0f / sum;
      result.lse[0][h] =
          sum == 0.0f ? kMinusInfinity : exponent_base(highest) + ptx::log_accurate(sum);
    }
  }

 private:
  static constexpr int kPartBytes = kMergedPartBytes<C>;

  // What a block has left: its rows follow each other.
  TILEWISE_DEVICE char* part(int64_t place) const {
    return reinterpret_cast<char*>(p_.partial_out) + place * p_.packed_rows * kPartBytes;
  }
  TILEWISE_DEVICE int64_t place_of(int32_t split) const {
    const int64_t place = split == 0 ? work_.sequence.batch : second_ + split - 1;
    const Divisor& heads = p_.order.heads;
    return place * heads + heads.remainder(static_cast<int32_t>(ptx::block_index()));
  }

  // A part that saw nothing has no weight: its sums may be NaN.
  TILEWISE_DEVICE static void add_row(Outputs<C>& o, int h, const char* row, float shrink,
                                      float weight) {
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; n += 2) {
      uint32_t x[4];
      ptx::ld_global_v4_b32(x, row + 2 * n * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = o.x[0][n + e / 2][2 * h + e % 2];
        sum = ptx::fma(weight, weight == 0.0f ? 0.0f : ptx::float_of(x[e]), sum * shrink);
      }
    }
  }

  // The flags of the blocks of a tile become one.
  TILEWISE_DEVICE void join_flags() const {
    if (p_.flags.data == nullptr) return;
    bool flagged = false;
    for (int32_t split = ptx::lane_index(); split < work_.splits; split += ptx::kWarpSize)
      flagged |= *p_.flags.of_part(place_of(split)) != 0;
    flagged = ptx::any(flagged);
    if (ptx::lane_index() == 0) p_.flags.data[tile_of_part(p_, work_)] = flagged ? 1 : 0;
  }

  const ForwardParams& p_;
  const BlockWork& work_;
  PartArrivals& record_;
  int32_t second_ = 0;  // of the line of parts: the second one of the sequence
};

}  // namespace tilewise::cuda::mma_sync
