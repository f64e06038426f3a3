// The forward on tensor cores of sm_75 and later: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
//
// A block owns a tile of packed query rows, shared out to its warps, and walks the key tiles that
// they see from the last to the first. Q stays in shared memory, the scores and the output in
// registers; K and V pass through a ring of shared tiles.
#pragma once

#include <cfloat>
#include <numeric>
#include <type_traits>

#include "cuda/common/long_first.h"
#include "cuda/common/report.h"
#include "cuda/common/trigger_dependents.h"
#include "cuda/mma_sync/config.h"
#include "cuda/mma_sync/forward_lost.h"
#include "cuda/mma_sync/forward_parts.h"
#include "cuda/mma_sync/forward_queries.h"
#include "cuda/mma_sync/forward_readers.h"
#include "cuda/mma_sync/forward_ring.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/mma_sync/forward_split.h"
#include "cuda/mma_sync/forward_store.h"
#include "cuda/mma_sync/forward_warp_ring.h"

namespace tilewise::cuda::mma_sync {

template <class C>
auto feed_of() {
  if constexpr (C::kWarpRing)
    return std::type_identity<WarpRing<C>>{};
  else if constexpr (C::kSplitOnce)
    return std::type_identity<SplitFeed<C>>{};
  else
    return std::type_identity<KvRing<C>>{};
}
template <class C>
using KvFeed = typename decltype(feed_of<C>())::type;

template <class C>
inline constexpr int kReaderBytes = kFeedAt<C> + KvFeed<C>::kBytes;  // of shared memory
template <class C>
inline constexpr int kForwardSharedBytes = C::kReaders * kReaderBytes<C>;
template <class C>
inline constexpr int kForwardThreads = C::kReaders * C::kForward.threads();

// The two products of a warp. `ask(part)` issues the copies of the ring between the instructions.
template <class C>
struct Products {
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  static constexpr int kRows = C::kForward.warp_rows / 16;
  static constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  static constexpr int kStep = tile::kStep<Element>;
  static constexpr int kParts = KvFeed<C>::kParts;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr bool kOne = tile::kStepsInCore<Element> == 0;  // sum for all steps
  // Sums at work at once, when they are many: products into one sum wait for each other.
  static constexpr int kAtOnce = 8;
  static constexpr int kWide = C::kFloat8 ? 2 : 1;  // steps, or 16 columns, of one load

  tile::LaneOffsets<kRowBytes, tile::Lanes::rows_first> q_lanes{ptx::lane_index()};
  typename KvFeed<C>::KeyLanes k_lanes{ptx::lane_index()};
  typename KvFeed<C>::ValueLanes v_lanes{ptx::lane_index()};

  // s = q k^T
  template <class Ask>
  TILEWISE_DEVICE void scores(Scores<C>& s, ptx::SharedAddress q, ptx::SharedAddress k,
                              Ask&& ask) const {
    constexpr int kSteps = C::kHeadDim / kStep;
    constexpr int kInCore = kOne ? kSteps : std::gcd(kSteps, tile::kStepsInCore<Element>);
    constexpr int kKeysAtOnce = kOne ? 1 : min(kKeys / 16, max(1, kAtOnce / (2 * kRows)));
    constexpr int kGroups = kOne ? 1 : max(1, kAtOnce / (2 * kRows * kKeysAtOnce));
    constexpr int kApart = kWide > 1 ? 1 : kInCore;  // steps of neighbouring fragments
#pragma unroll
    for (int group = 0; group < kSteps / kInCore; group += kGroups) {
      const int begin = group * kInCore;
      Scores<C> part[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) part[g].fill(0.0f);
#pragma unroll
      for (int step = begin; step < begin + kInCore; step += kWide) {
        tile::Fragment<Element> a[kGroups * kWide][kRows];
#pragma unroll
        for (int g = 0; g < kGroups * kWide; ++g) {
#pragma unroll
          for (int m = 0; m < kRows; ++m)
            a[g][m] = tile::load_joined<Element>(q_lanes.address(q, 16 * m, step + g * kApart));
        }
#pragma unroll
        for (int j = 0; j < kKeys / 16; j += kKeysAtOnce) {
          tile::Fragment<Element> b[kGroups * kWide][kKeysAtOnce];
#pragma unroll
          for (int i = 0; i < kGroups * kKeysAtOnce; ++i) {
            load_keys(b, i,
                      k_lanes.address(k, 16 * (j + i % kKeysAtOnce),
                                      step / kWide + i / kKeysAtOnce * kInCore));
          }
          // Terms outermost: those of one sum wait for each other.
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int g = 0; g < kGroups * kWide; ++g) {
#pragma unroll
              for (int m = 0; m < kRows; ++m) {
#pragma unroll
                for (int n = 0; n < 2 * kKeysAtOnce; ++n) {
                  tile::multiply_term<Arch>(part[g / kWide].x[m][2 * j + n], a[g][m], b[g][n / 2],
                                            n % 2, term);
                }
              }
            }
          }
        }
        ask_between(step, kSteps, ask);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group + g == 0)
          s = part[g];
        else
          s.add(part[g], 0);
      }
    }
  }

  // o += p v
  template <class Ask>
  TILEWISE_DEVICE void values(Outputs<C>& o, const Scores<C>& p, ptx::SharedAddress v,
                              Ask&& ask) const {
    constexpr int kSteps = kKeys / kStep;
    constexpr int kInCore = kOne ? 1 : std::gcd(kSteps, tile::kStepsInCore<Element>);
    constexpr int kColumns = C::kHeadDim / 16;
    // Registers for o and p, and for sums and operands of 16 columns.
    constexpr int kKept = kRows * C::kHeadDim / 2 + kInCore * kRows * 8;
    constexpr int kMost = max(1, kAtOnce / (2 * kRows));
    constexpr bool kRoom = kKept + kMost * (8 * kRows + 8) <= 208;
    constexpr int kColumnsAtOnce = kOne ? kWide : kRoom ? kMost : max(1, kMost / 2);
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += kInCore) {
      tile::Fragment<Element> a[kInCore][kRows];
#pragma unroll
      for (int i = 0; i < kInCore; ++i) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) a[i][m] = tile::operand_of<Element>(p.x[m], begin + i);
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += kColumnsAtOnce) {
        tile::Sums<kRows, 2 * kColumnsAtOnce> part;
        part.fill(0.0f);
#pragma unroll
        for (int i = 0; i < kInCore; ++i) {
          tile::Fragment<Element> b[kColumnsAtOnce];
          load_values(b, v, (begin + i) * kStep, j);
#pragma unroll
          for (int term = 0; term < tile::kTerms<Element>; ++term) {
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
#pragma unroll
              for (int n = 0; n < 2 * kColumnsAtOnce; ++n) {
                float (&sum)[4] = kOne ? o.x[m][2 * j + n] : part.x[m][n];
                tile::multiply_term<Arch>(sum, a[i][m], b[n / 2], n % 2, term);
              }
            }
          }
        }
        if (!kOne) {
          o.add(part, 2 * j);
          ask_between(begin * kColumns + j * kInCore, kSteps * kColumns, ask);
        }
      }
      if (kOne) ask_between(begin, kSteps, ask);
    }
  }

 private:
  // Load `i` of those of a step, which come in the order of groups and keys.
  template <int kFragments, int kAtOnceOfKeys>
  TILEWISE_DEVICE static void load_keys(tile::Fragment<Element> (&b)[kFragments][kAtOnceOfKeys],
                                        int i, ptx::SharedAddress address) {
    tile::Fragment<Element>& first = b[i / kAtOnceOfKeys][i % kAtOnceOfKeys];
    if constexpr (C::kFloat8) {
      tile::load_float8<C::kConverts>(first, b[1][0], address);
    } else if constexpr (C::kSplitOnce) {
      first = tile::load_split(address, KvFeed<C>::kTileBytes);
    } else {
      first = tile::load<Element>(address);
    }
  }

  // kStep rows from `row` on, 16 columns each from 16 `column` on.
  template <int kFragments>
  TILEWISE_DEVICE void load_values(tile::Fragment<Element> (&b)[kFragments], ptx::SharedAddress v,
                                   int row, int column) const {
    if constexpr (C::kFloat8) {
      v_lanes.load(b, v, row, column / kWide);
    } else {
#pragma unroll
      for (int c = 0; c < kFragments; ++c) b[c] = v_lanes.load_whole(v, row, column + c);
    }
  }

  template <class Ask>
  TILEWISE_DEVICE static void ask_between(int step, int steps, Ask& ask) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (step == part * steps / kParts) ask(part);
    }
  }
};

// The flag of a work: of its block or, with equal parts, of its part or, where that is all, its
// tile.
template <class C>
TILEWISE_DEVICE uint8_t* flag_of(const ForwardParams& p, const BlockWork& work) {
  if (!C::kDecodes || !p.chunks.any()) return p.flags.data + ptx::block_index();
  if (work.splits > 1) return p.flags.of_chunk(place_of_part(p, work));
  return p.flags.data + tile_of_part(p, work);
}

// The sequence that a block is for: how fast all that follows from it is found. (H100, one sequence
// of 1k keys: 6.51 -> 6.40 us; but 27.7 -> 27.9 for 16 of them in pages, which lanes look up.)
template <class C>
TILEWISE_DEVICE int32_t chosen(int32_t sequence) {
  return C::kBoxes && !C::kPaged ? of_lanes(sequence) : sequence;
}

// What the block has of a batch in equal parts. The keys of a first part are asked for before the
// parts have been counted (`keep_part`), since they end where its sequence does; until then it has
// all of them.
template <class C>
TILEWISE_DEVICE BlockWork find_part(const ForwardParamsOf<C>& p, ptx::SharedAddress feed) {
  const PartPlace at = PartPlace::of_block(p);
  const int32_t place = at.in_line;
  const bool is_early = C::kWarpRing && place < p.order.sequences;
  KeyPart part = {place, 0, 1};
  if (!is_early) part = BatchChunks(p).find(place);
  if constexpr (C::kWarpRing) {
    if (is_early && p.chunks.long_first()) part.sequence = LongFirst(p).at(place);
  }
  if (is_early) KvFeed<C>::foresee(p.problem, part.sequence, feed);
  part.sequence = chosen<C>(part.sequence);
  const TileOrder::WorkTile of = {0, at.head, part.sequence, part.split};
  BlockWork work = BlockWork::of(p, of, C::kForward.keys, part.splits);
  work.part = at;
  if (p.flags.data != nullptr && part.sequence >= 0 && ptx::thread_index() == 0) {
    *p.flags.of_chunk(place_of_part(p, work)) = 0;
    if (work.split == 0) p.flags.data[tile_of_part(p, work)] = 0;
  }
  return work;
}

template <class C>
TILEWISE_DEVICE void keep_part(const ForwardParams& p, BlockWork& work, KvFeed<C>& feed) {
  if (work.split > 0) return;
  work.keep_first_split(BatchChunks(p).count(static_cast<int32_t>(work.sequence.batch)));
  feed.keep(work.tiles.first);
}

// Which work the block takes. Decoding has one tile a sequence, and its first load waits for every
// instruction before it.
template <class C>
TILEWISE_DEVICE BlockWork find_work(const ForwardParamsOf<C>& p, ptx::SharedAddress feed) {
  constexpr int kKeys = C::kForward.keys;
  if constexpr (C::kDecodes) {
    if (p.chunks.any()) return find_part<C>(p, feed);
  }
  if (p.flags.data != nullptr && ptx::thread_index() == 0) p.flags.data[ptx::block_index()] = 0;
  if constexpr (C::kDecodes && !C::kGeneral) {
    TileOrder::WorkTile work = p.order.at_only_tile(ptx::block_index());
    work.sequence = chosen<C>(work.sequence);
    KvFeed<C>::foresee(p.problem, work.sequence, feed);
    return BlockWork::of(p, work, kKeys);
  } else {
    return BlockWork::of(p, p.order.at(ptx::block_index()), kKeys);
  }
}

// What the scores and the sums over values are multiplied by. The factors of a float8 cache are
// those of the sequence and head that the block is for.
struct BlockFactors {
  float of_scores;
  float of_values;
};
template <class C>
TILEWISE_DEVICE BlockFactors factors_of(const ForwardParams& p, const BlockWork& work) {
  if constexpr (!C::kFloat8) {
    return {score_of(p.problem).scale, 1.0f};
  } else {
    const int64_t batch = work.sequence.batch;
    const int32_t head = p.group.quotient(work.rows.first_head);
    return {score_of(p.problem, batch, head).scale,
            v_descale(p.problem, batch, head) * C::kCachedUnit};
  }
}

// -inf stays -inf when it is multiplied by it.
TILEWISE_DEVICE float positive(float scale) {
  return scale == 0.0f ? FLT_MIN : scale < 0.0f ? -scale : scale;
}

// What a score of the softmax is in natural units. Computed where it is asked for: it would
// otherwise wait in a register through the loop.
template <class C>
TILEWISE_DEVICE float unit_of_scores(const ForwardParams& p, const BlockWork& work) {
  const float scale = positive(factors_of<C>(p, work).of_scores);
  if constexpr (C::kGeneral)
    return GeneralTerms<typename C::Storage>(p.problem, scale).unit(p.problem);
  return scale;
}

// The block table has led out of the tensors, as all threads of a reader know.
template <class C>
TILEWISE_DEVICE void lose_pages(uint32_t own) {
  if (row_thread<C>() == 0) kept_work<C>(own).sequence.fits = false;
  if constexpr (C::kWarpRing)
    ptx::sync_warp();
  else
    ptx::sync_block();
}

template <class C>
TILEWISE_KERNEL(kForwardThreads<C>, C::kForward.blocks_per_sm)
void forward(TILEWISE_PARAMETER ForwardParamsOf<C> p) {
  const Problem& problem = p.problem;
  const int32_t reader = reader_index<C>();
  const uint32_t own = static_cast<uint32_t>(reader * kReaderBytes<C>);
  const ptx::SharedAddress q = ptx::shared_address(ptx::shared_memory()) + own;
  KvFeed<C>::prepare(p, q + kFeedAt<C>);
  ptx::griddepcontrol_wait();
  BlockWork work = find_work<C>(p, q + kFeedAt<C>);
  if (!work.any()) return;

  const ptx::SharedAddress q_of_warp =
      q +
      row_thread<C>() / ptx::kWarpSize * (C::kForward.warp_rows * C::kHeadDim * C::Element::kBytes);
  const int32_t last = uniform(work.tiles.last) - reader;
  KvFeed<C> feed(p, work, last, q + kFeedAt<C>);
  feed.start([&] { load_queries<C>(problem, work, q); });
  if constexpr (C::kWarpRing) {
    if (p.chunks.any()) keep_part<C>(p, work, feed);
    feed.fill();
    if (p.arrivals != nullptr && work.splits > 1) ChunksMerge<C>(p, work).expect();
  }

  BlockWork& kept = kept_work<C>(own);
  work.tiles.find_full(work.rows, C::kForward.keys);
  if constexpr (C::kGeneral) {  // others see it when they look pages up
    if (work.sequence.kv.pages != nullptr && row_thread<C>() < ptx::kWarpSize)
      work.sequence.fits &= pages_fit(work.sequence, work.pages(p, C::kForward.keys));
  }
  if (row_thread<C>() == 0) kept = work;
  const auto [asked, of_values] = factors_of<C>(p, work);
  const float scale = positive(asked);
  const GeneralTerms<typename C::Storage> general(problem, scale);
  const bool dropout = C::kGeneral && general.dropout.on();
  feed.begin();
  // Who comes next had better not look for his work while we do.
  common::trigger_dependents(p, PdlTrigger::after_first_loads);
  const auto units = prepare_queries<C>(problem, q_of_warp, asked < 0.0f);

  const Products<C> multiply;
  RowSoftmax<C> softmax((C::kGeneral ? general.unit(problem) : scale) * kLog2e, units);
  Scores<C> s;
  Outputs<C> o;
  o.fill(0.0f);
  auto step = [&](int32_t tile, auto masked) {
    feed.arrive();
    multiply.scores(s, q_of_warp, feed.keys(), [&](int part) { feed.ask(true, tile, part); });
    feed.release(true, tile);

    if constexpr (C::kGeneral) {
      units.apply(s);
      general.apply(problem, kept, s, tile, lane_place<C>());
    }
    if (masked) mask<C>(s, kept_work<C>(own), tile);
    softmax.raise(s, o);
    softmax.exponentiate(s);
    if (dropout) {
      constexpr int kRows = C::kForward.warp_rows / 16;
      const auto rows = DropoutRows<kRows>::of(problem, kept, lane_place<C>());
      general.template draw<kRows, C::kForward.keys / 8>(rows, tile, lane_place<C>())
          .apply(s, lane_place<C>());
    }

    feed.arrive();
    if (masked) feed.clear_strangers(kept_work<C>(own), tile);
    multiply.values(o, s, feed.values(), [&](int part) { feed.ask(false, tile, part); });
    feed.release(false, tile);
  };
  int32_t tile = last;
  if constexpr (C::kGeneral) {
#pragma unroll 1
    for (; tile >= kept.tiles.first; tile -= C::kReaders) step(tile, kept.tiles.masked(tile));
  } else {
#pragma unroll 1
    while (tile >= kept.tiles.first) {
      if (tile < kept.tiles.full_end) {
        const int32_t full_begin = uniform(kept.tiles.full_begin);
#pragma unroll 1
        for (; tile >= full_begin; tile -= C::kReaders) step(tile, std::false_type{});
      }
      if (tile < kept.tiles.first) break;
      step(tile, std::true_type{});
      tile -= C::kReaders;
    }
  }

  common::trigger_dependents(p, PdlTrigger::before_epilogue);
  tile::wait<typename C::Arch, 0>();
  const bool merges = C::kWarpRing && p.cluster_combines && kept.splits > 1;
  if constexpr (C::kPaged) {
    if (!feed.pages_fit(kept)) [[unlikely]]
      lose_pages<C>(own);
  }
  if constexpr (C::kReaders > 1)
    join_readers<C>(o, softmax, reader, feed.idle().base, kReaderBytes<C>);
  if constexpr (C::kWarpRing) {
    if (merges) feed.let_go();
  }
  if (reader > 0) return;
  if constexpr (C::kFloat8) tile::pair_columns(o);
  const LanePlace place = lane_place<C>();
  const float weight = (dropout ? general.dropout.keep_scale : 1.0f) * of_values;
  // The plain forms of decoding have no instruction to spare for scores beyond fp32's exponents.
  constexpr bool kTellsLost = !C::kWarpRing;
  auto result = finish_rows<typename C::Element, kTellsLost>(
      p, kept, place, softmax.m, softmax.l, weight, [&] { return unit_of_scores<C>(p, kept); });
  if constexpr (kTellsLost) mark_lost<C>(problem, kept, place, softmax, result);
  if constexpr (C::kReaders > 1 && C::kPaged) {
    if (!kept_work<C>(kReaderBytes<C>).sequence.fits) [[unlikely]]
      lose_pages<C>(own);
  }
  if (!kept.sequence.fits) [[unlikely]] {
    if (row_thread<C>() == 0)
      call_report_sequence<ForwardParams>(p, kept.sequence, kept.pages(p, C::kForward.keys));
    result.spoil();
  }
  if (p.flags.data != nullptr && !outputs_are_finite(kept, place, o, softmax.l)) [[unlikely]]
    *flag_of<C>(p, kept) = 1;  // after the 0: barriers lie between
  bool is_whole = kept.splits == 1;
  if constexpr (C::kWarpRing) {
    if (merges) {
      const ClusterMerge<C> merge(p, kept, feed.idle());
      merge.send(place, o, result);
      merge.store();
      return;
    }
    if (p.arrivals != nullptr && !is_whole) {
      ChunksMerge<C> merge(p, kept);
      merge.send(place, o, result);
      if (!merge.is_last()) return;
      merge.gather(place, o, result, feed.idle());
      is_whole = true;
    }
  }
  if (!is_whole) [[unlikely]] {
    store_partial<!C::kGeneral, typename C::Columns>(p, kept, place, o, result);
    return;
  }
  ptx::sync_warp();
  stage_outputs<C>(problem, kept.rows.count, q, place, o, result);
  ptx::sync_warp();
  store_outputs<C>(problem, kept, q);
  store_lse(problem, kept, place, result);
  if constexpr (kTellsLost) compute_lost<C>(problem, kept, place, result);
}

}  // namespace tilewise::cuda::mma_sync
