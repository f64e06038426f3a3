// The pipeline of fp32 keys and values that the CTA splits into pairs of tf32 numbers once.
//
// A thread copies its own 16-byte chunks of a tile with cp.async, splits them when they have
// arrived, and stores the high and low parts where all warps read them: V of a tile while its
// scores are computed, K of the next one while its values are summed. One barrier before each
// product is therefore enough, as in KvPipeline. Shared memory holds K and V as pairs (two tiles
// each), then one tile each of K and V as loaded.
#pragma once

#include "cuda/mma_sync/forward_kv_pipeline.h"
#include "cuda/tile/split_tile.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class Tf32SplitPipeline {
 public:
  static constexpr int kRowBytes = C::kHeadDim * C::Element::kBytes;
  static constexpr int kTileBytes = C::kForward.keys * kRowBytes;
  static constexpr int kBytes = 6 * kTileBytes;
  using Lanes = tile::PairLanes<C::kForward.threads(), C::kForward.keys, kRowBytes>;
  using TileCopy = KvTileCopy<C, Lanes>;
  using Arch = typename C::Arch;
  static constexpr int kParts = TileCopy::kParts;
  static_assert(TileCopy::kPartPasses % 2 == 0);
  using KeyLanes = tile::LaneOffsets<kRowBytes, tile::Lanes::chunks_first>;
  using ValueLanes = tile::PairTile<C::kHeadDim>;

  TILEWISE_DEVICE static void prepare(const ForwardParams&, ptx::SharedAddress) {}

  TILEWISE_DEVICE Tf32SplitPipeline(const ForwardParams& p, const QueryTile& q_tile, int32_t last,
                                    ptx::SharedAddress base)
      : k_(p, p.problem.k, p.problem.head_dim, q_tile),
        v_(p, p.problem.v, p.problem.head_dim_v, q_tile),
        base_(base),
        last_(last) {}

  template <class Queries>
  TILEWISE_DEVICE void start(Queries&& load_queries) {
    load_queries();
    k_.copy_whole(raw_keys(), last_);
    tile::commit<Arch>();
    v_.copy_whole(raw_values(), last_);
    tile::commit<Arch>();
  }

  // Waits for the queries and splits the first keys. Called before the first `consumer_wait`.
  TILEWISE_DEVICE void wait_for_queries() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_ahead(false, last_ + 1, part);
    consumer_wait();
  }

  // Waits until what is read next has been split and what is written next is no longer read.
  TILEWISE_DEVICE void consumer_wait() const { ptx::sync_block(); }
  TILEWISE_DEVICE ptx::SharedAddress keys() const { return base_; }
  TILEWISE_DEVICE ptx::SharedAddress values() const { return base_ + 2 * kTileBytes; }
  // Nothing to do: rows past the last key are copied as 0.
  TILEWISE_DEVICE void zero_values_past_end(const QueryTile&, int32_t) const {}
  TILEWISE_DEVICE void consumer_release(bool, int32_t) {}

  // Splits part `part` of the stage that is read next, and copies a later one, while the scores
  // (`scores`) or the values of `tile` are computed. Only the latest copies are still in flight
  // then, and they belong to the other tensor.
  TILEWISE_DEVICE void load_ahead(bool scores, int32_t tile, int part) {
    if (part == 0) tile::wait<Arch, 1>();
    const Lanes lanes(opaque_thread<C>());
#pragma unroll
    for (int pass = part * TileCopy::kPartPasses; pass < (part + 1) * TileCopy::kPartPasses;
         pass += 2)
      split(scores, lanes, pass);
    if (scores)
      v_.copy(raw_values(), tile - 1, part);
    else
      k_.copy(raw_keys(), tile - 2, part);
    if (part == kParts - 1) tile::commit<Arch>();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress raw_keys() const { return base_ + 4 * kTileBytes; }
  TILEWISE_DEVICE ptx::SharedAddress raw_values() const { return base_ + 5 * kTileBytes; }

  TILEWISE_DEVICE void split(bool of_values, const Lanes& lanes, int pass) const {
    const ptx::SharedAddress raw = of_values ? raw_values() : raw_keys();
    uint32_t x[2][4];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      ptx::ld_shared_v4_b32(x[odd], raw + lanes.offset(pass + odd, 0));
    const int row = lanes.row_of(pass);
    if (of_values) {
      tile::PairTile<C::kHeadDim>::store(values(), row / 2, lanes.chunk, x[0], x[1]);
    } else {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        tile::store_split(keys() + tile::Swizzle<kRowBytes>::offset(row + odd, lanes.chunk),
                          kTileBytes, x[odd]);
      }
    }
  }

  TileCopy k_;
  TileCopy v_;
  ptx::SharedAddress base_;
  int32_t last_;
};

}  // namespace tilewise::cuda::mma_sync
