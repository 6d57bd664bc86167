// Which kernels this processor runs. Compiled for any.
#include "../processor.hpp"
#include "attention.hpp"

const ovfleet::Kernels* ovfleet::kernels_of(size_t set) {
#if defined(__x86_64__)
    if (set == 1 && has_avx2()) return &kernels_avx2;
    if (set == 2 && has_avx512()) return &kernels_avx512;
    if (set == 3 && has_avx512() && __builtin_cpu_supports("avx512bf16")) return &kernels_avx512_bf16;
#endif
    return set == 0 ? &kernels_portable : nullptr;
}

const ovfleet::Kernels& ovfleet::kernels() {
    static const Kernels& found = []() -> const Kernels& {
        for (size_t set = KERNEL_SETS; --set > 0;)
            if (const auto* kernels = kernels_of(set)) return *kernels;
        return kernels_portable;
    }();
    return found;
}
