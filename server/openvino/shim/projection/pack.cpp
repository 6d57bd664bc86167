#include "pack.hpp"

#include <cmath>
#include <cstring>

#include <openvino/core/type/float16.hpp>
#include <openvino/op/ops.hpp>

#include "../graph/weights.hpp"
#include "../threads.hpp"

namespace ovfleet::projection {
namespace {

namespace op = ov::op;
using Constant = op::v0::Constant;

size_t size_of(const Constant& constant) { return ov::shape_size(constant.get_shape()); }

// Integers of 4 or 8 bits as non-negative numbers: half of the range is added to signed integers.
struct Integers {
    explicit Integers(const Constant& constant)
        : data(static_cast<const uint8_t*>(constant.get_data_ptr())),
          bits(constant.get_element_type().bitwidth()),
          offset(constant.get_element_type().is_signed() ? 1u << (bits - 1) : 0) {}

    uint32_t operator[](size_t index) const {
        return (bits == 8 ? data[index] : data[index / 2] >> index % 2 * 4 & 15) ^ offset;
    }

    const uint8_t* data;
    size_t bits;
    uint32_t offset;
};

bool is_integers(const Constant& constant) {
    const auto type = constant.get_element_type();
    return type == ov::element::u4 || type == ov::element::i4 || type == ov::element::u8 || type == ov::element::i8;
}

// Zero points or scales: one for each group, or one for all groups.
struct GroupValues {
    GroupValues(const std::shared_ptr<Constant>& constant, const GraphWeight& weight)
        : groups(weight.K / weight.group), size(constant ? size_of(*constant) : 0) {
        if (constant) values = constant->cast_vector<float>();
    }

    float at(size_t row, size_t group) const { return size == 0 ? 0 : values[size == 1 ? 0 : row * groups + group]; }

    size_t groups, size;
    std::vector<float> values;
};

}  // namespace

std::optional<GraphWeight> weight_of(const std::shared_ptr<ov::Node>& node) {
    auto at = node;
    if (ov::is_type<op::v0::Convert>(at)) at = at->get_input_node_shared_ptr(0);
    if (ov::is_type<op::v1::Reshape>(at)) at = at->get_input_node_shared_ptr(0);
    auto scaled = ov::as_type_ptr<op::v1::Multiply>(at);
    if (!scaled || node->get_output_partial_shape(0).is_dynamic()) return {};
    GraphWeight weight;
    weight.scales = constant_of(scaled->get_input_node_shared_ptr(1));
    at = scaled->get_input_node_shared_ptr(0);
    if (ov::is_type<op::v1::Subtract>(at)) {
        weight.zeros = constant_of(at->get_input_node_shared_ptr(1));
        if (!weight.zeros) return {};
        at = at->get_input_node_shared_ptr(0);
    }
    if (!ov::is_type<op::v0::Convert>(at)) return {};
    weight.quants = constant_of(at);
    if (!weight.quants || !weight.scales || !is_integers(*weight.quants)) return {};
    const auto whole = node->get_output_shape(0), parts = weight.quants->get_shape();
    if (whole.size() != 2 || parts.size() < 2 || parts.size() > 3 || parts[0] != whole[0]) return {};
    weight.N = whole[0];
    weight.K = whole[1];
    weight.group = parts.back();
    if (size_of(*weight.quants) != weight.N * weight.K) return {};
    const size_t groups = weight.K / weight.group;
    for (const auto& each : {weight.scales, weight.zeros}) {
        if (!each) continue;
        const bool is_real = each->get_element_type().is_real();
        if (size_of(*each) != 1 && size_of(*each) != weight.N * groups) return {};
        if (!is_real && (each == weight.scales || !is_integers(*each))) return {};
    }
    if (weight.group != 16 && weight.group % SRC_GROUP != 0) return {};
    return weight.K % SRC_GROUP == 0 ? std::make_optional(weight) : std::nullopt;
}

void describe(const GraphWeight& weight, Matmul& matmul) {
    matmul.K = weight.K;
    matmul.N = weight.N;
    matmul.bits = weight.quants->get_element_type().bitwidth();
    matmul.group = std::min(weight.group, SRC_GROUP);
    const auto scales = weight.scales->cast_vector<float>();
    float most = 0;
    for (const auto scale : scales) most = std::max(most, std::abs(scale));
    int exponent = 0;
    std::frexp(most, &exponent);
    // With this factor, the largest scale is below 2^15.
    matmul.scale_factor = std::ldexp(1.0f, most > 0 && std::isfinite(most) ? exponent - 15 : 0);
}

void pack(const GraphWeight& weight, const Matmul& matmul, uint8_t* to) {
    const Integers quants(*weight.quants);
    const GroupValues scales(weight.scales, weight), zeros(weight.zeros, weight);
    // The offset of signed quants is also added to their zero points, regardless of the type of the zero points.
    const float offset = float(quants.offset);
    const size_t half = N_BLOCK / 2, repeated = weight.group / matmul.group;
    parallel_for(num_n_blocks(matmul), 1, [&](size_t block) {
        uint8_t* at = to + block * n_block_bytes(matmul);
        std::memset(at, 0, n_block_bytes(matmul));
        for (size_t group = 0; group < num_groups(matmul); ++group, at += group_bytes(matmul)) {
            for (size_t in_block = 0; in_block < N_BLOCK; ++in_block) {
                const auto row = weight_row(matmul, block, in_block);
                if (!row) continue;
                auto* halves = reinterpret_cast<ov::float16*>(at);
                halves[in_block] = ov::float16(scales.at(*row, group / repeated) / matmul.scale_factor);
                halves[N_BLOCK + in_block] = ov::float16(zeros.at(*row, group / repeated) + offset);
                uint8_t* fours = at + N_BLOCK * 2 * sizeof(uint16_t);
                for (size_t i = 0; i < matmul.group; ++i) {
                    const auto quant = uint8_t(quants[*row * weight.K + group * matmul.group + i]);
                    // The fours of the first 16 columns come before those of the other columns. Two fours of 4-bit weights
                    // share bytes.
                    const size_t four = i / 4 / (8 / matmul.bits), at_four = in_block % half * 4 + i % 4;
                    const size_t shift = matmul.bits == 4 && i / 4 % 2 == 1 ? 4 : 0;
                    fours[(four * 2 + in_block / half) * half * 4 + at_four] |= uint8_t(quant << shift);
                }
            }
        }
    });
}

}  // namespace ovfleet::projection
