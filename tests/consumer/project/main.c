/* Attention from C: plan, forward, and a comparison with the definition in double precision. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilewise/tilewise.h"

enum { B = 2, SQ = 5, SK = 9, HQ = 4, HKV = 2, D = 16 };

static float q[B][SQ][HQ][D], k[B][SK][HKV][D], v[B][SK][HKV][D], out[B][SQ][HQ][D];

static void fill(float* x, size_t count, double phase) {
  for (size_t i = 0; i < count; ++i) x[i] = (float)sin(phase + 0.7 * (double)i);
}

/* The largest difference from causal attention, aligned to the last row and key. */
static double largest_error(double scale) {
  double worst = 0;
  for (int b = 0; b < B; ++b)
    for (int i = 0; i < SQ; ++i)
      for (int h = 0; h < HQ; ++h) {
        double sum = 0, o[D] = {0};
        for (int j = 0; j <= i + SK - SQ; ++j) {
          double s = 0;
          for (int d = 0; d < D; ++d) s += (double)q[b][i][h][d] * k[b][j][h / (HQ / HKV)][d];
          const double p = exp(scale * s);
          sum += p;
          for (int d = 0; d < D; ++d) o[d] += p * v[b][j][h / (HQ / HKV)][d];
        }
        for (int d = 0; d < D; ++d) worst = fmax(worst, fabs(o[d] / sum - out[b][i][h][d]));
      }
  return worst;
}

int main(void) {
  tilewise_attention a;
  tilewise_plan_info plan;
  void* workspace;
  double error;

  if (strcmp(tilewise_version(), TILEWISE_VERSION_STRING) != 0 ||
      tilewise_abi_version() != TILEWISE_ABI_VERSION) {
    fprintf(stderr, "the header is of another version than the library\n");
    return 1;
  }
  fill(&q[0][0][0][0], sizeof(q) / sizeof(float), 0.1);
  fill(&k[0][0][0][0], sizeof(k) / sizeof(float), 0.2);
  fill(&v[0][0][0][0], sizeof(v) / sizeof(float), 0.3);

  memset(&a, 0, sizeof(a));
  a.struct_size = sizeof(a);
  a.device = TILEWISE_CPU;
  a.dtype = TILEWISE_FLOAT32;
  a.batch = B;
  a.seqlen_q = SQ;
  a.seqlen_k = SK;
  a.heads_q = HQ;
  a.heads_kv = HKV;
  a.head_dim = D;
  a.q.data = q;
  a.k.data = k;
  a.v.data = v;
  a.out.data = out;
  a.q.stride_batch = a.out.stride_batch = SQ * HQ * D;
  a.q.stride_row = a.out.stride_row = HQ * D;
  a.k.stride_batch = a.v.stride_batch = SK * HKV * D;
  a.k.stride_row = a.v.stride_row = HKV * D;
  a.q.stride_head = a.k.stride_head = a.v.stride_head = a.out.stride_head = D;
  a.window_left = -1; /* no limit */
  a.window_right = 0; /* causal */
  a.scale = 0.25f;

  memset(&plan, 0, sizeof(plan));
  plan.struct_size = sizeof(plan);
  if (tilewise_plan(&a, NULL, TILEWISE_PASS_FORWARD, &plan) != TILEWISE_OK) {
    fprintf(stderr, "plan: %s\n", tilewise_last_error());
    return 1;
  }
  workspace = aligned_alloc(64, ((size_t)plan.workspace_bytes + 64) / 64 * 64);
  if (tilewise_forward(&a, workspace, plan.workspace_bytes) != TILEWISE_OK) {
    fprintf(stderr, "forward: %s\n", tilewise_last_error());
    return 1;
  }
  free(workspace);
  error = largest_error(0.25);
  printf("%s (%s): largest error %.2g\n", plan.kernel, plan.why, error);
  return error < 1e-6 ? 0 : 1;
}
