// Weights as a graph has them, and as the kernels want them.
#include "pack.hpp"

#include <cmath>
#include <cstring>

#include <openvino/core/type/float16.hpp>
#include <openvino/op/ops.hpp>

#include "../threads.hpp"
#include "../weights.hpp"

namespace ovfleet::projection {
namespace {

namespace op = ov::op;
using Constant = op::v0::Constant;

size_t size_of(const Constant& constant) { return ov::shape_size(constant.get_shape()); }

// Integers of 4 or 8 bits, as numbers that are not negative: signed ones are moved by half of their range.
struct Integers {
    explicit Integers(const Constant& constant)
        : data(static_cast<const uint8_t*>(constant.get_data_ptr())), bits(constant.get_element_type().bitwidth()),
          moved(constant.get_element_type().is_signed() ? 1u << (bits - 1) : 0) {}

    uint32_t operator[](size_t index) const {
        return (bits == 8 ? data[index] : data[index / 2] >> index % 2 * 4 & 15) ^ moved;
    }

    const uint8_t* data;
    size_t bits;
    uint32_t moved;
};

bool is_integers(const Constant& constant) {
    const auto type = constant.get_element_type();
    return type == ov::element::u4 || type == ov::element::i4 || type == ov::element::u8 || type == ov::element::i8;
}

// Zeros or scales, one for each group, or for each output, or for all.
struct Each {
    Each(const std::shared_ptr<Constant>& constant, const Weight& weight)
        : groups(weight.inputs / weight.group), size(constant ? size_of(*constant) : 0) {
        if (constant) values = constant->cast_vector<float>();
    }

    float at(size_t output, size_t group) const {
        return size == 0 ? 0 : values[size == 1 ? 0 : output * groups + group];
    }

    size_t groups, size;
    std::vector<float> values;
};

}  // namespace

std::optional<Weight> weight_of(const std::shared_ptr<ov::Node>& node) {
    auto at = node;
    if (ov::is_type<op::v0::Convert>(at)) at = at->get_input_node_shared_ptr(0);
    if (ov::is_type<op::v1::Reshape>(at)) at = at->get_input_node_shared_ptr(0);
    auto scaled = ov::as_type_ptr<op::v1::Multiply>(at);
    if (!scaled || node->get_output_partial_shape(0).is_dynamic()) return {};
    Weight weight;
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
    weight.outputs = whole[0];
    weight.inputs = whole[1];
    weight.group = parts.back();
    if (size_of(*weight.quants) != weight.outputs * weight.inputs) return {};
    const size_t groups = weight.inputs / weight.group;
    for (const auto& each : {weight.scales, weight.zeros}) {
        if (!each) continue;
        const bool is_real = each->get_element_type().is_real();
        if (size_of(*each) != 1 && size_of(*each) != weight.outputs * groups) return {};
        if (!is_real && (each == weight.scales || !is_integers(*each))) return {};
    }
    if (weight.group != 16 && weight.group % ROUNDED != 0) return {};
    return weight.inputs % ROUNDED == 0 ? std::make_optional(weight) : std::nullopt;
}

void measure(const Weight& weight, Matrix& matrix) {
    matrix.inputs = weight.inputs;
    matrix.outputs = weight.outputs;
    matrix.bits = weight.quants->get_element_type().bitwidth();
    matrix.group = std::min(weight.group, ROUNDED);
    const auto scales = weight.scales->cast_vector<float>();
    float most = 0;
    for (const auto scale : scales) most = std::max(most, std::abs(scale));
    int exponent = 0;
    std::frexp(most, &exponent);
    // The largest of the scales is below 2 to the 15th then.
    matrix.factor = std::ldexp(1.0f, most > 0 && std::isfinite(most) ? exponent - 15 : 0);
}

void pack(const Weight& weight, const Matrix& matrix, uint8_t* to) {
    const Integers quants(*weight.quants);
    const Each scales(weight.scales, weight), zeros(weight.zeros, weight);
    // What signed quants are moved by, so are their zeros, whatever these are written in.
    const float moved = float(quants.moved);
    const size_t half = PANEL / 2, repeated = weight.group / matrix.group;
    share(panels(matrix), 1, false, [&](size_t panel) {
        uint8_t* at = to + panel * panel_bytes(matrix);
        std::memset(at, 0, panel_bytes(matrix));
        for (size_t group = 0; group < groups(matrix); ++group, at += group_bytes(matrix)) {
            for (size_t in_panel = 0; in_panel < PANEL; ++in_panel) {
                const auto place = output_at(matrix, panel, in_panel);
                if (!place) continue;
                const size_t output = *place;
                auto* halves = reinterpret_cast<ov::float16*>(at);
                halves[in_panel] = ov::float16(scales.at(output, group / repeated) / matrix.factor);
                halves[PANEL + in_panel] = ov::float16(zeros.at(output, group / repeated) + moved);
                uint8_t* fours = at + PANEL * 2 * sizeof(uint16_t);
                for (size_t i = 0; i < matrix.group; ++i) {
                    const auto quant = uint8_t(quants[output * weight.inputs + group * matrix.group + i]);
                    // Fours of 16 outputs, the first 16 of the panel before the others; of 4 bits two share their bytes.
                    const size_t four = i / 4 / (8 / matrix.bits), at_four = in_panel % half * 4 + i % 4;
                    const size_t shift = matrix.bits == 4 && i / 4 % 2 == 1 ? 4 : 0;
                    fours[(four * 2 + in_panel / half) * half * 4 + at_four] |= uint8_t(quant << shift);
                }
            }
        }
    });
}

}  // namespace ovfleet::projection
