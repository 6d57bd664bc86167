// Finds the projection kernels for an instruction set. This file is compiled without flags for an instruction set, so
// it runs on any processor.
#include "projection.hpp"

namespace ovfleet::projection {

const Kernels* projection_kernels(Isa isa) {
    if (!has_isa(isa)) return nullptr;
    switch (isa) {
        case Isa::portable: return &kernels_portable;
#if defined(__x86_64__)
        case Isa::avx2: return &kernels_avx2;
        case Isa::avx_vnni: return &kernels_avx_vnni;
        case Isa::avx512_vnni: return &kernels_avx512_vnni;
        case Isa::amx: return &kernels_amx;
#endif
        default: return nullptr;
    }
}

const Kernels* tile_model_kernels(Isa vectors) {
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

}  // namespace ovfleet::projection
