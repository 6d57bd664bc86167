// Finds the attention kernels for an instruction set. This file is compiled for any processor.
#include "attention.hpp"

const ovfleet::Kernels* ovfleet::attention_kernels(Isa isa) {
    if (!has_isa(isa)) return nullptr;
    switch (isa) {
        case Isa::portable: return &kernels_portable;
#if defined(__x86_64__)
        case Isa::avx2: return &kernels_avx2;
        case Isa::avx512: return &kernels_avx512;
        case Isa::avx512_bf16: return &kernels_avx512_bf16;
#endif
        default: return nullptr;
    }
}
