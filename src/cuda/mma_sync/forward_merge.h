// Key splits whose blocks are a cluster: their partial results are merged in shared memory, with no
// second launch and no workspace.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/common/split_weights.h"
#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/mbarrier.h"

namespace tilewise::cuda::mma_sync {

// A ring that has been read, and a barrier in it of one arrival, whose next phase has `parity`.
struct IdleRing {
  ptx::SharedAddress base;
  ptx::SharedAddress barrier;
  int parity;
};

// Of a row, what a split has: its sums in chunks of 16 bytes, and its lse.
template <class C>
inline constexpr int kMergedChunks = C::kHeadDim / 4;
template <class C>
inline constexpr int kMergedPartBytes = (kMergedChunks<C> + 1) * 16;
template <class C>
inline constexpr int kMostMergedBytes =
    (C::kForward.rows() + kMostMergedSplits - 1) * kMergedPartBytes<C>;

// The splits of a tile share its rows: row r is merged by split r % splits, for which all of them
// store what they have of it straight from registers. By then no block reads its ring any more: it
// takes the parts, and one of its barriers counts them. Blocks of no part have exited.
template <class C>
class ClusterMerge {
 public:
  static_assert(C::kForward.warps == 1 && C::kForward.warp_rows == 16);
  static constexpr int kChunks = kMergedChunks<C>;
  static constexpr int kPartBytes = kMergedPartBytes<C>;

  TILEWISE_DEVICE ClusterMerge(const ForwardParams& p, const BlockWork& work, const IdleRing& ring)
      : p_(p),
        work_(work),
        ring_(ring),
        split_(work.split),
        splits_(work.splits),
        inverse_(ptx::rcp_approximate(static_cast<float>(splits_))),
        rows_(split_ < work.rows.count ? turn_of(work.rows.count - 1 - split_) + 1 : 0) {}

  // Returns when all blocks have let go of their rings, and the parts are on their way.
  TILEWISE_DEVICE void send(const LanePlace& place, const Outputs<C>& o,
                            const RowResults<1>& result) const {
    if (rows_ > 0 && ptx::elect_one())
      ptx::mbarrier_arrive_expect_tx(ring_.barrier, rows_ * splits_ * kPartBytes);
    const int32_t rows = work_.rows.count;
    const int quad = place.lane_of_quad();
    ptx::SharedAddress to[2];
    ptx::SharedAddress landed[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t turn = turn_of(place.row(0, h));
      const int32_t owner = place.row(0, h) - turn * splits_;
      to[h] = ptx::map_to_rank(part(turn, split_), owner);
      landed[h] = ptx::map_to_rank(ring_.barrier, owner);
    }
    ptx::barrier_cluster_wait();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (place.row(0, h) >= rows) continue;
      // Columns of a chunk: those that the lane has of two neighbouring products.
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; n += 2) {
        uint32_t x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[e] = ptx::bits_of(o.x[0][n + e / 2][2 * h + e % 2] * result.factor[0][h]);
        ptx::st_async_v4_b32(to[h] + static_cast<uint32_t>((2 * n + quad) * 16), x, landed[h]);
      }
      const uint32_t lse[4] = {ptx::bits_of(result.lse[0][h])};
      if (quad == 0) ptx::st_async_v4_b32(to[h] + kChunks * 16, lse, landed[h]);
    }
  }

  TILEWISE_DEVICE void store() const {
#pragma unroll 1
    for (int32_t turn = 0; turn < rows_; ++turn) store_row(split_ + turn * splits_, part(turn, 0));
  }

 private:
  using Weights = common::SplitWeights;
  static constexpr int kChains = Weights::kChains;

  // r / splits: exact for the few rows of a tile.
  TILEWISE_DEVICE int32_t turn_of(int32_t r) const {
    return static_cast<int32_t>((static_cast<float>(r) + 0.5f) * inverse_);
  }
  TILEWISE_DEVICE ptx::SharedAddress part(int32_t turn, int32_t split) const {
    return ring_.base + static_cast<uint32_t>((turn * splits_ + split) * kPartBytes);
  }

  // The addresses first: they take as long as the parts are on their way.
  TILEWISE_DEVICE void store_row(int32_t r, ptx::SharedAddress parts) const {
    const Problem& problem = p_.problem;
    const int lane = ptx::lane_index();
    const int32_t head = work_.head(r);
    const float sink = problem.sinks != nullptr ? problem.sinks[head] : kMinusInfinity;
    float* const lse =
        problem.lse + head * problem.lse_stride_head +
        work_.sequence.lse_offset(problem.lse_stride_batch, work_.rows.first + work_.rows.row(r));
    char* const out =
        static_cast<char*>(problem.out.data) + work_.offset(problem.out, r) * C::Element::kBytes;
    ptx::mbarrier_wait_parity(ring_.barrier, ring_.parity);
    float own = kMinusInfinity;  // lse of split `lane`
    if (lane < splits_)
      own = ptx::float_of(
          ptx::ld_shared_b32(parts + static_cast<uint32_t>(lane * kPartBytes + kChunks * 16)));
    Weights weights;
    weights.begin(own, sink);
    const float whole = weights.finish(common::exponential(own - weights.base), sink);
    if (problem.lse != nullptr && lane == 0) *lse = whole;
    const float weight = weights.of(own);
#pragma unroll
    for (int first = 0; first < kChunks; first += ptx::kWarpSize)
      store_chunk(out, first + lane, parts, weight);
  }

  // `weight` is that of split `lane`.
  TILEWISE_DEVICE void store_chunk(char* out, int chunk, ptx::SharedAddress parts,
                                   float weight) const {
    float sum[kChains][4] = {};
#pragma unroll 1
    for (int32_t begin = 0; begin < splits_; begin += kChains) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        const int32_t split = begin + i;
        uint32_t x[4] = {};
        if (split < splits_ && chunk < kChunks)
          ptx::ld_shared_v4_b32(x, parts + static_cast<uint32_t>(split * kPartBytes + chunk * 16));
        const float its = ptx::shuffle(weight, split);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = Weights::add(sum[i][j], its, x[j]);
      }
    }
#pragma unroll
    for (int i = 1; i < kChains; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[0][j] += sum[i][j];
    }
    const int column = chunk / 4 * 16 + chunk % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = column + 8 * half;
      if (chunk < kChunks && c < p_.problem.head_dim_v)
        *reinterpret_cast<uint32_t*>(out + c * C::Element::kBytes) =
            tile::pack<typename C::Element>(sum[0][2 * half], sum[0][2 * half + 1]);
    }
  }

  const ForwardParams& p_;
  const BlockWork& work_;
  IdleRing ring_;
  int32_t split_;
  int32_t splits_;
  float inverse_;  // of splits_
  int32_t rows_;   // that this block merges
};

}  // namespace tilewise::cuda::mma_sync
