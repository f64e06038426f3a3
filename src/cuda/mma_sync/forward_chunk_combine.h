// Combines the chunks into which the keys of a sequence are cut (ChunkSchedule): the CTA of a tile
// that finishes last adds them up. No CTA waits for another, and a tile of one chunk skips all of
// this.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
#include "cuda/mma_sync/forward_combine.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class ChunkCombine {
 public:
  TILEWISE_DEVICE ChunkCombine(const ForwardParams& p, const QueryTile& q_tile)
      : p_(p), q_tile_(q_tile), record_(p.arrivals[tile_of_chunk(p, q_tile)]) {}

  // Runs while the first keys are loading. The record has unknown contents before the launch, so
  // each CTA makes it a record of this launch before it counts its own arrival.
  TILEWISE_DEVICE void claim() const {
    if (ptx::thread_index() != 0) return;
    const uint64_t found = ptx::atom_cas(&record_.state, 0, p_.launch_id);
    if (found != 0 && !ChunkArrivals::is_of(found, p_.launch_id))
      ptx::atom_cas(&record_.state, found, p_.launch_id);  // fails when another CTA was first
  }

  TILEWISE_DEVICE void send(const LanePosition& position, const Outputs<C>& o,
                            const RowResults<1>& result) const {
    char* const result_of_cta = partial(chunk_result_index(p_, q_tile_));
    visit_partial_rows<C>(
        position, o, result, q_tile_.rows.count, [&](int h, int byte, const uint32_t (&x)[4]) {
          ptx::st_global_v4_b32(result_of_cta + position.row(0, h) * kRowBytes + byte, x);
        });
  }

  // Publishes what has been sent. Returns whether all other CTAs of the tile have done so before.
  TILEWISE_DEVICE bool is_last() {
    ptx::sync_warp();
    const uint64_t arrival =
        ChunkArrivals::arrival(q_tile_.split, q_tile_.head_chunk.chunk - p_.order.sequences);
    uint64_t state = 0;
    if (ptx::thread_index() == 0) state = ptx::atom_acq_rel_add(&record_.state, arrival) + arrival;
    ptx::sync_warp();
    if (ptx::uniform(ChunkArrivals::arrived(state)) != q_tile_.splits) return false;
    second_ = p_.order.sequences + ptx::uniform(ChunkArrivals::position_of_chunk_1(state));
    if (ptx::thread_index() == 0) record_.state = 0;
    combine_flags();
    return true;
  }

  // Replaces the sums of this chunk by those of all chunks, added in the order of the chunks,
  // whichever CTA combines them. Bulk copies bring the partial results into the buffer, all at once
  // if it holds them: that is one wait for memory, and fewer instructions than loads to registers.
  TILEWISE_DEVICE void gather(const LanePosition& position, Outputs<C>& o, RowResults<1>& result,
                              CombineBuffer buffer) const {
    ptx::fence_proxy_async_global();  // bulk copies read what other CTAs have stored
    ptx::fence_proxy_async();         // and overwrite what this warp has read
    ptx::sync_warp();
    load(0, buffer);
    float base[2];
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) begin_row(position, h, base[h], sum[h]);
    o.fill(0.0f);
#pragma unroll 1
    for (int32_t first = 0;;) {
      ptx::mbarrier_wait_parity(buffer.barrier, buffer.parity);
      const int32_t count = min(q_tile_.splits - first, kChunksInBuffer);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (position.row(0, h) < q_tile_.rows.count)
          sum[h] += add_chunks(o, position, h, row_in_buffer(position, h, buffer), count, base[h]);
      }
      first += kChunksInBuffer;
      if (first >= q_tile_.splits) break;
      buffer.parity ^= 1;
      ptx::sync_warp();
      load(first, buffer);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      result.factor[0][h] = sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
      result.lse[0][h] = sum[h] == 0.0f ? kMinusInfinity : base[h] + ptx::log_accurate(sum[h]);
    }
  }

 private:
  static constexpr int kRowBytes = kPartialRowBytes<C>;
  static constexpr int kLseAt = kPartialVectors<C> * 16;  // offset in a row
  static constexpr int kTileBytes = C::kForward.rows() * kRowBytes;
  static constexpr int kChunksInBuffer =
      min(ptx::kWarpSize, C::kForward.stages* kStageBytes<C> / kTileBytes);
  static_assert(kChunksInBuffer > 0);

  // The partial result of a chunk, whose rows are contiguous.
  TILEWISE_DEVICE char* partial(int64_t index) const {
    return reinterpret_cast<char*>(p_.partial_out) + index * p_.packed_rows * kRowBytes;
  }
  TILEWISE_DEVICE int64_t result_index(int32_t split) const {
    const int64_t chunk = split == 0 ? q_tile_.sequence.batch : second_ + split - 1;
    return chunk * p_.order.heads + q_tile_.head_chunk.head;
  }

  // Loads the partial results from chunk `first` on, as many as the buffer holds, one per lane.
  TILEWISE_DEVICE void load(int32_t first, const CombineBuffer& buffer) const {
    const int lane = ptx::lane_index();
    const int32_t count = min(q_tile_.splits - first, kChunksInBuffer);
    const int32_t bytes = q_tile_.rows.count * kRowBytes;
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(buffer.barrier, count * bytes);
    ptx::sync_warp();
    if (lane < count)
      ptx::cp_async_bulk_load(buffer.base + static_cast<uint32_t>(lane * kTileBytes),
                              partial(result_index(first + lane)), bytes, buffer.barrier);
  }
  TILEWISE_DEVICE static ptx::SharedAddress row_in_buffer(const LanePosition& position, int h,
                                                          const CombineBuffer& buffer) {
    return buffer.base + static_cast<uint32_t>(position.row(0, h) * kRowBytes);
  }

  // `base` becomes the largest lse of row (0, h), including a sink, and `sum` the weight of the
  // sink.
  TILEWISE_DEVICE void begin_row(const LanePosition& position, int h, float& base,
                                 float& sum) const {
    const int32_t r = position.row(0, h);
    const bool exists = r < q_tile_.rows.count;
    const float* const sinks = p_.problem.sinks;
    const float sink = exists && sinks != nullptr ? sinks[q_tile_.head(r)] : kMinusInfinity;
    float highest = sink;
#pragma unroll 1
    for (int32_t split = position.lane_of_quad(); exists && split < q_tile_.splits; split += 4)
      highest = max(highest, ptx::float_of(ptx::ld_global_b32(partial(result_index(split)) +
                                                              r * kRowBytes + kLseAt)));
    base = exponent_base(tile::quad_max(highest));
    sum = common::exponential(above(sink, base));
  }

  // Adds the weighted sums of a row of `count` chunks; returns the sum of the weights. A chunk that
  // saw no key is skipped, since it may hold NaN.
  TILEWISE_DEVICE static float add_chunks(Outputs<C>& o, const LanePosition& position, int h,
                                          ptx::SharedAddress row, int32_t count, float base) {
    float sum = 0.0f;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i, row += kTileBytes) {
      const float lse = ptx::float_of(ptx::ld_shared_b32(row + kLseAt));
      if (lse == kMinusInfinity) continue;
      const float weight = common::exponential(above(lse, base));
      sum += weight;
      const ptx::SharedAddress vectors = row + static_cast<uint32_t>(position.lane_of_quad() * 16);
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; n += 2) {
        uint32_t x[4];
        ptx::ld_shared_v4_b32(x, vectors + static_cast<uint32_t>(2 * n * 16));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& to = o.x[0][n + e / 2][2 * h + e % 2];
          to = ptx::fma(weight, ptx::float_of(x[e]), to);
        }
      }
    }
    return sum;
  }

  // Combines the flags of the chunks into that of the tile.
  TILEWISE_DEVICE void combine_flags() const {
    if (p_.flags.data == nullptr) return;
    bool flagged = false;
#pragma unroll 1
    for (int32_t split = ptx::lane_index(); split < q_tile_.splits; split += ptx::kWarpSize)
      flagged |= *p_.flags.of_chunk(result_index(split)) != 0;
    flagged = ptx::any(flagged);
    if (ptx::lane_index() == 0) p_.flags.data[tile_of_chunk(p_, q_tile_)] = flagged ? 1 : 0;
  }

  const ForwardParams& p_;
  const QueryTile& q_tile_;
  ChunkArrivals& record_;
  int32_t second_ = 0;  // index of the sequence's chunk 1 among all chunks
};

}  // namespace tilewise::cuda::mma_sync
