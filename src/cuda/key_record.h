// What a block of the wgmma backward works on. The prepare kernel writes it, so that the main
// kernel starts with loads instead of arithmetic.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

struct alignas(16) KeyRecord {
  int32_t steps;  // tiles of rows of all heads of the group; -1: no more work
  // The walk over them (wgmma/backward_work.h).
  int32_t row;
  int32_t row_end;
  int32_t query_head;
  int32_t tile_index;
  int32_t skipped_tiles;
  // Coordinates in the tensor maps.
  int32_t first_row;  // of the sequence
  int32_t row_slot;
  int32_t first_key;  // of the block
  int32_t key_slot;
  int32_t head;  // of K and V
  int32_t paged;
  // Rows and keys from there on are not of the sequence, and TMA reads what they hold.
  int32_t rows_to_keep;
  int32_t keys_to_keep;
  int32_t peer_keys_to_keep;  // of the other block of the cluster
  // Tiles of rows that start here need no mask.
  int32_t clear_begin;
  int32_t clear_end;
  // Row i sees the keys i + low ... i + high.
  int32_t low;
  int32_t high;
  int32_t rows;  // of the sequence
  int32_t keys;
  int32_t key;        // first one of the block, in the sequence
  int32_t key_count;  // of the block
  int32_t key_tile;   // of the cluster, in the sequence
  int32_t batch;
  int32_t index;  // of the piece of work
  int32_t unused[2];
  int64_t dk;  // offsets of the first key in dk and dv, in elements
  int64_t dv;
};
static_assert(sizeof(KeyRecord) == 128);

}  // namespace tilewise::cuda
