// Groups of threads, each on one NUMA node, among which the weights and the KV heads are divided (tensor parallelism).
#pragma once

#include <cstddef>

namespace ovfleet {

// The number of groups; 1 unless ovfleet_set_thread_groups has set them.
size_t num_thread_groups();

// Binds the calling thread to the processors of a group, unless it is bound to them already. With one group, nothing is bound.
void bind_to_group(size_t number);

// Moves the pages of memory to the NUMA node of a group. Memory without a group's node, and pages that the system cannot move,
// remain where they are: the placement affects only the speed.
void place_on_group(const void* memory, size_t bytes, size_t number);

}  // namespace ovfleet
