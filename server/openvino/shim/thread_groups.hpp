// Groups of threads, usually one per NUMA node, among which the weights and the KV heads are divided (tensor parallelism).
#pragma once

#include <cstddef>

namespace ovfleet {

// Returns the number of groups, which is 1 unless `ovfleet_set_thread_groups` has defined several groups.
size_t num_thread_groups();

// Binds the calling thread to the processors of a group, unless it is bound to them already. Threads are not bound if there is
// only one group, or if the group has no processors.
void bind_to_group(size_t number);

// Moves the whole pages within a range of memory to the NUMA node of a group. Pages stay where they are if there is only one
// group, if the group has no node, or if the system cannot move them. The placement affects only the speed.
void place_on_group(const void* memory, size_t bytes, size_t number);

}  // namespace ovfleet
