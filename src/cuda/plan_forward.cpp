// How a forward is cut: packed heads, order of the tiles, key splits, workspace. The points that
// limits of decoding separate: docs/lab/decode-planner-rules.md.
#include "cuda/arch/hopper.h"
#include "cuda/common/check.h"
#include "cuda/common/prepare.h"
#include "cuda/plan.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_shape.h"
#include "cuda/workspace.h"

namespace tilewise::cuda {
namespace {

// Blocks that share keys are to find them in L2: 32 of the 50 MB of an H200 measured best.
constexpr double kShareOfL2 = 0.65;
constexpr int64_t kLeastSection = 16;

// A split pays a pass over partial results, so a tile of rows has to have work for it.
constexpr int64_t kKeysOfSplit = 256;          // few rows: the time is that of reading the keys,
constexpr int64_t kKeysOfSplitOfWarp = 64;     // by blocks of a warp that of a few of them,
constexpr int64_t kKeysOfSplitOfFloat8 = 128;  // of as many bytes
constexpr int64_t kKeysOfSplitOfTile = 1024;   // whole tiles of rows: that of the products

// Short sequences leave a tile of one head nearly empty: all heads of a group then share it.
int32_t choose_pack(const Problem& p, int64_t tile) {
  const int64_t group = group_size(p);
  const int64_t rows = deciding_rows(p);  // rows that share a warp share decisions
  const bool saves_tiles = ceil_div(rows * group, tile) < group * ceil_div(rows, tile);
  return group > 1 && rows <= tile && saves_tiles ? static_cast<int32_t>(group) : 1;
}

// Longest tiles first: with causality alone those are the last ones, with a left window alone the
// first ones.
int32_t longest_first(const Problem& p) {
  if (p.window_right >= 0 && p.window_left < 0) return 1;
  return p.window_left >= 0 && p.window_right < 0 ? 2 : 0;
}

TileOrder choose_order(const Problem& p, const Gpu& gpu, int64_t tile, int32_t pack) {
  TileOrder order;
  order.tiles = static_cast<int32_t>(ceil_div(most_rows(p) * pack, tile));
  order.heads = static_cast<int32_t>(p.heads_q / pack);
  order.sequences = static_cast<int32_t>(p.batch);
  order.longest_first = order.tiles > 1 ? longest_first(p) : 0;
  const int64_t keys_and_values = usual_keys(p) * (p.head_dim + p.head_dim_v) * key_bytes(p);
  const auto budget = static_cast<int64_t>(gpu.l2_bytes * kShareOfL2);
  const int64_t section = pairs_within(keys_and_values, budget) * group_size(p) / pack;
  if (order.longest_first != 0) order.walk_together(max(section, kLeastSection));
  return order;
}

int64_t keys_of_split(const UnitTable& unit) {
  if (unit.forward_tile.rows > kDecodeRows) return kKeysOfSplit;
  return reads_float8(unit) ? kKeysOfSplitOfFloat8 : kKeysOfSplitOfWarp;
}

// The fewest splits that keep the GPU nearly as busy as it can be kept: whole waves of blocks.
int64_t choose_splits(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const UnitTable& unit = *plan.unit;
  if (p.num_splits > 0) return p.num_splits;
  const Tile& tile = unit.forward_tile;
  const int64_t slots = int64_t{gpu.multiprocessors} * max(1, tile.blocks_per_sm);
  if (blocks == 0 || blocks * 5 >= slots * 4) return 1;
  const int64_t rows = ceil_div(tile.rows, plan.pack);
  const int64_t key_tiles = ceil_div(keys_of_tile(p, min(rows, most_rows(p))), tile.keys);
  if (has_boxes(unit) && key_tiles > 0) return choose_splits_of_boxes(plan, gpu, blocks, key_tiles);
  const bool whole_tiles = most_rows(p) * plan.pack > tile.rows;
  const int64_t least = ceil_div(whole_tiles ? kKeysOfSplitOfTile : keys_of_split(unit), tile.keys);
  const int64_t most = min(kMostSplits, key_tiles / least);
  // Blocks over the slots of their waves, asked for growing numbers of splits: every launch of a
  // decode comes by here, and two divisions of 64-bit numbers for each took 2 us.
  const auto busy = [&](int64_t splits, int64_t& room) {
    while (room < blocks * splits) room += slots;
    return static_cast<double>(blocks * splits) / static_cast<double>(room);
  };
  double best = 0.0;
  int64_t room = slots;
  for (int64_t s = 1; s <= most; ++s) best = max(best, busy(s, room));
  room = slots;
  for (int64_t s = 1; s <= most; ++s) {
    if (busy(s, room) < 0.85 * best) continue;
    // Splits are whole tiles: more of them that are not shorter leave the last ones empty.
    if (s == 1 || ceil_div(key_tiles, s) < ceil_div(key_tiles, s - 1)) return s;
  }
  return 1;
}

// Batch-invariant: from a sequence's own lengths, for a GPU that it has to itself. Whoever has more
// than a few rows has blocks enough.
SplitRule invariant_rule(const Problem& p, int64_t tile_rows) {
  constexpr int64_t kBlocks = 256;
  constexpr int64_t kRows = 8;
  return {kKeysOfSplit, max<int64_t>(1, kBlocks / p.heads_kv),
          min(kRows, max<int64_t>(1, tile_rows / group_size(p)))};
}

// Lengths that only the GPU knows, where no warp can count the parts: one is small enough for a
// batch that fills a fourth of its room, which says how many blocks there are. Those of a short
// sequence end at once.
SplitRule uneven_rule(const Problem& p, const Gpu& gpu, const UnitTable& unit, int64_t blocks) {
  const Tile& tile = unit.forward_tile;
  const int64_t slots = int64_t{gpu.multiprocessors} * max(1, tile.blocks_per_sm);
  // Blocks over what the GPU runs at once. Few pairs have more partial results for their keys.
  const int64_t times = blocks * 2 > slots ? 4 : 2;
  // Keys of a part when there are `parts` of them. In double, which no sizes overflow; the rule
  // divides 32 bits.
  const auto share = [&](int64_t parts) {
    const double keys = __builtin_ceil(static_cast<double>(most_keys(p)) *
                                       static_cast<double>(blocks) / static_cast<double>(parts));
    return static_cast<int64_t>(min(keys, static_cast<double>(INT32_MAX)));
  };
  // Parts of one tile are nothing but a start and an end: a second turn of them comes late.
  const int64_t least = max<int64_t>(tile.keys, min<int64_t>(share(slots), 2 * tile.keys));
  return {max(max(keys_of_split(unit), least), share(slots * times)), kMostSplits};
}

// Where multiprocessors have several tiles each, sequences of up to 2k keys are not cut when the
// longest one is no longer than what a multiprocessor has to read, more or less.
int32_t fourths_of_uncut(const Gpu& gpu, int64_t blocks) {
  return static_cast<int32_t>(
      clamp(blocks * 23 / (5 * gpu.multiprocessors), EqualParts::kFourths, 1 << 20));
}

// Whether long sequences come first, and what is longer than its share is cut: of more tiles than
// run at once, or of nearly as many where caches have room for 2k keys, the last ones are short
// then. Each block looks at all lengths.
bool has_long_first(const Problem& p, const Plan& plan, int64_t blocks, int64_t slots) {
  constexpr int64_t kMostSorted = 256;
  constexpr int64_t kRoom = 32;  // tiles
  const bool some_wait = blocks > slots;
  const bool nearly = blocks * 4 > slots * 3 && most_keys(p) >= kRoom * plan.tile_k;
  return has_warp_rings(plan) && p.batch <= kMostSorted && (some_wait || nearly);
}

// The same where one can: a long sequence is cut where short ones are not, and sequences of lengths
// that are alike as many times as without lengths. There is room for two blocks a multiprocessor,
// and one that may be short for each sequence. Where parts are merged by the last block or blocks
// are alone, there is room for one more on each multiprocessor: of a larger grid the hardware gives
// some of them a part too many, and others none, and blocks without a part come last. Of few long
// sequences of many heads these are too few to cut all that are too long.
EqualParts equal_parts(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  constexpr int64_t kLeastOthers = 8;
  int64_t keys = 0;
  if (!checked_mul(p.batch, max<int64_t>(1, most_keys(p)), &keys) || keys > 1 << 30 ||
      blocks > INT32_MAX / (8 * kDecodeRows))
    return {};  // more than 32 bits count
  const int64_t all = gpu.multiprocessors;
  const int64_t heads = max<int64_t>(1, blocks / p.batch);
  const bool merges = merges_parts(p, plan, gpu, blocks);
  const int64_t tiles = ceil_div(max<int64_t>(1, most_keys(p)), int64_t{plan.tile_k});
  const int64_t readers = readers_of_multiprocessor(plan);
  int64_t most = max(readers * all / heads, p.batch) + p.batch;
  if (merges || plan.alone) {
    most = ((ceil_div(blocks, all) + 1) * all - 1) / heads;
  }
  EqualParts parts;
  if (blocks > 3 * all && tiles > EqualParts::kShort) most = max(most, p.batch + kLeastOthers);
  most = clamp(most, plan.splits * p.batch, tiles * p.batch);
  if (merges) most = min(most, p.batch + PartArrivals::kMost - 1);
  parts.most = static_cast<int32_t>(most);
  parts.alike = static_cast<int32_t>(min(plan.splits, most / p.batch));
  parts.tile = plan.tile_k;
  if (merges) parts.fourths = fourths_of_uncut(gpu, blocks);
  const int64_t slots = all * max(1, plan.unit->forward_tile.blocks_per_sm);
  if (has_long_first(p, plan, blocks, slots))
    parts.at_once = static_cast<int32_t>(max<int64_t>(1, slots / heads));
  return parts;
}

// Whether lengths that only the GPU knows are better cut into as many splits each, which clusters
// merge: parts of equal length save less than they cost where no block has more than a few tiles.
bool are_better_cut_alike(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                          int64_t splits) {
  const int64_t tiles = ceil_div(most_keys(p), int64_t{plan.tile_k});
  if (!has_warp_rings(plan)) return false;
  return plan.clusters > 0 || are_few_cut_alike(gpu, blocks, tiles) ||
         (ceil_div(tiles, splits) <= few_tiles(plan) &&
          are_better_merged(plan, gpu, blocks, splits, tiles));
}

// Of a decode whose lengths only the GPU knows: parts or, where it cannot count them, a rule.
void split_unevenly(Plan& plan, const Problem& p, const Gpu& gpu, int64_t blocks) {
  if (plan.family == Family::mma_sync && plan.unit->forward_tile.rows == kDecodeRows)
    plan.parts = equal_parts(p, plan, gpu, blocks);
  plan.merges_parts = plan.parts.any() && merges_parts(p, plan, gpu, blocks);
  plan.splits = 1;
  plan.rule = {};
  if (plan.parts.any()) return;
  const SplitRule rule = uneven_rule(p, gpu, *plan.unit, blocks);
  plan.splits = rule.parts(most_rows(p), most_keys(p));
  if (plan.splits > 1) plan.rule = rule;
}

// Sets splits or parts, the rule that gives them to sequences, and where their results lie.
void split(Plan& plan, const Problem& p, const Gpu& gpu, int64_t blocks) {
  if (p.batch_invariant != 0) {
    plan.rule = invariant_rule(p, plan.tile_q);
    const bool alike = !ragged_rows(p) && p.seqused_q == nullptr;
    plan.splits = plan.rule.parts(alike ? p.seqlen_q : 0, most_keys(p));
    if (!alike) plan.pitch = static_cast<int32_t>(plan.rule.rows);
    return;
  }
  plan.splits = choose_splits(p, plan, gpu, blocks);
  plan.rule = {0, plan.splits, INT64_MAX};
  const bool decoding = most_rows(p) * group_size(p) <= kDecodeRows;
  if (are_uneven(p) && decoding && p.num_splits == 0 &&
      !are_better_cut_alike(p, plan, gpu, blocks, plan.splits))
    split_unevenly(plan, p, gpu, blocks);
}

// Whether a tile of rows sees as many keys more than its neighbour as any other tile, where the
// band has one limit. Not so where more than a tile of rows see none, or all: rounds would take
// longer than a counter (simulated: by 1 to 3 % up to there, by 21 % with twice as many rows as
// keys).
bool tiles_grow_evenly(const Problem& p, int64_t rows_of_tile) {
  const int64_t more_rows = most_rows(p) - most_keys(p);
  const int64_t alike = p.window_right >= 0 ? max(more_rows, p.window_right)
                                            : more_rows + min(p.window_left, most_keys(p));
  return alike <= rows_of_tile;
}

// Whether the blocks of the splits of a tile become a cluster, which merges them.
bool merges_splits(const Problem& p, const Plan& plan, const Gpu& gpu) {
  if (plan.clusters > 0) return plan.splits > 1;
  return has_warp_rings(plan) && !plan.parts.any() &&
         are_better_merged(plan, gpu, plan.blocks / plan.splits, plan.splits,
                           ceil_div(keys_of_tile(p, most_rows(p)), plan.tile_k));
}

// The main kernel's, or that of a second one with a block for each row of splits.
int64_t largest_grid(const Problem& p, const Plan& plan) {
  const bool by_rows = plan.splits > 1 && leaves_results(plan);
  return by_rows ? max(plan.blocks, total_rows(p) * p.heads_q) : plan.blocks;
}

// Whether blocks take the works in rounds: causal ones, where lengths follow from the shape.
bool deals_in_rounds(const Problem& p, const Plan& plan) {
  return plan.family == Family::wgmma && plan.order.longest_first != 0 && shape_says_all(p) &&
         tiles_grow_evenly(p, plan.tile_q / plan.pack) && plan.splits == 1;
}

// What sharing costs, in products of a multiprocessor: starts, ends and the second kernel, and for
// each number of partial results (H200: 6 us, and 0.4 us a MB).
constexpr int64_t kProductsOfSharing = int64_t{16} << 20;
constexpr int64_t kProductsOfNumber = 5;

// The works of a round that is not full, where sharing them saves more of it than that costs: of
// wgmma's plain form, where all works have as many key tiles.
Shares share_last_round(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool alike = p.window_left < 0 && p.window_right < 0 && shape_says_all(p);
  if (plan.family != Family::wgmma || plan.form != Form::plain || plan.pack > 1 || !alike ||
      p.batch_invariant != 0 || p.num_splits > 0)
    return {};
  const int64_t all = gpu.multiprocessors;
  const int64_t works = blocks % all;
  const int64_t key_tiles = ceil_div(p.seqlen_k, plan.tile_k);
  if (works == 0 || key_tiles == 0 || works * key_tiles > INT32_MAX) return {};
  if (blocks * (Shares::kMostParts - 1) < all) return {};  // blocks would be idle: key splits
  // A work may begin and end inside of a stretch.
  const int64_t stretch =
      max(ceil_div(works * key_tiles, all), ceil_div(key_tiles, int64_t{Shares::kMostParts - 1}));
  Shares shares;
  shares.works = static_cast<int32_t>(works);
  shares.first = static_cast<int32_t>(blocks - works);
  shares.key_tiles = static_cast<int32_t>(key_tiles);
  shares.stretch = static_cast<int32_t>(stretch);
  shares.columns = plan.unit->head_dim_v;
  const int64_t of_key_tile = plan.tile_q * plan.tile_k * (plan.unit->head_dim + shares.columns);
  const int64_t numbers = int64_t{shares.slots()} * plan.tile_q * shares.columns;
  const bool pays =
      (key_tiles - stretch) * of_key_tile >= kProductsOfSharing + kProductsOfNumber * numbers;
  return pays ? shares : Shares{};
}

}  // namespace

bool leaves_results(const Plan& plan) {
  if (plan.shares.any()) return true;
  return plan.parts.any() ? !plan.merges_parts : plan.splits > 1 && plan.cluster == 1;
}

int64_t packed_rows(const Problem& p, const Plan& plan) { return most_rows(p) * plan.pack; }

Plan plan_forward(const Problem& p, Family family, const Gpu& gpu, const Inventory& inside) {
  Plan plan;
  plan.family = family;
  plan.unit = find_forward(p, family, gpu, inside);
  if (plan.unit == nullptr) return plan;
  const UnitTable& unit = *plan.unit;
  plan.form = forward_form(p, unit);
  plan.architecture = unit.architecture;
  plan.head_dim = unit.head_dim;
  plan.tile_q = unit.forward_tile.rows;
  plan.tile_k = unit.forward_tile.keys;
  plan.pack = choose_pack(p, plan.tile_q);
  const Size tiles = most_tiles(ragged_rows(p), p.seqlen_q * plan.pack, most_rows(p) * plan.pack,
                                p.batch, plan.tile_q);
  const int64_t blocks = (tiles * (p.heads_q / plan.pack)).value();
  plan.grid = blocks;
  if (!plan.can_be_launched()) return plan;
  plan.order = choose_order(p, gpu, plan.tile_q, plan.pack);
  plan.alone = reads_alone(p, plan, gpu, blocks);
  plan.clusters = choose_clusters(p, plan, gpu, blocks);
  plan.readers = choose_readers(p, plan, gpu, blocks);
  plan.slots = choose_slots(plan, gpu, blocks);
  plan.shares = share_last_round(p, plan, gpu, blocks);
  if (!plan.shares.any()) split(plan, p, gpu, blocks);
  plan.tiles = static_cast<int32_t>(blocks);
  plan.blocks =
      plan.parts.any() ? int64_t{plan.parts.most} * plan.order.heads : blocks * plan.splits;
  plan.spread = spread_parts(plan, gpu, ceil_div(most_keys(p), int64_t{plan.tile_k}));
  plan.order.splits = static_cast<int32_t>(plan.splits);
  if (merges_splits(p, plan, gpu)) plan.cluster = static_cast<int32_t>(plan.splits);
  plan.grid = largest_grid(p, plan);
  if (!plan.can_be_launched()) return plan;
  // wgmma's plain form is the lean one: instructions that a launch does not run cost it, too.
  const bool shared = plan.pack > 1 || plan.splits > 1;
  if (family == Family::wgmma && shared) plan.form = Form::general;
  if (deals_in_rounds(p, plan)) {
    plan.order.walk_in_rounds(gpu.multiprocessors);
  } else if (family == Family::wgmma && plan.blocks > gpu.multiprocessors) {
    // Works of different lengths: who is done takes the next one.
    plan.counts_works = ragged_rows(p) || may_spoil(p);
  }
  if (family == Family::mma_sync && may_spoil(p))
    plan.second = find_forward(p, Family::simt, gpu, inside);
  plan.next = next_start(plan, gpu);
  plan.next_of_merge = next_start_of_merge(p, plan, gpu);
  plan.workspace_bytes = forward_pieces(p, plan).bytes;
  return plan;
}

Plan plan_forward(const Problem& p, Family family, const Gpu& gpu) {
  return plan_forward(p, family, gpu, inventory());
}

ForwardPieces forward_pieces(const Problem& p, const Plan& plan) {
  Workspace workspace;
  ForwardPieces pieces;
  if (p.check != 0) pieces.report = workspace.take<IndexFault>(1);
  pieces.fit = workspace.take<int32_t>(common::FitTask::entries_of_forward(p));
  if (ragged_rows(p) && plan.order.tiles > 1)
    pieces.table = workspace.take<TileOrder::Entry>(p.batch + 1);
  if (plan.counts_works) pieces.counter = workspace.take<int32_t>(4);
  if (plan.family == Family::wgmma)
    pieces.before =
        workspace.take<int32_t>(plan.blocks * plan.tile_q / arch::WgmmaForwardTile::kRowsOfWarp);
  if (plan.second != nullptr)
    pieces.flags = workspace.take<uint8_t>(plan.blocks + (plan.parts.any() ? plan.tiles : 0));
  if (plan.merges_parts) pieces.arrivals = workspace.take<PartArrivals>(plan.tiles);
  if (plan.parts.any() || leaves_results(plan)) {
    const Size rows = plan.shares.any() ? Size(plan.shares.slots()) * plan.tile_q
                      : plan.parts.any()
                          ? Size(plan.blocks) * packed_rows(p, plan)
                          : Size(partial_rows(p, plan.pitch)) * p.heads_q * plan.splits;
    // Who merges parts keeps lse behind the columns, of which there are those of the tile.
    const int64_t columns = plan.merges_parts   ? plan.head_dim + 4
                            : plan.shares.any() ? plan.shares.columns
                                                : p.head_dim_v;
    pieces.partial_out = workspace.take<float>(rows * columns);
    pieces.partial_lse = workspace.take<float>(plan.merges_parts ? Size(0) : rows);
  }
  pieces.bytes = workspace.bytes();
  return pieces;
}

}  // namespace tilewise::cuda
