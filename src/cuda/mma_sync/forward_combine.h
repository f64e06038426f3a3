// Combines the splits of a tile in shared memory, by the CTAs of a cluster, without a second
// launch.
#pragma once

#include "cuda/common/combine_weights.h"
#include "cuda/common/forward_results.h"
#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/mbarrier.h"

namespace tilewise::cuda::mma_sync {

// Room for partial results in the stages of a drained pipeline, and a barrier that expects one
// arrival and whose next phase has `parity`.
struct CombineBuffer {
  ptx::SharedAddress base;
  ptx::SharedAddress barrier;
  int parity;
};

// A row of a partial result consists of its sums, as vectors of 16 bytes, and of its lse.
template <class C>
inline constexpr int kPartialVectors = C::kHeadDim / 4;
template <class C>
inline constexpr int kPartialRowBytes = (kPartialVectors<C> + 1) * 16;
template <class C>
inline constexpr int kMaxCombineBytes =
    (C::kForward.rows() + kMaxClusterSplits - 1) * kPartialRowBytes<C>;

// Calls visit(h, byte, x) for each vector of 16 bytes that the lane holds of its row (0, h); `byte`
// is the position of the vector in the row's partial result.
template <class C, class Visit>
TILEWISE_DEVICE void visit_partial_rows(const LanePosition& position, const Outputs<C>& o,
                                        const RowResults<1>& result, int32_t rows,
                                        const Visit& visit) {
  const int quad = position.lane_of_quad();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (position.row(0, h) >= rows) continue;
    // A vector holds the lane's columns of two neighbouring 8-column tiles.
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; n += 2) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[e] = ptx::bits_of(o.x[0][n + e / 2][2 * h + e % 2] * result.factor[0][h]);
      visit(h, (2 * n + quad) * 16, x);
    }
    const uint32_t lse[4] = {ptx::bits_of(result.lse[0][h])};
    if (quad == 0) visit(h, kPartialVectors<C> * 16, lse);
  }
}

// Combines rows of out and lse. The partial results of all splits, at most one per lane, lie in
// shared memory.
template <class C>
class RowCombine {
 public:
  static_assert(C::kForward.warps == 1 && C::kForward.warp_rows == 16);
  static constexpr int kVectors = kPartialVectors<C>;

  // `stride` is the distance between the partial results of two splits, in bytes.
  TILEWISE_DEVICE RowCombine(const ForwardParams& p, const QueryTile& q_tile, int32_t stride)
      : p_(p), q_tile_(q_tile), stride_(static_cast<uint32_t>(stride)) {}

  // Waits for the partial results, the first of which lies at `partials`. Addresses are computed
  // before the wait, because that takes as long as the partial results take to arrive.
  TILEWISE_DEVICE void store(int32_t r, ptx::SharedAddress partials,
                             const CombineBuffer& buffer) const {
    const Problem& problem = p_.problem;
    const int lane = ptx::lane_index();
    const int32_t head = q_tile_.head(r);
    const float sink = problem.sinks != nullptr ? problem.sinks[head] : kMinusInfinity;
    const int64_t lse_at = lse_index(problem, q_tile_, r);
    char* const out =
        static_cast<char*>(problem.out.data) + q_tile_.offset(problem.out, r) * C::Element::kBytes;
    ptx::mbarrier_wait_parity(buffer.barrier, buffer.parity);
    float lse = kMinusInfinity;  // lse of split `lane`
    if (lane < q_tile_.splits)
      lse = ptx::float_of(ptx::ld_shared_b32(partial(partials, lane) + kVectors * 16));
    Weights weights;
    weights.begin(lse, sink);
    const float whole = weights.finish(common::exponential(lse - weights.base), sink);
    if (lane == 0) store_log_sum(problem, lse_at, {whole, 0.0f});
    const float weight = weights.of(lse);
#pragma unroll
    for (int first = 0; first < kVectors; first += ptx::kWarpSize)
      store_vector(out, first + lane, partials, weight);
  }

 private:
  using Weights = common::CombineWeights;
  static constexpr int kChains = Weights::kChains;

  TILEWISE_DEVICE ptx::SharedAddress partial(ptx::SharedAddress partials, int32_t split) const {
    return partials + static_cast<uint32_t>(split) * stride_;
  }

  // `weight` belongs to split `lane`.
  TILEWISE_DEVICE void store_vector(char* out, int vector, ptx::SharedAddress partials,
                                    float weight) const {
    float sum[kChains][4] = {};
#pragma unroll 1
    for (int32_t begin = 0; begin < q_tile_.splits; begin += kChains) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        const int32_t split = begin + i;
        uint32_t x[4] = {};
        if (split < q_tile_.splits && vector < kVectors)
          ptx::ld_shared_v4_b32(x, partial(partials, split) + static_cast<uint32_t>(vector * 16));
        const float split_weight = ptx::shuffle(weight, split);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = Weights::add(sum[i][j], split_weight, x[j]);
      }
    }
#pragma unroll
    for (int i = 1; i < kChains; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[0][j] += sum[i][j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c =
          C::Columns::of_tile(vector / 4 * 2 + half) + C::Columns::of_lane(vector % 4 * 2);
      if (vector < kVectors && c < p_.problem.head_dim_v)
        *reinterpret_cast<uint32_t*>(out + c * C::Element::kBytes) =
            pack_output<C>(p_.problem, sum[0][2 * half], sum[0][2 * half + 1]);
    }
  }

  const ForwardParams& p_;
  const QueryTile& q_tile_;
  uint32_t stride_;
};

// The CTAs of a tile's splits divide its rows: row r is combined by the CTA of split r % splits, to
// which all others send their partial results straight from registers. By then no CTA reads its
// stages any more, so these receive the partial results, and one of its barriers counts the bytes.
// CTAs without a split have exited.
template <class C>
class ClusterCombine {
 public:
  TILEWISE_DEVICE ClusterCombine(const ForwardParams& p, const QueryTile& q_tile,
                                 const CombineBuffer& buffer)
      : p_(p),
        q_tile_(q_tile),
        buffer_(buffer),
        split_(q_tile.split),
        splits_(q_tile.splits),
        inverse_(ptx::rcp_approximate(static_cast<float>(splits_))),
        rows_(split_ < q_tile.rows.count ? local_row_of(q_tile.rows.count - 1 - split_) + 1 : 0) {}

  // Returns when all CTAs have released their stages and the partial results are in flight.
  TILEWISE_DEVICE void send(const LanePosition& position, const Outputs<C>& o,
                            const RowResults<1>& result) const {
    if (rows_ > 0 && ptx::elect_one())
      ptx::mbarrier_arrive_expect_tx(buffer_.barrier, rows_ * splits_ * kRowBytes);
    ptx::SharedAddress to[2];
    ptx::SharedAddress barrier[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t local_row = local_row_of(position.row(0, h));
      const int32_t owner = position.row(0, h) - local_row * splits_;
      to[h] = ptx::map_to_rank(partial(local_row, split_), owner);
      barrier[h] = ptx::map_to_rank(buffer_.barrier, owner);
    }
    ptx::barrier_cluster_wait();
    visit_partial_rows<C>(
        position, o, result, q_tile_.rows.count, [&](int h, int byte, const uint32_t (&x)[4]) {
          ptx::st_async_v4_b32(to[h] + static_cast<uint32_t>(byte), x, barrier[h]);
        });
  }

  TILEWISE_DEVICE void store() const {
    const RowCombine<C> rows(p_, q_tile_, kRowBytes);
#pragma unroll 1
    for (int32_t local_row = 0; local_row < rows_; ++local_row)
      rows.store(split_ + local_row * splits_, partial(local_row, 0), buffer_);
  }

 private:
  static constexpr int kRowBytes = kPartialRowBytes<C>;

  // r / splits: exact for the few rows of a tile.
  TILEWISE_DEVICE int32_t local_row_of(int32_t r) const {
    return static_cast<int32_t>((static_cast<float>(r) + 0.5f) * inverse_);
  }
  TILEWISE_DEVICE ptx::SharedAddress partial(int32_t local_row, int32_t split) const {
    return buffer_.base + static_cast<uint32_t>((local_row * splits_ + split) * kRowBytes);
  }

  const ForwardParams& p_;
  const QueryTile& q_tile_;
  CombineBuffer buffer_;
  int32_t split_;
  int32_t splits_;
  float inverse_;  // 1 / splits_
  int32_t rows_;   // that this CTA combines
};

}  // namespace tilewise::cuda::mma_sync
