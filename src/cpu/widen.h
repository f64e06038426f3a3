// The copies that a forward of float8 queries needs (attention/widened_queries.h).
#pragma once

#include "attention/problem.h"
#include "base/parallel.h"

namespace tilewise::cpu {

// Writes q and the factors of k of `wide`, which is WidenedQueries(p).problem(memory).
void widen_queries(const Problem& p, const Problem& wide, const Parallel& parallel);

}  // namespace tilewise::cpu
