// The tile types of the tables in this folder: how kernels divide their problems. A tile may change
// the speed of a kernel, never its results.
#pragma once

#include <cstdint>

namespace tilewise::cuda::arch {

// Forward (mma_sync): `warps` warps of `warp_rows` query rows each. Keys and values pass through
// one pipeline of `stages` tiles of `keys` rows. With `stages` 0 (fp32) K and V each have one tile
// to load into, and two tiles for the tf32 pairs into which the CTA then splits them. Where out has
// more columns than the registers of a warp hold, `column_warps` neighbouring warps have the same
// rows and divide the columns.
struct ForwardTile {
  int warps;
  int warp_rows;  // 16 or 32
  int keys;
  int stages;
  int blocks_per_sm;
  int column_warps = 1;

  constexpr int rows() const { return warps / column_warps * warp_rows; }
  constexpr int threads() const { return warps * 32; }
};

// Backward (mma_sync): a CTA owns key_warps * 32 keys and walks tiles of `queries` query rows.
// `query_warps` warps work on the same 32 keys: they divide the rows of a tile and the columns of
// dK and dV among them. With `column_warps` 2, two neighbouring ones have the same rows and divide
// the columns of the head dimension that S and dP are sums over; Q and dO then have one stage, and
// each is refilled as soon as its last product of a step is done.
struct BackwardTile {
  int key_warps;
  int query_warps;
  int queries;
  int stages;  // of Q and dO; with 3, dS is double-buffered and a step has one barrier
  // The barrier that publishes P and dS lies between the products of dV and of dK with the warp's
  // own queries; otherwise it follows both.
  bool early_barrier;
  int blocks_per_sm;
  int column_warps = 1;

  constexpr int keys() const { return key_warps * 32; }
  constexpr int threads() const { return key_warps * query_warps * 32; }
};

// Forward (wgmma): consumer warpgroups of 64 query rows each and one producer warpgroup. K and V
// pass through a pipeline of `stages` tiles of `keys` rows each, Q through `q_buffers` buffers.
struct WgmmaForwardTile {
  static constexpr int kRowsPerWarp = 16;
  int consumer_warpgroups;
  int keys;
  int stages;
  int q_buffers;
  bool ping_pong;      // consumer warpgroups alternate in issuing products
  bool overlap_tiles;  // the first scores of the next tile overlap the last product of this one
  int consumer_registers;
  int producer_registers;
  bool option_loops;  // the general form has one more loop per option, for calls with only that one

  constexpr int rows() const { return 64 * consumer_warpgroups; }
  constexpr int threads() const { return 128 * (consumer_warpgroups + 1); }
};

// Forward (tcgen05): two tiles of 128 query rows, each with four softmax warps; four correction
// warps, and four others for loads and products. Tiles of K and V pass through one pipeline.
struct Tcgen05ForwardTile {
  static constexpr int kQTiles = 2;
  static constexpr int kRows = 128;  // of a tile
  int keys;
  int stages;
  int softmax_registers;
  int correction_registers;
  int other_registers;

  constexpr int rows() const { return kQTiles * kRows; }
  constexpr int threads() const { return 4 * 32 * (kQTiles + 2); }
};

// Backward (wgmma): when a consumer warpgroup adds the dQ of a step to the sums in global memory.
// The fence that this needs waits for all products that are queued.
enum class SendDq {
  at_once,       // at the end of the step
  under_scores,  // when the next S and dP have been issued
  under_dp,      // while the next P is computed
};

// Backward (wgmma): a CTA owns `keys` keys and walks tiles of `queries` query rows. The CTAs of a
// cluster own neighbouring keys, exchange dS and share the columns of dQ.
struct WgmmaBackwardTile {
  int keys;
  int queries;
  int cluster_size;  // CTAs: 1 or 2
  bool preload;      // S and dP start at their row statistics instead of 0
  SendDq send;
  int consumer_registers;
  int producer_registers;
  bool option_loops;  // the general form has one more loop per option, for calls with only that one
  // Whether the loop of the consumers leaves registers for what it could also read from shared
  // memory, and for a warp that reads a mask.
  bool spare_registers = true;

  constexpr int threads() const { return 384; }  // two consumer warpgroups and one producer
};

// The limits of an architecture.
struct Limits {
  int sm;            // compute capability, major * 10 + minor
  int table;         // the architecture whose tile table it uses
  int shared_bytes;  // per CTA, opt-in maximum
  const char* name;
};

}  // namespace tilewise::cuda::arch
