// Random weights, and the projection kernels that are tested.
#pragma once

#include "check.hpp"
#include "projection/pack.hpp"

// A weight in the form of a graph, and its values.
struct RandomWeight {
    RandomWeight(Random& random, size_t N, size_t K, size_t group, size_t bits, bool is_signed) : values(N * K) {
        const size_t groups = K / group;
        const auto type =
            bits == 4 ? (is_signed ? ov::element::i4 : ov::element::u4) : (is_signed ? ov::element::i8 : ov::element::u8);
        std::vector<float> scales(N * groups), zeros(N * groups);
        for (auto& scale : scales) scale = float(random.below(15) + 1) / 16.0f;
        for (auto& zero : zeros) zero = float(random.below(16));
        ov::Tensor quants(type, {N, groups, group});
        auto* bytes = static_cast<uint8_t*>(quants.data());
        std::memset(bytes, 0, quants.get_byte_size());
        for (size_t i = 0; i < values.size(); ++i) {
            const auto quant = random.below(size_t(1) << bits), half = size_t(1) << (bits - 1);
            if (bits == 8) bytes[i] = uint8_t(quant);
            else bytes[i / 2] = uint8_t(bytes[i / 2] | quant << i % 2 * 4);
            const double number = double(quant) - (is_signed && quant >= half ? 2.0 * double(half) : 0.0);
            values[i] = (number - double(zeros[i / group])) * double(scales[i / group]);
        }
        const auto floats = [&](const std::vector<float>& all) {
            return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{N, groups, 1}, all);
        };
        weight = {std::make_shared<ov::op::v0::Constant>(quants), floats(zeros), floats(scales), N, K, group};
    }

    ovfleet::projection::GraphWeight weight;
    std::vector<double> values;
};

// How kernels round the source and the weights.
enum class Rounding {
    // The source to 8 or 15 bits, relative to the largest of 32 numbers, except for outliers.
    to_integers,
    // The source and the weights to bf16.
    to_bf16,
};

struct TestedKernels {
    const char* name;
    const ovfleet::projection::Kernels* kernels;
    Rounding rounding;
};

inline std::vector<TestedKernels> tested_kernels() {
    using namespace ovfleet::projection;
    std::vector<TestedKernels> all;
    for (const auto isa : ISAS)
        all.push_back(
            {name_of(isa), projection_kernels(isa), isa == ovfleet::Isa::amx ? Rounding::to_bf16 : Rounding::to_integers});
    all.push_back({"tile model, portable", tile_model_kernels(ovfleet::Isa::portable), Rounding::to_bf16});
    all.push_back({"tile model, avx512", tile_model_kernels(ovfleet::Isa::avx512), Rounding::to_bf16});
    return all;
}
