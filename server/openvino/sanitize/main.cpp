// Runs the sanitizer tests of the native kernels; `make sanitize` builds it.
#include "check.hpp"

#include <algorithm>

#include "attention/attention.hpp"
#include "projection/projection.hpp"

// The names of parts to run, or none for all.
int main(int count, char** names) {
    const auto is_asked = [&](const char* name) {
        return count < 2 || std::any_of(names + 1, names + count, [&](const char* one) { return std::strcmp(one, name) == 0; });
    };
    for (size_t set = 0; set < ovfleet::KERNEL_SETS; ++set)
        std::printf("attention kernels %zu: %s\n", set, ovfleet::kernels_of(set) ? "run" : "not on this machine");
    for (size_t set = 0; set < ovfleet::projection::KERNEL_SETS; ++set)
        std::printf("projection kernels %zu: %s\n", set, ovfleet::projection::kernels_of(set) ? "run" : "not on this machine");
    std::fflush(stdout);
    if (is_asked("attention")) std::printf("%zu attention cases\n", check_attention());
    std::fflush(stdout);
    if (is_asked("projections")) std::printf("%zu projection cases\n", check_projections());
    std::fflush(stdout);
    const char* seconds = std::getenv("SECONDS_EACH");
    if (is_asked("operations"))
        std::printf("%zu operations with random attributes\n", check_operations(seconds ? std::atof(seconds) : 0));
    return 0;
}
