// The attention of a step.
#pragma once

#include <vector>

#include "attention.hpp"

namespace ovfleet {

// Puts new keys and values into the cache, and computes the output of all new tokens, on the threads of the arena that this
// is called in. The sums of a token's attention are made in an order that depends on nothing but how many tokens of its
// sequence are in the step.
void run(const Kernels& kernels, const Layer& layer, const std::vector<Sequence>& sequences, const Memory& memory);

}  // namespace ovfleet
