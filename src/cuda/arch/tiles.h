// The words of the tile tables in this folder: how a kernel is cut. A tile may change speed, never
// results.
#pragma once

#include <cstdint>

namespace tilewise::cuda::arch {

// Forward (mma_sync): `warps` warps of `warp_rows` query rows; keys and values pass through one
// ring of `stages` tiles of `keys` rows; fp32 where `stages` is 0 through one tile each, beside the
// pairs of tf32 numbers (two tiles each) into which the block splits them.
struct ForwardTile {
  int warps;
  int warp_rows;  // 16 or 32
  int keys;
  int stages;
  int blocks_per_sm;

  constexpr int rows() const { return warps * warp_rows; }
  constexpr int threads() const { return warps * 32; }
};

// Backward (mma_sync): a block owns key_warps * 32 keys and walks tiles of `queries` query rows,
// which query_warps share: they cut dK and dV between them by head columns.
struct BackwardTile {
  int key_warps;
  int query_warps;
  int queries;
  int stages;          // tiles of Q and dO; with 3, dS is double-buffered: one barrier per step
  bool early_barrier;  // the barrier before the own part of dK
  int blocks_per_sm;

  constexpr int keys() const { return key_warps * 32; }
  constexpr int threads() const { return key_warps * query_warps * 32; }
};

// Forward (wgmma): warpgroups of 64 query rows each and one that loads. K and V pass through a ring
// of `stages` tiles of `keys` rows each, Q through `q_buffers`.
struct WgmmaForwardTile {
  static constexpr int kRowsOfWarp = 16;
  int consumer_warpgroups;
  int keys;
  int stages;
  int q_buffers;
  bool ping_pong;      // the warpgroups take turns to issue products
  bool overlap_tiles;  // the first scores of the next tile beside the last product of this one
  int consumer_registers;
  int producer_registers;
  bool option_loops;  // a loop for each option of the general form that is on alone

  constexpr int rows() const { return 64 * consumer_warpgroups; }
  constexpr int threads() const { return 128 * (consumer_warpgroups + 1); }
};

// Backward (wgmma): when a math warpgroup lets go of the dQ of a step. Its fence waits for the
// products that are queued.
enum class SendDq {
  at_once,       // at the end of the step
  under_scores,  // when the next S and dP are under way
  under_dp,      // when the next P is computed
};

// Backward (wgmma): a block owns `keys` keys and walks tiles of `queries` query rows. The blocks of
// a cluster own neighbouring keys, exchange dS and share the columns of dQ.
struct WgmmaBackwardTile {
  int keys;
  int queries;
  int cluster_size;  // CTAs: 1 or 2
  bool preload;      // S and dP start at their row statistics
  SendDq send;
  int consumer_registers;
  int producer_registers;
  bool option_loops;  // a loop for each option of the general form that is on alone

  constexpr int threads() const { return 384; }  // two warpgroups of math and one that loads
};

// What a kernel may use of an architecture.
struct Limits {
  int sm;            // compute capability, major * 10 + minor
  int table;         // whose tile table it uses
  int shared_bytes;  // a block may opt in to
  const char* name;
};

}  // namespace tilewise::cuda::arch
