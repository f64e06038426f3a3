// The tiles of dbias (dbias.h), which the kernel dbias and simt's second_dbias share.
#pragma once

#include "cuda/common/block.h"
#include "cuda/common/dbias.h"

namespace tilewise::cuda::common {

// 16 x 16 threads with 4 rows and 4 keys each.
inline constexpr int kDbiasMicro = 4;
using DbiasMicro = float[kDbiasMicro][kDbiasMicro];

// The place of a tile in dbias: an index per dimension, or kAll where the CTA sums over it.
struct DbiasTile {
  static constexpr int32_t kAll = -1;
  static constexpr int kSide = kDbiasTile / kDbiasMicro;

  int32_t batch;
  int32_t head;
  int32_t row_tile;
  int32_t key_tile;

  TILEWISE_DEVICE static DbiasTile of(const Problem& p, const Gradients& g, int64_t block) {
    const DbiasShape shape = DbiasShape::of(p, g);
    const int64_t key_tile = block % shape.key_tiles();
    block /= shape.key_tiles();
    const int64_t row_tile = block % shape.row_tiles();
    block /= shape.row_tiles();
    const auto batch = static_cast<int32_t>(block / shape.heads);
    const auto head = static_cast<int32_t>(block % shape.heads);
    return {g.dbias_stride_batch == 0 ? kAll : batch, g.dbias_stride_head == 0 ? kAll : head,
            g.dbias_stride_row == 0 ? kAll : static_cast<int32_t>(row_tile),
            static_cast<int32_t>(key_tile)};
  }

  TILEWISE_DEVICE Range keys(const Gradients& g) const {
    return Tiling{g.dbias_keys, kDbiasTile}.at(key_tile);
  }

  // Calls add(head, row tile) for everything that the CTA sums over. begin(batch) loads a sequence
  // and returns its band; begin_rows(rows) precedes the heads of a tile of rows.
  template <class Begin, class BeginRows, class Add>
  TILEWISE_DEVICE void for_each_part(const Problem& p, const Gradients& g, const Begin& begin,
                                     const BeginRows& begin_rows, const Add& add) const {
    for (int32_t b = first_of(batch); b < end_of(batch, p.batch); ++b) {
      const Band& band = begin(b);
      const int64_t row_tiles = ceil_div(band.rows, kDbiasTile);
      for (int32_t i = first_of(row_tile); i < end_of(row_tile, row_tiles); ++i) {
        const Range rows = Tiling{band.rows, kDbiasTile}.at(i);
        if (rows.empty() || intersect(band.keys_of_any(rows), keys(g)).empty()) continue;
        begin_rows(rows);
        for (int32_t h = first_of(head); h < end_of(head, p.heads_q); ++h) add(h, i);
      }
    }
  }

  // Writes the sums of all threads. `scratch` has room for kSide * kDbiasStride words.
  TILEWISE_DEVICE void write(const DbiasMicro& sum, const Gradients& g,
                             const SharedWords& scratch) const {
    float* const out = g.dbias + int64_t{first_of(batch)} * g.dbias_stride_batch +
                       int64_t{first_of(head)} * g.dbias_stride_head;
    if (row_tile == kAll) return write_sum_of_rows(sum, out, keys(g), scratch);
    const int64_t first_row = int64_t{row_tile} * kDbiasTile + row_group() * kDbiasMicro;
    const int64_t first_key = int64_t{key_tile} * kDbiasTile + key_group() * kDbiasMicro;
#pragma unroll
    for (int i = 0; i < kDbiasMicro; ++i)
#pragma unroll
      for (int j = 0; j < kDbiasMicro; ++j)
        if (first_row + i < g.dbias_rows && first_key + j < g.dbias_keys)
          out[(first_row + i) * g.dbias_stride_row + first_key + j] = sum[i][j];
  }

 private:
  TILEWISE_DEVICE static int row_group() { return ptx::thread_index() / kSide; }
  TILEWISE_DEVICE static int key_group() { return ptx::thread_index() % kSide; }

  // The range of a dimension that the CTA visits: `index`, or all of it.
  TILEWISE_DEVICE static int32_t first_of(int32_t index) { return index == kAll ? 0 : index; }
  TILEWISE_DEVICE static int32_t end_of(int32_t index, int64_t count) {
    return index == kAll ? static_cast<int32_t>(count) : index + 1;
  }

  TILEWISE_DEVICE static void write_sum_of_rows(const DbiasMicro& sum, float* out, Range keys,
                                                const SharedWords& scratch) {
    ptx::sync_block();
#pragma unroll
    for (int j = 0; j < kDbiasMicro; ++j) {
      float of_thread = 0.0f;
#pragma unroll
      for (int i = 0; i < kDbiasMicro; ++i) of_thread += sum[i][j];
      scratch.set(row_group() * kDbiasStride + key_group() * kDbiasMicro + j,
                  ptx::bits_of(of_thread));
    }
    ptx::sync_block();
    const int key = ptx::thread_index();
    if (key >= keys.size()) return;
    float total = 0.0f;
    for (int i = 0; i < kSide; ++i) total += ptx::float_of(scratch.get(i * kDbiasStride + key));
    out[keys.begin + key] = total;
  }
};

}  // namespace tilewise::cuda::common
