/* Masks as data: arrays that say which pairs of a row and a key are visible. */
#ifndef TILEWISE_MASK_H
#define TILEWISE_MASK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A mask: which pairs of a row and a key of a sequence are visible, if the band allows them as
 * well. Rows and keys are counted within a sequence, keys from the first one after leftpad_k on.
 * Set struct_size = sizeof(tilewise_mask). All arrays are in the memory of the device; on a GPU
 * their entries are not checked, and invalid ones hide pairs; of the kind of a range, only the two
 * lowest bits are read there.
 *
 * Ranges: a set of rectangles; a pair is visible if at least one shows it. Entry e is
 * {row_begin, row_end, key_begin, key_end, kind}. What lies beyond the rows and keys of a sequence
 * is ignored.
 *
 * Blocks of 128 rows and 128 keys: list l = (b * heads + h) * ceil(rows / 128) + row block has the
 * visible key blocks in ascending order, without overlaps. Entry e is {block_begin, block_end,
 * bits}: with bits < 0 all pairs of these key blocks are visible; otherwise it is one key block,
 * and bits is its index in `bits`. Pairs beyond `rows` and `keys` are hidden. */
typedef enum tilewise_mask_kind {
  TILEWISE_MASK_RANGES = 1,
  TILEWISE_MASK_BLOCKS = 2
} tilewise_mask_kind;

/* The pairs of a rectangle of R rows and C keys: row i and key j of the rectangle. */
typedef enum tilewise_range_kind {
  TILEWISE_RANGE_FULL = 0,
  TILEWISE_RANGE_CAUSAL = 1,         /* j <= i + C - R: its last row sees its last key */
  TILEWISE_RANGE_INVERSE_CAUSAL = 2, /* j >= i: its first row sees its first key */
  TILEWISE_RANGE_BOTH = 3            /* i <= j <= i + C - R */
} tilewise_range_kind;

typedef struct tilewise_mask {
  uint32_t struct_size;
  int32_t kind;  /* tilewise_mask_kind */
  int64_t batch; /* B, or 1: the same mask for every sequence */
  int64_t heads; /* Hq, or 1: the same mask for every head; ranges: 1 */
  int64_t rows;  /* of a mask of blocks; ranges: not read */
  int64_t keys;
  const int32_t* first;   /* list l has entries first[l]..first[l + 1] - 1. Ranges have a list per
                             sequence of the mask: [batch + 1] */
  const int32_t* entries; /* [entry_count, 5] for ranges, [entry_count, 3] for blocks */
  int64_t entry_count;
  const uint32_t* bits; /* [bit_blocks, 128, 4]: bit j % 32 of word j / 32 is key j of the block */
  int64_t bit_blocks;
} tilewise_mask;

#ifdef __cplusplus
}
#endif

#endif /* TILEWISE_MASK_H */
