// The projections by themselves, for tests.
#include "../shim.h"
#include "adapters.hpp"
#include "pack.hpp"
#include "run.hpp"

namespace {

std::shared_ptr<ov::op::v0::Constant> integers(const ovfleet_projection& asked, const ov::Shape& shape) {
    const auto type = asked.bits == 4 ? (asked.is_signed ? ov::element::i4 : ov::element::u4)
                                      : (asked.is_signed ? ov::element::i8 : ov::element::u8);
    ov::Tensor tensor(type, shape);
    auto* to = static_cast<uint8_t*>(tensor.data());
    for (size_t i = 0; i < ov::shape_size(shape); ++i) {
        if (asked.bits == 8) to[i] = asked.quants[i];
        else to[i / 2] = uint8_t((i % 2 ? to[i / 2] & 15 : 0) | (asked.quants[i] & 15) << i % 2 * 4);
    }
    return std::make_shared<ov::op::v0::Constant>(tensor);
}

std::vector<std::shared_ptr<ovfleet::LowRank>> parts_of(const ovfleet_projection& asked) {
    std::vector<std::shared_ptr<ovfleet::LowRank>> parts;
    for (const auto* one = asked.low_ranks; one != asked.low_ranks + asked.low_rank_count; ++one)
        parts.push_back(std::make_shared<ovfleet::LowRank>(ovfleet::LowRank{
            one->adapter, one->first, one->rows, one->ranks,
            {one->down, one->down + one->ranks * asked.inputs}, {one->up, one->up + one->rows * one->ranks}}));
    return parts;
}

}  // namespace

extern "C" int ovfleet_try_projection(const ovfleet_projection* asked) {
    using namespace ovfleet::projection;
    const auto* kernels = kernels_of(asked->kernels);
    if (!kernels) return 0;
    const size_t groups = asked->inputs / asked->group;
    const auto floats = [&](const float* values) {
        return std::make_shared<ov::op::v0::Constant>(ov::element::f32, ov::Shape{asked->outputs, groups, 1}, values);
    };
    const Weight weight{integers(*asked, {asked->outputs, groups, asked->group}), floats(asked->zeros), floats(asked->scales),
                        asked->outputs, asked->inputs, asked->group};
    Matrix matrix{};
    measure(weight, matrix);
    matrix.then = Then(asked->then);
    matrix.norm = asked->norm;
    matrix.epsilon = asked->epsilon;
    std::vector<uint8_t> memory(panels(matrix) * panel_bytes(matrix));
    pack(weight, matrix, memory.data());
    matrix.panels = memory.data();
    const auto adapters = pack_adapters(parts_of(*asked), matrix.norm, matrix);
    matrix.adapters = reinterpret_cast<const Adapter*>(adapters.data());
    const auto numbers = [&](const void* data) { return Numbers{const_cast<void*>(data), asked->is_bf16 != 0}; };
    run(*kernels, matrix, asked->count, asked->adapters, numbers(asked->rows), numbers(asked->base), numbers(asked->to));
    return 1;
}
