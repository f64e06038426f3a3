// The descriptor of a work tile of the wgmma backward. The prepare kernel writes it, so that the
// main kernel starts with loads instead of address arithmetic.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

struct alignas(16) TileDescriptor {
  int32_t steps;  // row tiles over all heads of the GQA group; -1: past the last work tile
  // The loop over row tiles (wgmma/backward_tile.h).
  int32_t row;
  int32_t row_end;
  int32_t query_head;
  int32_t tile_index;
  int32_t skipped_tiles;
  // Coordinates in the tensor maps.
  int32_t first_row;  // of the sequence
  int32_t row_batch_index;
  int32_t first_key;  // of the CTA
  int32_t key_batch_index;
  int32_t head;  // of K and V
  int32_t paged;
  // Rows and keys from these counts on belong to another sequence, although TMA loads them.
  int32_t valid_rows;
  int32_t valid_keys;
  int32_t peer_valid_keys;  // of the other CTA of the cluster
  // Row tiles that start at a row in [unmasked_begin, unmasked_end) need no mask.
  int32_t unmasked_begin;
  int32_t unmasked_end;
  // Row i attends to keys i + low to i + high, both included.
  int32_t low;
  int32_t high;
  int32_t rows;  // of the sequence
  int32_t keys;
  int32_t key;        // first key of the CTA within the sequence
  int32_t key_count;  // of the CTA
  int32_t key_tile;   // of the cluster within the sequence
  int32_t batch;
  int32_t index;  // of the work tile
  int32_t shift;  // row i is aligned with key i + shift (Band::shift)
  int32_t unused;
  int64_t dk;  // offset of the CTA's first key in dk, in elements; likewise for dv
  int64_t dv;
};
static_assert(sizeof(TileDescriptor) == 128);

}  // namespace tilewise::cuda
