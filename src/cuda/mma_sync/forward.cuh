// The forward on tensor cores of sm_75 and later: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
//
// A CTA computes one work tile: packed query rows of one key/value head of one sequence, or of one
// split or chunk of its keys. It walks the key tiles that its rows see from the last to the first.
//
// Roles: no warp is specialised; each loads and computes.
//   prefill   kForward.warps warps split the rows of the tile. All threads copy K and V with
//             cp.async (KvPipeline; on sm_75 with plain loads).
//   wide      from 257 columns on, two warps have the same rows and divide the columns
//             (forward_column_warps.h).
//   latent    as wide, over a latent cache, whose values are the first columns of its keys
//             (LatentPipeline); with few query rows, four warps divide the columns.
//   fp32      as prefill, but threads also split each tile into tf32 pairs (Tf32SplitPipeline).
//   decode    one warp has all rows, or two split the keys (forward_warp_split.h). With TMA each
//             warp has a pipeline of its own (WarpPipeline); otherwise decoding uses KvPipeline.
//
// What passes between them: Q stays in shared memory, scores and output in registers; K and V pass
// through a pipeline of stages in shared memory. In KvPipeline a stage is full when its cp.async
// group has completed and the CTA has met at a barrier, which also says that the stage read before
// is empty. In WarpPipeline a stage is full when its full barrier completes a phase, and program
// order says when it is empty.
//
// Loop over key tiles t, t - 1, ..., here of KvPipeline with 3 stages:
//   wait K(t)   S = Q K^T     while K(t - 1) is copied to the empty stage
//   mask, softmax: S becomes P
//   wait V(t)   O += P V      while V(t - 1) is copied to the empty stage
// Afterwards the rows are normalised. They leave through the shared memory of Q, or as a partial
// result that is combined by a cluster (forward_combine.h), by the CTA that finishes last
// (forward_chunk_combine.h) or by the combine kernel.
#pragma once

#include "cuda/common/longest_first.h"
#include "cuda/common/out.h"
#include "cuda/common/report.h"
#include "cuda/common/trigger_dependents.h"
#include "cuda/mma_sync/config.h"
#include "cuda/mma_sync/forward_chunk_combine.h"
#include "cuda/mma_sync/forward_column_warps.h"
#include "cuda/mma_sync/forward_exact_rows.h"
#include "cuda/mma_sync/forward_key_tiles.h"
#include "cuda/mma_sync/forward_products.h"
#include "cuda/mma_sync/forward_queries.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/mma_sync/forward_store.h"
#include "cuda/mma_sync/forward_warp_split.h"

namespace tilewise::cuda::mma_sync {

template <class C>
inline constexpr int kScorePartsAt = kPipelineAt<C> + Pipeline<C>::kBytes;
template <class C>
inline constexpr int kWarpSplitBytes = kScorePartsAt<C> + kScorePartsBytes<C>;  // of shared memory
template <class C>
inline constexpr int kForwardSharedBytes = C::kWarpSplits * kWarpSplitBytes<C>;
template <class C>
inline constexpr int kForwardThreads = C::kWarpSplits * C::kForward.threads();

// The flag that the CTA sets when its results are not finite. Without chunks each CTA has its own.
// With chunks it is the flag of the chunk or, if the tile has only one chunk, the flag of the tile.
template <class C>
TILEWISE_DEVICE uint8_t* flag_of(const ForwardParams& p, const QueryTile& q_tile) {
  if (!C::kDecodes || !p.chunks.any()) return p.flags.data + ptx::block_index();
  if (q_tile.splits > 1) return p.flags.of_chunk(chunk_result_index(p, q_tile));
  return p.flags.data + tile_of_chunk(p, q_tile);
}

// The sequence of the CTA. For contiguous keys loaded by TMA, all values that depend on it are
// computed in the registers of each lane instead of uniform registers. (H100, one sequence of 1k
// keys: 6.51 -> 6.40 us; but 27.7 -> 27.9 us for 16 sequences in pages, since lanes look pages up.)
template <class C>
TILEWISE_DEVICE int32_t per_lane_if_tma(int32_t sequence) {
  return C::kTma && !C::kPaged ? per_lane(sequence) : sequence;
}

// The tile of the CTA when the keys of a varlen batch are cut into chunks. The first chunk of a
// sequence holds the last keys, so its loads start before the CTA has counted the chunks of the
// batch; until `narrow_to_chunk` the tile has all keys of the sequence.
template <class C>
TILEWISE_DEVICE QueryTile find_chunk(const ForwardParamsOf<C>& p, ptx::SharedAddress pipeline) {
  const HeadChunk head_chunk = HeadChunk::of_block(p);
  const int32_t index = head_chunk.chunk;
  const bool is_early = C::kWarpPipeline && index < p.order.sequences;
  KeyChunk chunk = {index, 0, 1};
  if (!is_early) chunk = BatchChunks(p).find(index);
  if constexpr (C::kWarpPipeline) {
    if (is_early && p.chunks.longest_first()) chunk.sequence = LongestFirst(p).at(index);
  }
  if (is_early) Pipeline<C>::prefetch(p.problem, chunk.sequence, pipeline);
  chunk.sequence = per_lane_if_tma<C>(chunk.sequence);
  const TileOrder::WorkTile work_tile = {0, head_chunk.head, chunk.sequence, chunk.split};
  QueryTile q_tile = QueryTile::of(p, work_tile, C::kForward.keys, chunk.splits);
  q_tile.head_chunk = head_chunk;
  if (p.flags.data != nullptr && chunk.sequence >= 0 && ptx::thread_index() == 0) {
    *p.flags.of_chunk(chunk_result_index(p, q_tile)) = 0;
    if (q_tile.split == 0) p.flags.data[tile_of_chunk(p, q_tile)] = 0;
  }
  return q_tile;
}

template <class C>
TILEWISE_DEVICE void narrow_to_chunk(const ForwardParams& p, QueryTile& q_tile,
                                     Pipeline<C>& pipeline) {
  if (q_tile.split > 0) return;
  q_tile.narrow_to_first_split(BatchChunks(p).count(static_cast<int32_t>(q_tile.sequence.batch)));
  pipeline.narrow_to(q_tile.tiles.first);
}

// The query tile of the CTA. A decode has one tile per sequence, and its first load waits for every
// instruction before it, so it takes the shortest way to its tile.
template <class C>
TILEWISE_DEVICE QueryTile find_tile(const ForwardParamsOf<C>& p, ptx::SharedAddress pipeline) {
  constexpr int kKeys = C::kForward.keys;
  if constexpr (C::kDecodes) {
    if (p.chunks.any()) return find_chunk<C>(p, pipeline);
  }
  if (p.flags.data != nullptr && ptx::thread_index() == 0) p.flags.data[ptx::block_index()] = 0;
  if constexpr (C::kDecodes && !C::kGeneral) {
    TileOrder::WorkTile work_tile = p.order.at_only_tile(ptx::block_index());
    work_tile.sequence = per_lane_if_tma<C>(work_tile.sequence);
    Pipeline<C>::prefetch(p.problem, work_tile.sequence, pipeline);
    return QueryTile::of(p, work_tile, kKeys);
  } else {
    return QueryTile::of(p, p.order.at(ptx::block_index()), kKeys);
  }
}

// Factors of the scores and of the sums over values. With a float8 cache they contain the descales
// of the CTA's sequence and key/value head.
struct BlockFactors {
  float of_scores;
  float of_values;
};
template <class C>
TILEWISE_DEVICE BlockFactors factors_of(const ForwardParams& p, const QueryTile& q_tile) {
  if constexpr (!C::kFloat8) {
    return {score_of(p.problem).scale, 1.0f};
  } else {
    const int64_t batch = q_tile.sequence.batch;
    const int32_t head = p.group.quotient(q_tile.rows.first_head);
    return {score_of(p.problem, batch, head).scale, v_descale(p.problem, batch, head) * C::kKvUnit};
  }
}

// The factor from a score of the softmax to natural units. It is computed where it is used; it
// would otherwise occupy a register throughout the loop.
template <class C>
TILEWISE_DEVICE float unit_of_scores(const ForwardParams& p, const QueryTile& q_tile) {
  const float scale = positive_scale(factors_of<C>(p, q_tile).of_scores);
  if constexpr (C::kGeneral)
    return ForwardScoreMod<typename C::Storage>(p.problem, scale).unit(p.problem);
  return scale;
}

// Records that the block table points outside of the tensors. All threads of a warp split call it.
// `first_byte` is the offset of the warp split's shared memory.
template <class C>
TILEWISE_DEVICE void mark_pages_invalid(uint32_t first_byte) {
  if (row_thread<C>() == 0) saved_q_tile<C>(first_byte).sequence.fits = false;
  if constexpr (C::kWarpPipeline)
    ptx::sync_warp();
  else
    ptx::sync_block();
}

// Stores the rows of out and their lse.
template <class C>
TILEWISE_DEVICE void store_rows_and_lse(const Problem& problem, const QueryTile& q_tile,
                                        ptx::SharedAddress q, const LanePosition& position,
                                        const Outputs<C>& o,
                                        const RowResults<C::kForward.warp_rows / 16>& result) {
  if (C::kGeneral && widens_out<typename C::Storage>(problem)) [[unlikely]] {
    store_wide_outputs<false, typename C::Columns>(problem, q_tile, position, o, result);
  } else {
    ptx::sync_warp();
    stage_outputs<C>(problem, q_tile.rows.count, q, position, o, result);
    sync_column_warps<C>();
    store_outputs<C>(problem, q_tile, q);
  }
  store_lse(problem, q_tile, position, result);
}

// The entries of the block table that the CTA has looked up. In a WarpPipeline the first chunk of a
// sequence looks up tiles before it knows how many it has, so the last of them may belong to the
// next chunk; its rows are NaN if a page of those does not exist.
template <class C>
TILEWISE_DEVICE Range pages_looked_up(const ForwardParams& p, const QueryTile& q_tile) {
  constexpr int kKeys = C::kForward.keys;
  if constexpr (C::kWarpPipeline && C::kPaged)
    return q_tile.pages_from(p, q_tile.tiles.first_of_all_splits(kKeys), kKeys);
  else
    return q_tile.pages(p, kKeys);
}

template <class C>
TILEWISE_KERNEL(kForwardThreads<C>, C::kForward.blocks_per_sm)
void forward(TILEWISE_PARAMETER ForwardParamsOf<C> p) {
  const Problem& problem = p.problem;
  const int32_t warp_split = warp_split_index<C>();
  const uint32_t first_byte = static_cast<uint32_t>(warp_split * kWarpSplitBytes<C>);
  const ptx::SharedAddress q = ptx::shared_address(ptx::shared_memory()) + first_byte;
  Pipeline<C>::prepare(p, q + kPipelineAt<C>);
  ptx::griddepcontrol_wait();
  QueryTile q_tile = find_tile<C>(p, q + kPipelineAt<C>);
  if (!q_tile.any()) return;
  if constexpr (C::kMasked) masked_tiles<C>().find(p, q_tile);

  const ptx::SharedAddress q_of_warp =
      q + thread_of_rows<C>(row_thread<C>()) / ptx::kWarpSize *
              (C::kForward.warp_rows * C::kHeadDim * C::Element::kBytes);
  const uint32_t first_column = first_column_byte<C>();
  const int32_t last = ptx::uniform(q_tile.tiles.last) - warp_split;
  Pipeline<C> pipeline(p, q_tile, last, q + kPipelineAt<C>);
  pipeline.start([&] { load_queries<C>(problem, q_tile, q); });
  if constexpr (C::kWarpPipeline) {
    if (p.chunks.any()) narrow_to_chunk<C>(p, q_tile, pipeline);
    pipeline.fill_stages();
    if (p.arrivals != nullptr && q_tile.splits > 1) ChunkCombine<C>(p, q_tile).claim();
  }

  QueryTile& saved = saved_q_tile<C>(first_byte);
  q_tile.tiles.find_full(q_tile.rows, C::kForward.keys);
  if constexpr (C::kGeneral) {  // the other forms check while they look pages up
    if (q_tile.sequence.kv.pages != nullptr && row_thread<C>() < ptx::kWarpSize)
      q_tile.sequence.fits &= pages_fit(q_tile.sequence, q_tile.pages(p, C::kForward.keys));
  }
  if (row_thread<C>() == 0) saved = q_tile;
  const auto [signed_scale, value_factor] = factors_of<C>(p, q_tile);
  const float scale = positive_scale(signed_scale);
  const ForwardScoreMod<typename C::Storage> general(problem, scale);
  const bool dropout = C::kGeneral && general.dropout.on();
  pipeline.wait_for_queries();
  // Trigger the dependent launch only now: its scheduling reads would compete with ours.
  common::trigger_dependents(p, PdlTrigger::after_first_loads);
  const auto descales = prepare_queries<C>(problem, q, signed_scale < 0.0f);

  const Products<C> multiply;
  RowSoftmax<C> softmax((C::kGeneral ? general.unit(problem) : scale) * kLog2e, descales);
  Scores<C> s;
  Outputs<C> o;
  o.fill(0.0f);
  // Whether any row of the warp exists: two rows of 16 heads leave half of a tile of 64 empty.
  [[maybe_unused]] bool has_rows = true;
  if constexpr (C::kLatent) has_rows = ptx::uniform(lane_position<C>().row0) < saved.rows.count;
  auto step = [&](int32_t tile, auto masked) {
    [[maybe_unused]] bool full = true;
    if constexpr (C::kMasked) {
      full = masked_tiles<C>().is_full(tile);
      if (!full) masked_tiles<C>().find_bits(saved, tile);
    }
    pipeline.consumer_wait();
    if constexpr (C::kLatent) {
      if (!has_rows) return pipeline.skip(tile);
    }
    multiply.scores(s, q_of_warp + first_column, pipeline.keys() + first_column,  // S = Q K^T
                    [&](int part) { pipeline.load_ahead(true, tile, part); });
    if constexpr (C::kLatent) multiply.add_scores_after_values(s, q_of_warp, pipeline.keys());
    pipeline.consumer_release(true, tile);
    if constexpr (C::kColumnWarps > 1) add_score_parts<C>(s, q + kScorePartsAt<C>);

    if constexpr (C::kGeneral) {
      descales.apply(s);
      general.apply(problem, saved, s, tile, lane_position<C>());
    }
    if (masked) mask<C>(s, saved_q_tile<C>(first_byte), tile);
    if constexpr (C::kMasked) {
      if (!full) masked_tiles<C>().hide(s);
    }
    softmax.raise(s, o);      // m, and with it l and O, where the scores require it
    softmax.exponentiate(s);  // P = 2^(scale S - m), l += rowsum P
    if (dropout) {
      constexpr int kRows = C::kForward.warp_rows / 16;
      const auto rows = DropoutRows<kRows>::of(problem, saved, lane_position<C>());
      general.template draw<kRows, C::kForward.keys / 8>(rows, tile, lane_position<C>())
          .apply(s, lane_position<C>());
    }

    if constexpr (!C::kLatent) pipeline.consumer_wait();  // else the tile of the keys has them
    if (masked) pipeline.zero_values_past_end(saved_q_tile<C>(first_byte), tile);
    multiply.values(o, s, pipeline.values() + first_column,  // O += P V
                    [&](int part) { pipeline.load_ahead(false, tile, part); });
    pipeline.consumer_release(false, tile);
  };
  for_each_key_tile<C>(saved.tiles, last, step);

  common::trigger_dependents(p, PdlTrigger::before_epilogue);
  tile::wait<typename C::Arch, 0>();
  const bool combines = C::kWarpPipeline && p.cluster_combines && saved.splits > 1;
  if constexpr (C::kPaged) {
    if (!pipeline.pages_fit(saved)) [[unlikely]]
      mark_pages_invalid<C>(first_byte);
  }
  if constexpr (C::kWarpSplits > 1)
    combine_warp_splits<C>(o, softmax, warp_split, pipeline.combine_buffer().base,
                           kWarpSplitBytes<C>);
  if constexpr (C::kWarpPipeline) {
    if (combines) pipeline.release_to_cluster();
  }
  if (warp_split > 0) return;
  if constexpr (C::kFloat8) tile::pair_columns(o);
  const LanePosition position = output_position<C>();
  const float weight = (dropout ? general.dropout.keep_scale : 1.0f) * value_factor;
  // The fast forms of decoding cannot afford to test for large scores (needs_recompute).
  constexpr bool kExactRows = !C::kWarpPipeline;
  auto result =
      finish_rows<typename C::Element, kExactRows>(p, saved, position, softmax.m, softmax.l, weight,
                                                   [&] { return unit_of_scores<C>(p, saved); });
  if constexpr (kExactRows) mark_rows_to_recompute<C>(problem, saved, position, softmax, result);
  if constexpr (C::kWarpSplits > 1 && C::kPaged) {
    if (!saved_q_tile<C>(kWarpSplitBytes<C>).sequence.fits) [[unlikely]]
      mark_pages_invalid<C>(first_byte);
  }
  if (!saved.sequence.fits) [[unlikely]] {
    if (row_thread<C>() == 0)
      call_report_sequence<ForwardParams>(p, saved.sequence, pages_looked_up<C>(p, saved));
    result.set_to_nan();
  }
  if (p.flags.data != nullptr && !outputs_are_finite(saved, position, o, softmax.l)) [[unlikely]]
    *flag_of<C>(p, saved) = 1;  // barriers order it after the 0 of find_tile
  bool is_whole = saved.splits == 1;
  if constexpr (C::kWarpPipeline) {
    if (combines) {
      const ClusterCombine<C> combine(p, saved, pipeline.combine_buffer());
      combine.send(position, o, result);
      combine.store();
      return;
    }
    if (p.arrivals != nullptr && !is_whole) {
      ChunkCombine<C> combine(p, saved);
      combine.send(position, o, result);
      if (!combine.is_last()) return;
      combine.gather(position, o, result, pipeline.combine_buffer());
      is_whole = true;
    }
  }
  if (!is_whole) [[unlikely]] {
    store_partial<!C::kGeneral, typename C::Columns>(p, saved, position, o, result);
    return;
  }
  store_rows_and_lse<C>(problem, saved, q, position, o, result);
  if constexpr (kExactRows) recompute_rows<C>(p, saved, position, result);
}

}  // namespace tilewise::cuda::mma_sync
