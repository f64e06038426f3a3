/* Tilewise: exact attention computed tile by tile. The C ABI, whose other headers this one
 * includes.
 *
 * Copyright (c) 2026 The Tilewise authors. BSD-3-Clause.
 *
 * One struct, `tilewise_attention`, describes the problem. `tilewise_plan` says which kernel will
 * run and how much workspace it needs; `tilewise_forward` and `tilewise_backward` run it. A launch
 * allocates no workspace and no GPU memory (a check of index arrays may allocate host memory). No
 * exception crosses this interface: functions that can fail return a status, and
 * `tilewise_last_error` returns one sentence about the last failure of the calling thread.
 *
 * Definition (FlashAttention-2, arXiv 2307.08691, with the conventions of the FlashAttention
 * packages; B sequences of Sq rows and Sk keys, Hq query heads that share Hkv key/value heads):
 *
 *     s_ij = scale * q_i . k_j                      raw score
 *     s_ij = softcap * tanh(s_ij / softcap)         if softcap > 0
 *     a_i  = i + Sk - Sq + diagonal                 the key that row i is aligned with
 *     s_ij = s_ij - slope_h * |a_i - j|             if alibi_slopes
 *     s_ij = s_ij + bias_ij                         if bias
 *     key j is visible to row i when  a_i - window_left <= j <= a_i + window_right,
 *                                     and the mask allows it
 *     lse_i = log(sum over visible j of exp(s_ij) + exp(sink_h))
 *     out_i = sum over visible j of dropout(exp(s_ij - lse_i)) v_j
 *
 * `diagonal` is 0 unless the rows or keys are a shard of longer sequences.
 *
 * A row that sees no key and has no sink gives out = 0, lse = -inf and gradients 0, never NaN.
 *
 * Conventions: sizes and strides are int64 and count elements. The last dimension of every tensor
 * is contiguous; other strides are arbitrary (0 broadcasts an input). A NULL pointer switches an
 * option off.
 */
#ifndef TILEWISE_TILEWISE_H
#define TILEWISE_TILEWISE_H

#include "tilewise/append.h"
#include "tilewise/attention.h"
#include "tilewise/info.h"
#include "tilewise/mask.h"
#include "tilewise/types.h"
#include "tilewise/version.h"

#endif /* TILEWISE_TILEWISE_H */
