// Computes the attention of a step on several threads.
#pragma once

#include <vector>

#include "kernels/attention.hpp"

namespace ovfleet {

// Stores the new keys and values in the cache, and computes the outputs of all new tokens, on the threads of the current arena.
// The order of the additions in the attention of a token depends only on the token's position.
void run(const Kernels& kernels, const Layer& layer, const std::vector<Sequence>& sequences, const StepTensors& tensors);

}  // namespace ovfleet
