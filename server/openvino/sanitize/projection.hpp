// Random weights, and the projection kernels that are tested.
#pragma once

#include "check.hpp"
#include "projection/pack.hpp"

// A random weight as a graph stores it, and its dequantized values.
struct RandomWeight {
    RandomWeight(Random& random, size_t N, size_t K, size_t group, size_t bits, bool is_signed) : values(N * K) {
        const size_t groups = K / group;
        const auto type =
            bits == 4 ? (is_signed ? ov::element::i4 : ov::element::u4) : (is_signed ? ov::element::i8 : ov::element::u8);
        std::vector<float> scales(N * groups), zeros(N * groups);
        for (auto& scale : scales) scale = float(random.below(15) + 1) / 16.0f;
        // Per-channel zero points have the type and the range of the quants. Some signed per-channel weights have no zero
        // points.
        const bool is_per_channel = groups == 1, has_zeros = !is_per_channel || !is_signed || random.below(2) == 0;
        const size_t quants_count = size_t(1) << bits, half_count = is_signed ? quants_count / 2 : 0;
        for (auto& zero : zeros)
            zero = is_per_channel ? float(random.below(quants_count)) - float(half_count) : float(random.below(8));
        if (!has_zeros) std::fill(zeros.begin(), zeros.end(), 0.0f);
        ov::Tensor quants(type, {N, groups, group});
        auto* bytes = static_cast<uint8_t*>(quants.data());
        std::memset(bytes, 0, quants.get_byte_size());
        for (size_t i = 0; i < values.size(); ++i) {
            const auto quant = random.below(size_t(1) << bits), half = size_t(1) << (bits - 1);
            const int number = int(quant) - (is_signed && quant >= half ? 2 * int(half) : 0);
            if (bits == 4) bytes[i / 2] = uint8_t(bytes[i / 2] | quant << i % 2 * 4);
            else bytes[i] = uint8_t(number);
            values[i] = (double(number) - double(zeros[i / group])) * double(scales[i / group]);
        }
        const auto floats = [&](const std::vector<float>& all) {
            return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{N, groups, 1}, all);
        };
        const auto zeros_constant = is_per_channel ? ov::op::v0::Constant::create(type, {N, 1, 1}, zeros) : floats(zeros);
        weight = {
            std::make_shared<ov::op::v0::Constant>(quants), has_zeros ? zeros_constant : nullptr, floats(scales), N, K, group};
    }

    // A weight in the MXFP4 format.
    static RandomWeight in_e2m1(Random& random, size_t N, size_t K) {
        RandomWeight made(random, N, K, 32, 4, false);
        std::vector<float> scales(N * K / 32);
        for (auto& scale : scales) scale = std::ldexp(1.0f, -int(random.below(4)));
        ov::Tensor quants(ov::element::f4e2m1, {N, K / 32, 32});
        const auto* bytes = static_cast<const uint8_t*>(made.weight.quants->get_data_ptr());
        std::memcpy(quants.data(), bytes, quants.get_byte_size());
        for (size_t i = 0; i < made.values.size(); ++i) {
            constexpr double numbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
            const size_t code = bytes[i / 2] >> i % 2 * 4 & 15;
            made.values[i] = (code < 8 ? 1 : -1) * numbers[code % 8] * double(scales[i / 32]);
        }
        made.weight.quants = std::make_shared<ov::op::v0::Constant>(quants);
        made.weight.scales = std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{N, K / 32, 1}, scales);
        made.weight.zeros = nullptr;
        return made;
    }

    // A weight in the Q6_K format.
    static RandomWeight with_super_scales(Random& random, size_t N, size_t K) {
        RandomWeight made(random, N, K, 16, 8, true);
        auto* quants = static_cast<int8_t*>(const_cast<void*>(made.weight.quants->get_data_ptr()));
        std::vector<float> scales(N * K / 16);
        for (size_t i = 0; i < scales.size(); ++i) {
            // The super-scale has at most 11 significant bits, so f16 represents it exactly.
            if (i % 16 == 0) scales[i] = float(1 + random.below(2047)) / 65536.0f;
            else scales[i] = scales[i - 1];
        }
        for (auto& scale : scales) scale *= float(random.below(256)) - 128.0f;
        for (size_t i = 0; i < made.values.size(); ++i) {
            quants[i] = int8_t(int(random.below(64)) - 32);
            made.values[i] = double(quants[i]) * double(scales[i / 16]);
        }
        made.weight.scales = std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{N, K / 16, 1}, scales);
        made.weight.zeros = nullptr;
        return made;
    }

    ovfleet::projection::GraphWeight weight;
    std::vector<double> values;
};

// The way in which kernels round the source and the weights.
enum class Rounding {
    // Rounds the source to 8 or 15 bits, with one scale for each group of 32 consecutive numbers. With 8 bits, outliers are not
    // rounded.
    to_integers,
    // Rounds the source and the weights to bf16.
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
