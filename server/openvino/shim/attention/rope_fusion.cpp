#include "rope_fusion.hpp"

#include <algorithm>

#include <openvino/op/ops.hpp>

#include "../graph/nodes.hpp"

namespace ovfleet {
namespace {

namespace op = ov::op;
using Output = ov::Output<ov::Node>;

// Returns the values of a constant or of an operation on constants, or an empty list for any other value.
std::vector<int64_t> integers(const Output& value) {
    if (auto constant = as<op::v0::Constant>(value)) return constant->cast_vector<int64_t>();
    const auto node = value.get_node_shared_ptr();
    ov::OutputVector folded(node->get_output_size());
    const auto inputs = node->input_values();
    const bool is_constant =
        std::all_of(inputs.begin(), inputs.end(), [](const Output& input) { return as<op::v0::Constant>(input); });
    if (!is_constant || inputs.empty() || !node->constant_fold(folded, inputs)) return {};
    return integers(folded[value.get_index()]);
}

bool is_number(const Output& value, float number) {
    auto constant = as<op::v0::Constant>(value);
    return constant && ov::shape_size(constant->get_shape()) == 1 && constant->cast_vector<float>()[0] == number;
}

// Whether a Transpose is equivalent to a reshape: it moves only axes of size 1, and therefore no elements in memory.
bool is_reshape(const op::v1::Transpose& transpose) {
    const auto shape = transpose.get_input_partial_shape(0);
    const auto order = integers(transpose.input_value(1));
    if (shape.rank().is_dynamic() || order.size() != shape.size()) return false;
    int64_t last = -1;
    for (const auto axis : order) {
        if (shape[axis] == 1) continue;
        if (axis < last) return false;
        last = axis;
    }
    return true;
}

// Returns the value before reshapes and before conversions between floating-point types. The conversions can be skipped,
// because the kernels convert their inputs to f32 in any case.
Output source_of(Output value) {
    for (;;) {
        const auto node = value.get_node_shared_ptr();
        const auto transpose = ov::as_type_ptr<op::v1::Transpose>(node);
        const bool is_shape =
            ov::is_type<op::v1::Reshape>(node) || ov::is_type<op::v0::Squeeze>(node) || ov::is_type<op::v0::Unsqueeze>(node);
        const bool is_real = ov::is_type<op::v0::Convert>(node) && node->get_input_element_type(0).is_real() &&
                             value.get_element_type().is_real();
        if (!is_shape && !is_real && !(transpose && is_reshape(*transpose))) return value;
        value = node->input_value(0);
    }
}

bool is_last_axis(int64_t axis, const Output& value) {
    const auto rank = value.get_partial_shape().rank();
    return axis == -1 || (rank.is_static() && axis == rank.get_length() - 1);
}

// Whether a value is the half of `whole` that begins at index `begin` of the last axis.
bool is_half(const Output& value, const Output& whole, int64_t begin, int64_t half) {
    if (value.get_node()->get_input_size() == 0 || value.get_node()->input_value(0) != whole) return false;
    if (auto split = as<op::v1::VariadicSplit>(value)) {
        const auto axis = integers(split->input_value(1));
        return axis.size() == 1 && is_last_axis(axis[0], whole) && split->get_output_size() == 2 &&
               *split->get_output_partial_shape(0).rbegin() == half && int64_t(value.get_index()) == begin / half;
    }
    auto slice = as<op::v8::Slice>(value);
    if (!slice || slice->get_input_size() != 5) return false;
    const auto from = integers(slice->input_value(1)), to = integers(slice->input_value(2)),
               step = integers(slice->input_value(3)), axis = integers(slice->input_value(4));
    return from.size() == 1 && from[0] == begin && to.size() == 1 && step.size() == 1 && step[0] == 1 && axis.size() == 1 &&
           is_last_axis(axis[0], whole) && (to[0] == begin + half || (begin == half && to[0] > 2 * half));
}

// Whether a value is concat(-second half, first half) of `whole`.
bool is_rotated_half(const Output& value, const Output& whole, int64_t size) {
    auto concat = as<op::v0::Concat>(value);
    if (!concat || concat->get_input_size() != 2 || !is_last_axis(concat->get_axis(), whole)) return false;
    const auto negated = concat->input_value(0);
    auto product = as<op::v1::Multiply>(negated);
    if (!as<op::v0::Negative>(negated) && !(product && is_number(product->input_value(1), -1))) return false;
    return is_half(negated.get_node()->input_value(0), whole, size / 2, size / 2) &&
           is_half(concat->input_value(1), whole, 0, size / 2);
}

// Whether a value is a table with a row of `size` numbers for each token.
bool is_table(const Output& value, int64_t size) {
    const auto shape = value.get_partial_shape();
    return value.get_element_type() == ov::element::f32 && shape.rank().is_static() && shape.size() > 1 &&
           *shape.rbegin() == size &&
           std::count_if(shape.begin(), shape.end() - 1, [](const auto& axis) { return axis != 1; }) == 1;
}

// A rotary embedding: x * cos + concat(-second half, first half) * sin.
struct Rotation {
    Output x, cos, sin;
};

std::optional<Rotation> rotation_of(const Output& value, int64_t size) {
    auto sum = as<op::v1::Add>(value);
    if (!sum) return {};
    for (size_t first : {0, 1}) {
        auto straight = as<op::v1::Multiply>(sum->input_value(first)),
             rotated = as<op::v1::Multiply>(sum->input_value(1 - first));
        if (!straight || !rotated) continue;
        for (size_t a : {0, 1})
            for (size_t b : {0, 1}) {
                const Rotation found{straight->input_value(a), straight->input_value(1 - a), rotated->input_value(1 - b)};
                if (is_rotated_half(rotated->input_value(b), found.x, size) && is_table(found.cos, size) &&
                    is_table(found.sin, size))
                    return found;
            }
    }
    return {};
}

}  // namespace

std::optional<RopeInputs> find_rope(const Output& queries, const Output& keys, const Output& values, const Layer& layer) {
    const auto query = rotation_of(source_of(queries), int64_t(layer.key_size)),
               key = rotation_of(source_of(keys), int64_t(layer.key_size));
    if (!query || !key || query->cos != key->cos || query->sin != key->sin) return {};
    const Output parts[] = {source_of(query->x), source_of(key->x), source_of(values)};
    auto split = as<op::v1::VariadicSplit>(parts[0]);
    if (!split || split->get_output_size() != 3 || split->get_input_element_type(0) != ov::element::f32) return {};
    for (size_t part = 0; part < 3; ++part)
        if (parts[part] != split->output(part)) return {};
    const auto axis = integers(split->input_value(1));
    const std::vector<int64_t> sizes{int64_t(layer.heads * layer.key_size), int64_t(layer.kv_heads * layer.key_size),
                                     int64_t(layer.kv_heads * layer.value_size)};
    if (axis.size() != 1 || !is_last_axis(axis[0], split->input_value(0)) || integers(split->input_value(2)) != sizes)
        return {};
    return RopeInputs{split->input_value(0), query->cos, query->sin};
}

}  // namespace ovfleet
