// A projection of the rows of a step.
#pragma once

#include "projection.hpp"

namespace ovfleet::projection {

// Rounds so many rows and multiplies them, on the threads of the arena that this is called in. `adapters` are the numbers of
// those that the rows have, or null if none has any.
void run(const Kernels& kernels, const Matrix& matrix, size_t count, const int32_t* adapters, Numbers from, Numbers base,
         Numbers to);

}  // namespace ovfleet::projection
