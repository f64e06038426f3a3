// Prints the units of src/cuda/manifest.h, one a line: family, architecture table ("-" for none),
// element, head-dim tiles of q and k and of v. CMake runs it and writes one source per line into
// the build tree.
#include "cuda/manifest.h"

#include <cstdio>

int main() {
  tilewise::cuda::for_each_unit([](const tilewise::cuda::Unit& unit) {
    const char* arch = unit.arch[0] != '\0' ? unit.arch : "-";
    std::printf("%s %s %s %d %d\n", unit.family, arch, unit.element, unit.head_dim,
                unit.head_dim_v);
  });
}
