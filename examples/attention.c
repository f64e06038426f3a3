/* Tilewise from C: plan and forward, checked against the formula in double precision.
 *
 *   cc -std=c11 attention.c $(pkg-config --cflags --libs tilewise) -lm -o attention && ./attention
 *
 * examples/CMakeLists.txt builds it with find_package(tilewise).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilewise/tilewise.h"

enum { kBatch = 2, kRows = 300, kHeads = 8, kKvHeads = 2, kColumns = 64 };

/* Numbers in [-2, 2) from a linear congruential generator, so that every machine has the same. */
static float* random_tensor(size_t count, unsigned* state) {
  float* data = malloc(count * sizeof(float));
  if (data == NULL) exit(2);
  for (size_t i = 0; i < count; ++i) {
    *state = *state * 1664525u + 1013904223u;
    data[i] = (float)(*state >> 8) / (float)(1 << 22) - 2.0f;
  }
  return data;
}

/* A contiguous [batch, row, head, column] tensor. */
static tilewise_tensor tensor(float* data, int64_t heads) {
  tilewise_tensor t;
  t.data = data;
  t.stride_head = kColumns;
  t.stride_row = heads * kColumns;
  t.stride_batch = kRows * heads * kColumns;
  return t;
}

/* One output row of causal attention, in double precision. */
static void exact_row(const tilewise_attention* a, int batch, int row, int head, double* out) {
  const float* q = (const float*)a->q.data + batch * a->q.stride_batch + row * a->q.stride_row +
                   head * a->q.stride_head;
  const int kv_head = head / (kHeads / kKvHeads);
  const float* k = (const float*)a->k.data + batch * a->k.stride_batch + kv_head * a->k.stride_head;
  const float* v = (const float*)a->v.data + batch * a->v.stride_batch + kv_head * a->v.stride_head;
  double sum = 0;
  memset(out, 0, kColumns * sizeof(double));
  for (int key = 0; key <= row; ++key) {
    double dot = 0;
    for (int c = 0; c < kColumns; ++c) dot += (double)q[c] * k[key * a->k.stride_row + c];
    const double weight = exp(dot * a->scale);
    sum += weight;
    for (int c = 0; c < kColumns; ++c) out[c] += weight * v[key * a->v.stride_row + c];
  }
  for (int c = 0; c < kColumns; ++c) out[c] /= sum;
}

static double largest_error(const tilewise_attention* a) {
  double worst = 0;
  double row_out[kColumns];
  for (int batch = 0; batch < kBatch; ++batch)
    for (int row = 0; row < kRows; row += 13)
      for (int head = 0; head < kHeads; ++head) {
        const float* out = (const float*)a->out.data + batch * a->out.stride_batch +
                           row * a->out.stride_row + head * a->out.stride_head;
        exact_row(a, batch, row, head, row_out);
        for (int c = 0; c < kColumns; ++c) worst = fmax(worst, fabs(out[c] - row_out[c]));
      }
  return worst;
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, tilewise_last_error());
  return 1;
}

int main(void) {
  unsigned state = 1;
  float* q = random_tensor((size_t)kBatch * kRows * kHeads * kColumns, &state);
  float* k = random_tensor((size_t)kBatch * kRows * kKvHeads * kColumns, &state);
  float* v = random_tensor((size_t)kBatch * kRows * kKvHeads * kColumns, &state);
  float* out = random_tensor((size_t)kBatch * kRows * kHeads * kColumns, &state);

  tilewise_attention a;
  memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  a.device = TILEWISE_CPU;
  a.dtype = TILEWISE_FLOAT32;
  a.batch = kBatch;
  a.seqlen_q = kRows;
  a.seqlen_k = kRows;
  a.heads_q = kHeads;
  a.heads_kv = kKvHeads;
  a.head_dim = kColumns;
  a.q = tensor(q, kHeads);
  a.k = tensor(k, kKvHeads);
  a.v = tensor(v, kKvHeads);
  a.out = tensor(out, kHeads);
  a.window_left = -1; /* no limit */
  a.window_right = 0; /* causal */
  a.scale = 1.0f / sqrtf((float)kColumns);

  tilewise_plan_info plan;
  memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  if (tilewise_plan(&a, NULL, TILEWISE_PASS_FORWARD, &plan) != TILEWISE_OK) return failed("plan");
  printf("kernel: %s\nwhy: %s\nworkspace: %lld bytes\n", plan.kernel, plan.why,
         (long long)plan.workspace_bytes);

  const size_t bytes = ((size_t)plan.workspace_bytes + 63) / 64 * 64;
  void* workspace = bytes > 0 ? aligned_alloc(64, bytes) : NULL;
  if (tilewise_forward(&a, workspace, plan.workspace_bytes) != TILEWISE_OK)
    return failed("forward");
  const double error = largest_error(&a);
  printf("largest error against double precision: %.1e\n", error);

  /* An invalid request returns an error with a message, and nothing is written. */
  a.heads_kv = 3;
  if (tilewise_forward(&a, workspace, plan.workspace_bytes) == TILEWISE_OK) return 1;
  printf("three key heads for eight: %s\n", tilewise_last_error());

  free(workspace);
  free(out);
  free(v);
  free(k);
  free(q);
  return error < 1e-5 ? 0 : 1;
}
