// Runs the native projections without a graph, for tests.
#include <algorithm>
#include <cmath>

#include "../shim.h"
#include "adapters.hpp"
#include "pack.hpp"
#include "run.hpp"

namespace {

std::shared_ptr<ov::op::v0::Constant> integers(const ovfleet_projection_test& test, const ov::Shape& shape) {
    const auto type = test.bits == ovfleet::projection::E2M1_BITS ? ov::element::f4e2m1
                      : test.bits == 4                            ? (test.is_signed ? ov::element::i4 : ov::element::u4)
                                                                  : (test.is_signed ? ov::element::i8 : ov::element::u8);
    ov::Tensor tensor(type, shape);
    auto* to = static_cast<uint8_t*>(tensor.data());
    const size_t count = test.n * test.k;
    const bool are_bytes = type.bitwidth() == 8;
    for (size_t i = 0; i < count; ++i) {
        if (are_bytes) to[i] = test.quants[i];
        else to[i / 2] = uint8_t((i % 2 ? to[i / 2] & 15 : 0) | (test.quants[i] & 15) << i % 2 * 4);
    }
    return std::make_shared<ov::op::v0::Constant>(tensor);
}

std::vector<std::shared_ptr<ovfleet::LoraPart>> parts_of(const ovfleet_projection_test& test) {
    std::vector<std::shared_ptr<ovfleet::LoraPart>> parts;
    for (const auto* lora = test.loras; lora != test.loras + test.lora_count; ++lora)
        parts.push_back(
            std::make_shared<ovfleet::LoraPart>(ovfleet::LoraPart{lora->adapter,
                                                                  lora->first,
                                                                  lora->rows,
                                                                  lora->ranks,
                                                                  {lora->down, lora->down + lora->ranks * test.k},
                                                                  {lora->up, lora->up + lora->rows * lora->ranks}}));
    return parts;
}

}  // namespace

extern "C" int ovfleet_test_projection(const ovfleet_projection_test* test) {
    using namespace ovfleet::projection;
    const auto isa = ovfleet::Isa(test->isa);
    const auto* kernels = test->tile_model ? tile_model_kernels(isa) : projection_kernels(isa);
    if (!kernels) return 0;
    const size_t groups = test->k / test->group;
    const auto floats = [&](const float* values) {
        return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{test->n, groups, 1}, values);
    };
    const bool has_zeros = test->bits != E2M1_BITS && !(test->bits == SIX_BITS && test->group == SUPER_GROUP);
    const auto quants = integers(*test, {test->n, groups, test->group});
    const std::vector<float> zeros(test->zeros, test->zeros + (has_zeros ? test->n * groups : 0));
    const bool is_whole = std::all_of(zeros.begin(), zeros.end(), [](float zero) { return std::nearbyint(zero) == zero; });
    // `describe` sets `per_channel` only if the zero points have the type of the quants.
    const auto zeros_constant = [&] {
        if (!is_whole || groups != 1) return floats(test->zeros);
        return ov::op::v0::Constant::create(quants->get_element_type(), {test->n, 1, 1}, zeros);
    };
    const GraphWeight weight{quants,     has_zeros ? zeros_constant() : nullptr, floats(test->scales), test->n, test->k,
                             test->group};
    Matmul matmul{};
    describe(weight, matmul);
    // `describe` chooses 6 bits if all quants are small enough, but the test may need the 8-bit format.
    if (test->bits == 8) matmul.bits = 8;
    OPENVINO_ASSERT(matmul.bits == test->bits, "the weights have ", matmul.bits, " bits instead of ", test->bits);
    matmul.terms = test->terms;
    matmul.epilogue = Epilogue(test->epilogue);
    matmul.norm = test->norm;
    matmul.epsilon = test->epsilon;
    std::vector<uint8_t> weights(num_n_blocks(matmul) * n_block_bytes(matmul));
    pack(weight, matmul, weights.data());
    matmul.weights = weights.data();
    std::vector<float> bias(num_n_blocks(matmul) * N_BLOCK);
    if (test->bias) {
        pack_bias(matmul, test->bias, bias.data());
        matmul.bias = bias.data();
    }
    const auto adapters = pack_adapters(parts_of(*test), matmul.norm, matmul);
    matmul.adapters = reinterpret_cast<const LoraAdapter*>(adapters.data());
    const auto floats_at = [&](const void* data) { return FloatData{const_cast<void*>(data), test->is_bf16 != 0}; };
    run(*kernels, matmul, test->m, test->adapters, floats_at(test->src), floats_at(test->residual), floats_at(test->dst));
    return 1;
}
