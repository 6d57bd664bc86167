// Which kernels this processor runs. Compiled for any.
#include "../processor.hpp"
#include "projection.hpp"

namespace ovfleet::projection {

const Kernels* kernels_of(size_t set) {
#if defined(__x86_64__)
    if (set == 1 && has_avx2()) return &kernels_avx2;
    if (set == 2 && has_avx2() && __builtin_cpu_supports("avxvnni")) return &kernels_avx_vnni;
    if (set == 3 && has_avx512() && __builtin_cpu_supports("avx512vnni")) return &kernels_avx512_vnni;
#endif
    return set == 0 ? &kernels_portable : nullptr;
}

const Kernels* kernels() {
    static const Kernels* const found = []() -> const Kernels* {
        for (size_t set = KERNEL_SETS; --set > 0;)
            if (const auto* kernels = kernels_of(set)) return kernels;
        return nullptr;
    }();
    return found;
}

}  // namespace ovfleet::projection
