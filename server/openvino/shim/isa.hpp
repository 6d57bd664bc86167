// The instruction sets for which native kernels are compiled, and which of them this processor has.
#pragma once

#include <cstdint>

namespace ovfleet {

// The numbers are those of `ovfleet_isa` in shim.h.
enum class Isa : int64_t { plugin, portable, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16 };

constexpr int64_t ISA_COUNT = 7;

// Whether this processor runs kernels of an instruction set. It is asked before each use of kernels, since a file may name any.
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
        default: break;
    }
#endif
    return false;
}

}  // namespace ovfleet
