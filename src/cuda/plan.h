// The planner of the CUDA backend, over any inventory of units: tests plan for builds and GPUs they
// do not have. Everything here is a pure function of its arguments and reads no index array.
#pragma once

#include "cuda/backend.h"
#include "cuda/params.h"
#include "cuda/tables.h"

namespace tilewise::cuda {

// The unit that serves the pass of a problem; null: none. The tile table is the GPU's own (or the
// forced one); when this build lacks it, the nearest lower one that the GPU can run and hold.
const UnitTable* find_forward(const Problem& p, Family family, const Gpu& gpu,
                              const Inventory& inside);
const UnitTable* find_backward(const Problem& p, const Gradients* g, Family family, const Gpu& gpu,
                               const Inventory& inside);

Plan plan_forward(const Problem& p, Family family, const Gpu& gpu, const Inventory& inside);
Plan plan_backward(const Problem& p, const Gradients& g, Family family, const Gpu& gpu,
                   const Inventory& inside);

// Whether the kernels' plain form serves: nothing general is asked for and every row that is read
// or written starts at a multiple of 16 bytes. Of the backward when `g` is given.
bool fits_plain(const Problem& p, const Gradients* g);

// The form that serves a forward.
Form forward_form(const Problem& p, const UnitTable& unit);

// Of a forward that wgmma leaves to the tiles that mma_sync has for decoding.
bool has_few_rows(const Problem& p);

// Why the wgmma family does not serve the pass, whatever the GPU; null: it does. The words follow
// "but ".
const char* why_not_wgmma(const Problem& p, const Gradients* g);

// Some row may not see a key of a tile that it meets, and its NaN would spoil it: see Flags, and
// RowRepair of the forward of wgmma. Not so where the limits of the band lie outside of every
// sequence, as those of one causal row do.
bool may_spoil(const Problem& p);

// Where things lie in the workspace, in bytes; a size of 0: not there.
struct Piece {
  int64_t offset = 0;
  int64_t bytes = 0;

  template <class T>
  T* in(void* workspace) const {
    return bytes == 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
};

struct ForwardPieces {
  Piece report;   // of the index check
  Piece fit;      // common::FitTask
  Piece table;    // TileOrder::table
  Piece counter;  // wgmma: TmaForwardParams::counter
  Piece before;   // wgmma: TmaForwardParams::before
  Piece flags;
  Piece arrivals;  // ForwardParams::arrivals
  Piece partial_out;
  Piece partial_lse;
  int64_t bytes = 0;
};
ForwardPieces forward_pieces(const Problem& p, const Plan& plan);

// Whether the main kernel of a forward leaves partial results to a second one.
bool leaves_results(const Plan& plan);

// Packed rows of a tile, at most.
int64_t packed_rows(const Problem& p, const Plan& plan);

struct BackwardPieces {
  Piece report;
  Piece fit;
  Piece table;
  Piece key_flags;
  Piece row_flags;
  Piece row_lse;
  Piece row_delta;
  Piece row_origin;
  Piece row_origin_low;
  Piece far_rows;
  Piece dq_sum;
  Piece turns;
  Piece records;  // wgmma: BackwardParams::records and counter
  Piece counter;
  Piece dscale_parts;
  Piece dsinks_parts;
  int64_t bytes = 0;
};
BackwardPieces backward_pieces(const Problem& p, const Gradients& g, const Plan& plan);

// Blocks of the kernels that take a tile of padded rows each.
int64_t row_blocks(const Problem& p, const Plan& plan);

}  // namespace tilewise::cuda
