// Computes a projection on several threads.
#pragma once

#include "kernels/projection.hpp"

namespace ovfleet::projection {

// Moves the weights that each group of threads reads to the NUMA node of the group.
void place(const Matmul& matmul);

// Packs the M rows of the source and multiplies them, on the threads of the current arena. `adapters` contains the adapter
// number of each row, or is null if no row has an adapter.
void run(const Kernels& kernels, const Matmul& matmul, size_t M, const int32_t* adapters, FloatData src, FloatData residual,
         FloatData dst);

}  // namespace ovfleet::projection
