// Prints the kernel instances of src/cuda/manifest.h, one per line: family, architecture table ("-"
// for none), element, head-dim tiles of q and k and of v. CMake runs it and writes one source per
// line into the build tree.
#include "cuda/manifest.h"

#include <cstdio>

int main() {
  tilewise::cuda::for_each_instance([](const tilewise::cuda::KernelInstance& each) {
    const char* arch = each.arch[0] != '\0' ? each.arch : "-";
    std::printf("%s %s %s %d %d\n", each.family, arch, each.element, each.head_dim,
                each.head_dim_v);
  });
}
