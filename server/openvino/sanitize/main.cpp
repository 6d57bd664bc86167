// Runs the sanitizer tests of the native kernels. `make sanitize` builds and runs this program.
#include "check.hpp"

#include <algorithm>

#include "attention/kernels/attention.hpp"
#include "projection/kernels/projection.hpp"

// The arguments name the parts to run. Without arguments, all parts run.
int main(int count, char** names) {
    const auto is_selected = [&](const char* name) {
        return count < 2 || std::any_of(names + 1, names + count, [&](const char* one) { return std::strcmp(one, name) == 0; });
    };
    for (const auto isa : ISAS) {
        const auto status = [](const void* kernels) { return kernels ? "run" : "not available"; };
        std::printf("%s: attention kernels %s, projection kernels %s\n", name_of(isa), status(ovfleet::attention_kernels(isa)),
                    status(ovfleet::projection::projection_kernels(isa)));
    }
    std::fflush(stdout);
    if (is_selected("attention")) std::printf("%zu attention cases\n", check_attention());
    std::fflush(stdout);
    if (is_selected("projections")) std::printf("%zu projection cases\n", check_projections());
    std::fflush(stdout);
    if (is_selected("experts")) std::printf("%zu expert cases\n", check_experts());
    std::fflush(stdout);
    const char* seconds = std::getenv("SECONDS_EACH");
    if (is_selected("operations"))
        std::printf("%zu operations with random attributes\n", check_operations(seconds ? std::atof(seconds) : 0));
    return 0;
}
