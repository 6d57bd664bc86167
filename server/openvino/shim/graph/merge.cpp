// Merges projections that read the same input and have weights of the same form, which results in fewer, larger
// multiplications.
#include <cstring>
#include <map>
#include <vector>

#include <openvino/op/ops.hpp>

#include "deferred.hpp"
#include "lora.hpp"
#include "model.hpp"
#include "nodes.hpp"
#include "weights.hpp"

namespace {

using ovfleet::integer_constant;
namespace op = ov::op;
using NodePtr = std::shared_ptr<ov::Node>;

size_t num_elements(const NodePtr& node) { return ov::shape_size(node->get_output_shape(0)); }

bool are_equal(const NodePtr& a, const NodePtr& b) {
    const auto left = ov::as_type_ptr<op::v0::Constant>(a), right = ov::as_type_ptr<op::v0::Constant>(b);
    // The content of a deferred constant is not in memory yet, so it cannot be compared.
    if (ovfleet::deferred_parts(*left) || ovfleet::deferred_parts(*right)) return false;
    return left->get_byte_size() == right->get_byte_size() &&
           std::memcmp(left->get_data_ptr(), right->get_data_ptr(), left->get_byte_size()) == 0;
}

// Whether each input of an operation has a row for each row of the output, except for inputs with one element.
bool has_rows(const NodePtr& node) {
    const auto& shape = node->get_output_shape(0);
    for (const auto& input : node->input_values()) {
        const auto& of_input = input.get_shape();
        if (ov::shape_size(of_input) > 1 && (of_input.size() != shape.size() || of_input[0] != shape[0])) return false;
    }
    return true;
}

// Whether two weights consist of the same operations on constants that differ only in their content and their number of rows,
// so that the rows of the constants can be concatenated.
bool same_form(const NodePtr& a, const NodePtr& b) {
    if (a->get_type_info() != b->get_type_info() || a->get_input_size() != b->get_input_size()) return false;
    const auto type = a->get_output_element_type(0);
    if (type != b->get_output_element_type(0)) return false;
    const auto left = a->get_output_partial_shape(0), right = b->get_output_partial_shape(0);
    if (left.is_dynamic() || right.is_dynamic() || left.size() != right.size()) return false;
    for (size_t axis = 1; axis < left.size(); ++axis)
        if (left[axis] != right[axis]) return false;
    if (ov::is_type<op::v0::Constant>(a)) {
        // A constant with one element applies to all rows.
        if (num_elements(a) == 1 || num_elements(b) == 1) return num_elements(a) == num_elements(b) && are_equal(a, b);
        // Constants are concatenated byte by byte, so their elements must fill whole bytes.
        const auto fills_bytes = [&](const NodePtr& node) { return num_elements(node) * type.bitwidth() % 8 == 0; };
        return fills_bytes(a) && fills_bytes(b);
    }
    // The target shapes may differ, because `merged_weight` creates a new target shape.
    if (ov::is_type<op::v1::Reshape>(a)) return same_form(a->get_input_node_shared_ptr(0), b->get_input_node_shared_ptr(0));
    if (!has_rows(a) || !has_rows(b)) return false;
    for (size_t i = 0; i < a->get_input_size(); ++i)
        if (!same_form(a->get_input_node_shared_ptr(i), b->get_input_node_shared_ptr(i))) return false;
    return true;
}

NodePtr concatenated(const std::vector<NodePtr>& nodes) {
    auto shape = nodes[0]->get_output_shape(0);
    shape[0] = 0;
    std::vector<std::shared_ptr<op::v0::Constant>> constants;
    for (const auto& one : nodes) {
        shape[0] += one->get_output_shape(0)[0];
        constants.push_back(ov::as_type_ptr<op::v0::Constant>(one));
    }
    return ovfleet::concatenated(nodes[0]->get_output_element_type(0), shape, constants);
}

// Rebuilds the operations of the weights on constants that are concatenated by rows.
NodePtr merged_weight(const std::vector<NodePtr>& weights, int64_t rows) {
    const auto& first = weights[0];
    if (ov::is_type<op::v0::Constant>(first)) return concatenated(weights);
    if (ov::is_type<op::v1::Reshape>(first)) {
        std::vector<NodePtr> data;
        for (const auto& one : weights) data.push_back(one->get_input_node_shared_ptr(0));
        auto shape = first->get_output_shape(0);
        std::vector<int64_t> target(shape.begin(), shape.end());
        target[0] = rows;
        return std::make_shared<op::v1::Reshape>(merged_weight(data, rows), integer_constant(target), false);
    }
    ov::OutputVector inputs;
    for (size_t i = 0; i < first->get_input_size(); ++i) {
        std::vector<NodePtr> column;
        for (const auto& one : weights) column.push_back(one->get_input_node_shared_ptr(i));
        const bool scalar = ov::shape_size(column[0]->get_output_shape(0)) == 1;
        inputs.push_back(scalar ? column[0] : merged_weight(column, rows));
    }
    return first->clone_with_new_inputs(inputs);
}

void merge(const std::vector<std::shared_ptr<op::v0::MatMul>>& matmuls) {
    std::vector<NodePtr> weights;
    std::vector<int64_t> lengths;
    int64_t rows = 0;
    auto lora = std::make_shared<ovfleet::Lora>();
    for (const auto& one : matmuls) {
        if (const auto attached = ovfleet::lora_of(*one)) {
            for (const auto& part : attached->parts) part->first += size_t(rows);
            lora->parts.insert(lora->parts.end(), attached->parts.begin(), attached->parts.end());
        }
        weights.push_back(one->get_input_node_shared_ptr(1));
        lengths.push_back(weights.back()->get_output_shape(0)[0]);
        rows += lengths.back();
    }
    auto product = std::make_shared<op::v0::MatMul>(matmuls[0]->input_value(0), merged_weight(weights, rows), false, true);
    product->set_friendly_name(matmuls[0]->get_friendly_name() + "/merged");
    if (!lora->parts.empty()) ovfleet::set_lora(*product, lora);
    auto axis = op::v0::Constant::create(ov::element::i64, {}, {-1});
    auto split = std::make_shared<op::v1::VariadicSplit>(product, axis, integer_constant(lengths));
    for (size_t i = 0; i < matmuls.size(); ++i) matmuls[i]->output(0).replace(split->output(i));
}

}  // namespace

extern "C" int ovfleet_merge_projections(ov_model_t* model, size_t* merged) {
    return ovfleet::guarded([&] {
        *merged = 0;
        std::map<ov::Output<ov::Node>, std::vector<std::shared_ptr<op::v0::MatMul>>> readers;
        for (const auto& node : model->object->get_ordered_ops())
            if (auto matmul = ov::as_type_ptr<op::v0::MatMul>(node))
                if (ovfleet::is_projection(matmul)) readers[matmul->input_value(0)].push_back(matmul);
        for (auto& [input, matmuls] : readers) {
            // Merge the projections whose weights have the same form as that of the first projection. Further iterations
            // process the remaining projections.
            while (matmuls.size() > 1) {
                std::vector<std::shared_ptr<op::v0::MatMul>> alike = {matmuls[0]}, rest;
                const auto first = matmuls[0]->get_input_node_shared_ptr(1);
                for (size_t i = 1; i < matmuls.size(); ++i)
                    (same_form(first, matmuls[i]->get_input_node_shared_ptr(1)) ? alike : rest).push_back(matmuls[i]);
                if (alike.size() > 1) {
                    merge(alike);
                    *merged += alike.size();
                }
                matmuls = rest;
            }
        }
        model->object->validate_nodes_and_infer_types();
    });
}
