// The instruction sets for which native kernels are compiled, and functions that determine which of them this processor has.
#pragma once

#include <cstdint>

namespace ovfleet {

// The values are those of `ovfleet_isa` in shim.h.
enum class Isa : int64_t { plugin, portable, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx };

constexpr int64_t ISA_COUNT = 8;

// Whether this process may use the tile registers of AMX with bf16.
enum class TileSupport {
    // The processor has no tile registers or cannot multiply bf16 with them, or the platform is not Linux on x86-64.
    absent,
    // The processor has tile registers, but the operating system does not let this process use them.
    denied,
    granted,
};

// The first call requests permission from the operating system, for all threads of the process. `reason` receives a
// string that is valid until the process ends: the reason for a denial, or an empty string.
TileSupport tile_support(const char** reason = nullptr);

// Whether this processor can run the kernels for an instruction set. Callers check this before each use of kernels,
// because the file of a compiled model may name an instruction set that this processor does not have.
inline bool has_isa(Isa isa) {
    if (isa == Isa::portable) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (isa) {
        case Isa::avx2: return avx2;
        case Isa::avx_vnni: return avx2 && __builtin_cpu_supports("avxvnni");
        case Isa::avx512: return avx512;
        case Isa::avx512_vnni: return avx512 && __builtin_cpu_supports("avx512vnni");
        case Isa::avx512_bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
        case Isa::amx: return avx512 && tile_support() == TileSupport::granted;
        default: break;
    }
#endif
    return false;
}

}  // namespace ovfleet
