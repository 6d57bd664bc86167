// Finds the attention kernels for an instruction set. This file is compiled without flags for an instruction set, so it
// runs on any processor.
#include "attention.hpp"

namespace ovfleet {

const Kernels* attention_kernels(Isa isa) {
    if (!has_isa(isa)) return nullptr;
    switch (isa) {
        case Isa::portable: return &kernels_portable;
#if defined(__x86_64__)
        case Isa::avx2: return &kernels_avx2;
        case Isa::avx512: return &kernels_avx512;
        case Isa::avx512_bf16: return &kernels_avx512_bf16;
        case Isa::amx: return &kernels_amx;
#endif
        default: return nullptr;
    }
}

const Kernels* attention_tile_model(Isa vectors) {
    if (!has_isa(vectors)) return nullptr;
    switch (vectors) {
#if !defined(OVFLEET_WITHOUT_TILE_MODELS)
        case Isa::portable: return &kernels_tile_model_portable;
#endif
#if defined(__x86_64__) && !defined(OVFLEET_WITHOUT_TILE_MODELS)
        case Isa::avx512: return &kernels_tile_model_avx512;
#endif
        default: return nullptr;
    }
}

}  // namespace ovfleet
