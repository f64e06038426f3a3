// Launches on the CPU: enumerates work items, gives every worker its scratch memory, and zeroes the
// outputs that no work item writes.
#include "cpu/backend.h"

#include <algorithm>

#include "cpu/work_items.h"

namespace tilewise::cpu {
namespace {

// Zeroes dk and dv of all keys if some keys are unused. Their first dimension is the batch if they
// have rows per sequence (pages, kv_batch_idx), otherwise kv_batch, or 1 with variable lengths.
void zero_key_gradients(const Problem& p, const Gradients& g, const Parallel& parallel) {
  const bool per_sequence = keys_per_sequence(p);
  const bool varlen = p.cu_seqlens_k != nullptr && !per_sequence;
  const bool every_key_used = p.seqused_k == nullptr && p.leftpad_k == nullptr &&
                              p.cu_seqlens_k == nullptr && (per_sequence || p.kv_batch == p.batch);
  if (every_key_used) return;
  const Dtypes dtypes = dtypes_of(p);
  const int64_t batches = varlen ? 1 : per_sequence ? p.batch : p.kv_batch;
  const int64_t keys = key_capacity(p);
  run_items(parallel, batches * keys, batches * keys * p.heads_kv * p.head_dim,
            [&](int64_t, int64_t i) {
              const int64_t batch = i / keys;
              const int64_t key = i % keys;
              if (g.dk.data != nullptr)
                zero_row(dtypes.kv, g.dk, batch * g.dk.stride_batch + key * g.dk.stride_row,
                         p.heads_kv, p.head_dim);
              if (g.dv.data != nullptr)
                zero_row(dtypes.kv, g.dv, batch * g.dv.stride_batch + key * g.dv.stride_row,
                         p.heads_kv, p.head_dim_v);
            });
}

void zero_unused_outputs(const Problem& p) {
  for_unused_rows(p, [&](const Sequence& s, int64_t i) {
    zero_row(dtypes_of(p).out, p.out, s.row_offset(p.out, i), p.heads_q, p.head_dim_v);
    if (p.lse == nullptr) return;
    for (int64_t h = 0; h < p.heads_q; ++h) {
      const int64_t at = s.lse_offset(p.lse_stride_batch, i) + h * p.lse_stride_head;
      p.lse[at] = -__builtin_huge_valf();
      if (p.lse_low != nullptr) p.lse_low[at] = 0.0f;
    }
  });
}

struct ForwardLaunch {
  const Problem& p;
  const Plan& plan;
  const Parallel& parallel;
  const Shape shape;
  const Kernels& kernels;
  const ForwardLayout layout;
  const QueryTiles tiles;

  ForwardLaunch(const Problem& problem, const Plan& a_plan, Arena& arena,
                const Parallel& a_parallel)
      : p(problem),
        plan(a_plan),
        parallel(a_parallel),
        shape(forward_shape(p, plan.isa)),
        kernels(kernels_for(plan.isa, dtypes_of(p).q)),
        layout(p, shape, plan, arena),
        tiles(p, plan.tile_q, layout.first_tile) {
    layout.first_key_tile[0] = 0;
    for (int64_t b = 0; b < p.batch; ++b)
      layout.first_key_tile[b + 1] =
          layout.first_key_tile[b] + ceil_div(sequence_of(p, b).band.keys, shape.tile_k);
  }

  Arena scratch(int64_t worker) const {
    return Arena{layout.scratch + worker * layout.scratch_bytes};
  }

  // The packed key tiles of a head are contiguous, and so are the heads of a sequence.
  int64_t key_tile_id(int64_t b, int64_t kv_head, int64_t tile) const {
    const int64_t count = layout.first_key_tile[b + 1] - layout.first_key_tile[b];
    return layout.first_key_tile[b] * p.heads_kv + kv_head * count + tile;
  }

  void pack_keys() const {
    const int64_t max_tiles = ceil_div(tiles.max_keys, shape.tile_k);
    const int64_t work =
        saturating_work(tiles.max_keys * tiles.heads(), p.head_dim + p.head_dim_v, 1);
    run_items(parallel, max_tiles * tiles.heads(), work, [&](int64_t worker, int64_t i) {
      const int64_t b = i / max_tiles / p.heads_kv;
      const int64_t kv_head = i / max_tiles % p.heads_kv;
      PackTask task{.problem = &p,
                    .sequence = sequence_of(p, b),
                    .kv_head = kv_head,
                    .keys = {},
                    .packed = nullptr,
                    .nonfinite = nullptr};
      const Tiling keys{task.sequence.band.keys, shape.tile_k};
      if (i % max_tiles >= keys.count()) return;
      const int64_t id = key_tile_id(b, kv_head, i % max_tiles);
      task.keys = keys.at(i % max_tiles);
      task.packed = layout.packed + id * layout.packed_units;
      task.nonfinite = layout.nonfinite + id;
      kernels.pack(task, scratch(worker));
    });
  }

  int64_t splits_of(const Sequence& s) const { return plan.rule.splits(s.band.rows, s.band.keys); }

  ForwardTask task_of(int64_t b, int64_t kv_head, int64_t tile, int64_t split) const {
    ForwardTask task{};
    task.problem = &p;
    task.sequence = sequence_of(p, b);
    task.kv_head = kv_head;
    task.heads = min(plan.heads, p.heads_kv - kv_head);
    task.packed_rows = tiles.tiling(task.sequence).at(tile);
    const int64_t splits = splits_of(task.sequence);
    task.keys = key_split({0, task.sequence.band.keys}, splits, split, shape.tile_k);
    task.first_split = split == 0;
    task.core = core();
    if (layout.packed != nullptr) {
      const int64_t first = key_tile_id(b, kv_head, 0);
      task.packed = layout.packed + first * layout.packed_units;
      task.nonfinite = layout.nonfinite + first;
    }
    if (splits > 1) {
      const int64_t id =
          plan.rule.min_keys > 0 ? b * p.heads_kv + kv_head : tiles.id(b, kv_head, tile);
      const int64_t row = (id * plan.splits + split) * layout.partial_rows;
      task.partial_out = layout.partial_out + row * p.head_dim_v;
      task.partial_lse = layout.partial_lse + row;
      task.partial_low = layout.partial_low + row;
      task.partial_stride = plan.splits * layout.partial_rows;
    }
    return task;
  }

  // Number of items for all tiles and heads, with `step` heads per item. Items count down from the
  // last tile, because with a causal band the last tiles are the longest.
  int64_t items(int64_t step) const {
    return tiles.max_tiles * p.batch * ceil_div(p.heads_kv, step);
  }
  template <class Body>
  void for_tile(int64_t i, int64_t step, const Body& body) const {
    const int64_t groups = ceil_div(p.heads_kv, step);
    const int64_t tile = tiles.max_tiles - 1 - i / (p.batch * groups);
    const int64_t b = i / groups % p.batch;
    if (tile < tiles.first_tile[b + 1] - tiles.first_tile[b]) body(b, i % groups * step, tile);
  }

  void run() const {
    zero_unused_outputs(p);
    if (p.max_logits != nullptr)
      std::fill_n(p.max_logits, p.batch * p.heads_q, -__builtin_huge_valf());
    if (layout.packed != nullptr) pack_keys();
    const auto kernel = is_decoding(p, plan.isa) ? kernels.decode : kernels.forward;
    const int64_t items_per_split = items(plan.heads);
    const int64_t work = saturating_work(tiles.total * plan.tile_q, tiles.max_keys + 1,
                                         (p.head_dim + p.head_dim_v) * p.heads_kv);
    // Splits are the outer loop, so the same keys of all heads are read one after the other: they
    // lie side by side in memory, in the same pages.
    run_items(parallel, items_per_split * plan.splits, work, [&](int64_t worker, int64_t i) {
      const int64_t split = i / items_per_split;
      for_tile(i % items_per_split, plan.heads, [&](int64_t b, int64_t kv_head, int64_t tile) {
        if (split < splits_of(sequence_of(p, b)))
          kernel(task_of(b, kv_head, tile, split), scratch(worker));
      });
    });
    if (plan.splits == 1) return;
    run_items(parallel, items(1), work / max(int64_t{1}, tiles.max_keys), [&](int64_t, int64_t i) {
      for_tile(i, 1, [&](int64_t b, int64_t kv_head, int64_t tile) {
        const int64_t splits = splits_of(sequence_of(p, b));
        if (splits > 1) kernels.combine(task_of(b, kv_head, tile, 0), splits, layout.partial_rows);
      });
    });
  }
};

// Pass::backward or, with tangents, Pass::second.
struct BackwardLaunch {
  const Problem& p;
  const Gradients& g;
  const Tangents* const t;  // null for Pass::backward
  const Plan& plan;
  const Parallel& parallel;
  const Shape shape;
  const Kernels& kernels;
  const BackwardLayout layout;
  const QueryTiles tiles;
  const int64_t chunk;

  BackwardLaunch(const Problem& problem, const Gradients& gradients, const Tangents* tangents,
                 const Plan& a_plan, Arena& arena, const Parallel& a_parallel)
      : p(problem),
        g(gradients),
        t(tangents),
        plan(a_plan),
        parallel(a_parallel),
        shape(shape_of(plan.isa, dtypes_of(p).q)),
        kernels(kernels_for(plan.isa, dtypes_of(p).q)),
        layout(p, g, t, shape, plan, arena),
        tiles(p, shape.back_q, layout.first_tile),
        chunk(back_chunk(shape, p)) {}

  Incoming incoming() const { return t != nullptr ? Incoming::of(*t) : Incoming::of(g); }

  int64_t work() const {
    return saturating_work(tiles.total * shape.back_q, tiles.max_keys + 1,
                           (p.head_dim + p.head_dim_v) * p.heads_kv);
  }

  RowTask row_task(int64_t i) const {
    const int64_t tile = i / p.heads_kv;
    int64_t b = 0;  // the last sequence that starts at or before the tile
    for (int64_t high = p.batch; high - b > 1;) {
      const int64_t middle = (b + high) / 2;
      (tiles.first_tile[middle] <= tile ? b : high) = middle;
    }
    RowTask task{};
    task.problem = &p;
    task.gradients = &g;
    task.tangents = t;
    task.incoming = incoming();
    task.sequence = sequence_of(p, b);
    task.kv_head = i % p.heads_kv;
    task.packed_rows = tiles.tiling(task.sequence).at(tile - tiles.first_tile[b]);
    task.delta = layout.delta + i * shape.back_q;
    if (t != nullptr) task.second_delta = layout.second_delta + i * shape.back_q;
    task.dsinks = layout.dsinks != nullptr ? layout.dsinks + i * shape.back_q : nullptr;
    if (layout.dq_sum != nullptr && layout.dq_semaphores[i] != 0)
      task.dq_sum = layout.dq_sum + i * layout.dq_tile;
    task.dscale = layout.dscale != nullptr ? layout.dscale + i : nullptr;
    return task;
  }

  void run_chunk(int64_t worker, int64_t b, int64_t kv_head, int64_t index) const {
    BackwardTask task{};
    task.problem = &p;
    task.gradients = &g;
    task.tangents = t;
    task.incoming = incoming();
    task.sequence = sequence_of(p, b);
    task.kv_head = kv_head;
    task.chunk = index;
    const Tiling chunks{task.sequence.band.keys, chunk};
    if (index >= chunks.count()) return;
    task.keys = chunks.at(index);
    // Tiles of one head of a sequence are heads_kv apart in the per-tile arrays.
    const int64_t first = tiles.id(b, kv_head, 0);
    task.tile_stride = p.heads_kv;
    task.dq_sum = layout.dq_sum != nullptr ? layout.dq_sum + first * layout.dq_tile : nullptr;
    task.delta = layout.delta + first * shape.back_q;
    task.dq_semaphores = layout.dq_semaphores + first;
    task.chunks = layout.chunks != nullptr ? layout.chunks + first * layout.chunk_words : nullptr;
    task.chunk_words = layout.chunk_words;
    if (t != nullptr) task.second_delta = layout.second_delta + first * shape.back_q;
    if (layout.chunk_dscale != nullptr) {
      const int64_t id = first_chunk(task.sequence) + index;
      task.dscale = layout.chunk_dscale + id * p.heads_kv + kv_head;
    }
    const auto kernel = t != nullptr ? kernels.second : kernels.backward;
    kernel(task, Arena{layout.scratch + worker * layout.scratch_bytes});
  }

  // The number of a sequence's first chunk among the chunks of all sequences. Every chunk has a
  // number of its own, which is below layout.key_chunks / heads_kv.
  int64_t first_chunk(const Sequence& s) const {
    return p.cu_seqlens_k != nullptr ? s.kv.first / chunk + s.batch
                                     : s.batch * ceil_div(p.seqlen_k, chunk);
  }

  // Chunks of different heads run in parallel; those of one head start in ascending order, the
  // order in which their contributions to dq are added. If bias is broadcast over batch or heads,
  // several heads add to the same dbias: then one item computes all of them for its keys.
  void run_chunks() const {
    const int64_t max_chunks = ceil_div(tiles.max_keys, chunk);
    const bool shared_dbias =
        g.dbias != nullptr && (g.dbias_stride_batch == 0 || g.dbias_stride_head == 0);
    const int64_t heads = tiles.heads();
    const int64_t items = max_chunks * (shared_dbias ? 1 : heads);
    run_items(parallel, items, work(), [&](int64_t worker, int64_t i) {
      const int64_t first = shared_dbias ? 0 : i % heads;
      const int64_t count = shared_dbias ? heads : 1;
      for (int64_t head = first; head < first + count; ++head)
        run_chunk(worker, head / p.heads_kv, head % p.heads_kv, shared_dbias ? i : i / heads);
    });
  }

  // With a mask: which chunks of keys a query tile sees.
  void find_chunks(int64_t worker, int64_t i) const {
    const RowTask task = row_task(i);
    const Sequence& s = task.sequence;
    const ChunkSet set{layout.chunks + i * layout.chunk_words};
    std::memset(set.words, 0, static_cast<size_t>(layout.chunk_words) * sizeof(uint64_t));
    const Packing packing{group_size(p)};
    const Range rows = packing.rows(task.packed_rows);
    const Range heads = {task.kv_head * packing.group, (task.kv_head + 1) * packing.group};
    Arena scratch{layout.scratch + worker * layout.scratch_bytes};
    const Range seen = s.band.keys_of_any(rows);
    const Mask mask =
        Mask::of(p.mask, s.batch).narrowed(rows, seen, scratch.take<int32_t>(mask_rectangles(p)));
    const Tiling chunks{s.band.keys, chunk};
    const Range touched = chunks.touching(intersect(seen, mask.keys_of_any(heads, rows)));
    for (int64_t c = touched.begin; c < touched.end; ++c)
      if (mask.coverage(heads, rows, chunks.at(c)) != Coverage::none) set.insert(c);
  }

  void zero_dbias() const {
    const int64_t batches = g.dbias_stride_batch == 0 ? 1 : p.batch;
    const int64_t heads = g.dbias_stride_head == 0 ? 1 : p.heads_q;
    const int64_t rows = g.dbias_stride_row == 0 ? 1 : g.dbias_rows;
    run_items(parallel, batches * heads * rows, batches * heads * rows * g.dbias_keys,
              [&](int64_t, int64_t i) {
                float* const row = g.dbias + i / (heads * rows) * g.dbias_stride_batch +
                                   i / rows % heads * g.dbias_stride_head +
                                   i % rows * g.dbias_stride_row;
                std::memset(row, 0, static_cast<size_t>(g.dbias_keys) * sizeof(float));
              });
  }

  // Sums in ascending order of tiles and rows, in double, so that the result is rounded once.
  void reduce_dsinks() const {
    const Packing packing{group_size(p)};
    run_items(parallel, p.heads_q, p.heads_q * tiles.total * shape.back_q,
              [&](int64_t, int64_t head) {
                double sum = 0.0;
                for (int64_t tile = 0; tile < tiles.total; ++tile) {
                  const RowTask task = row_task(tile * p.heads_kv + head / packing.group);
                  for (int64_t i = 0; i < task.packed_rows.size(); ++i)
                    if (packing.head(task.packed_rows.begin + i) == head % packing.group)
                      sum += static_cast<double>(task.dsinks[i]);
                }
                g.dsinks[head] = static_cast<float>(sum);
              });
  }

  void reduce_dscale() const {
    double sum = 0.0;
    if (t != nullptr) {
      for (int64_t i = 0; i < layout.key_chunks; ++i) sum += layout.chunk_dscale[i];
    } else {
      for (int64_t i = 0; i < tiles.total * p.heads_kv; ++i)
        sum += static_cast<double>(layout.dscale[i]);
    }
    *g.dscale = static_cast<float>(sum);
  }

  void run() const {
    const int64_t row_tasks = tiles.total * p.heads_kv;
    const int64_t row_work = row_tasks * shape.back_q * p.head_dim_v;
    std::memset(layout.dq_semaphores, 0, static_cast<size_t>(row_tasks) * sizeof(int32_t));
    zero_key_gradients(p, g, parallel);
    if (g.dbias != nullptr) zero_dbias();
    if (g.dq.data != nullptr)
      for_unused_rows(p, [&](const Sequence& s, int64_t i) {
        zero_row(dtypes_of(p).q, g.dq, s.row_offset(g.dq, i), p.heads_q, p.head_dim);
      });
    if (layout.chunk_dscale != nullptr) std::fill_n(layout.chunk_dscale, layout.key_chunks, 0.0);
    const auto rows_kernel = t != nullptr ? kernels.second_rows : kernels.delta;
    run_items(parallel, row_tasks, row_work, [&](int64_t, int64_t i) { rows_kernel(row_task(i)); });
    if (layout.chunks != nullptr)
      run_items(parallel, row_tasks, row_work,
                [&](int64_t worker, int64_t i) { find_chunks(worker, i); });
    run_chunks();
    if (layout.dq_sum != nullptr)
      run_items(parallel, row_tasks, row_work,
                [&](int64_t, int64_t i) { kernels.finish_dq(row_task(i)); });
    if (g.dsinks != nullptr) reduce_dsinks();
    if (g.dscale != nullptr) reduce_dscale();
  }
};

struct JvpLaunch {
  const Problem& p;
  const Tangents& t;
  const Plan& plan;
  const Parallel& parallel;
  const Kernels& kernels;
  const JvpLayout layout;
  const QueryTiles tiles;

  JvpLaunch(const Problem& problem, const Tangents& tangents, const Plan& a_plan, Arena& arena,
            const Parallel& a_parallel)
      : p(problem),
        t(tangents),
        plan(a_plan),
        parallel(a_parallel),
        kernels(kernels_for(plan.isa, dtypes_of(p).q)),
        layout(p, t, shape_of(plan.isa, dtypes_of(p).q), plan, arena),
        tiles(p, plan.tile_q, layout.first_tile) {}

  void zero_unused_rows() const {
    for_unused_rows(p, [&](const Sequence& s, int64_t i) {
      zero_row(dtypes_of(p).out, t.out, s.row_offset(t.out, i), p.heads_q, p.head_dim_v);
      for (int64_t h = 0; t.lse != nullptr && h < p.heads_q; ++h)
        t.lse[s.lse_offset(t.lse_stride_batch, i) + h * t.lse_stride_head] = 0.0f;
    });
  }

  // Items count down from the last tile, because with a causal band the last tiles are the longest.
  void run() const {
    zero_unused_rows();
    const int64_t work = saturating_work(tiles.total * plan.tile_q, tiles.max_keys + 1,
                                         (p.head_dim + p.head_dim_v) * p.heads_kv);
    run_items(parallel, tiles.max_tiles * tiles.heads(), work, [&](int64_t worker, int64_t i) {
      const int64_t tile = tiles.max_tiles - 1 - i / tiles.heads();
      const int64_t b = i / p.heads_kv % p.batch;
      if (tile >= tiles.first_tile[b + 1] - tiles.first_tile[b]) return;
      JvpTask task{.problem = &p,
                   .tangents = &t,
                   .sequence = sequence_of(p, b),
                   .kv_head = i % p.heads_kv,
                   .packed_rows = {}};
      task.packed_rows = tiles.tiling(task.sequence).at(tile);
      kernels.jvp(task, Arena{layout.scratch + worker * layout.scratch_bytes});
    });
  }
};

}  // namespace

void launch(const Request& request, const Plan& plan, void* workspace, const Parallel& parallel) {
  Arena arena{static_cast<char*>(workspace)};
  switch (request.pass) {
    case Pass::forward:
      return ForwardLaunch(request.problem, plan, arena, parallel).run();
    case Pass::backward:
      return BackwardLaunch(request.problem, request.gradients, nullptr, plan, arena, parallel)
          .run();
    case Pass::jvp:
      return JvpLaunch(request.problem, request.tangents, plan, arena, parallel).run();
    case Pass::second:
      return BackwardLaunch(request.problem, request.gradients, &request.tangents, plan, arena,
                            parallel)
          .run();
  }
}

}  // namespace tilewise::cpu
