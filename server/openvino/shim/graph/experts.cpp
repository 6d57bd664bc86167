// Corrects the mixtures of experts in graphs of the GGUF front end: the weights of a token's experts, and the shapes that do
// not work with paged attention.
#include <cstring>
#include <set>
#include <vector>

#include <openvino/core/graph_util.hpp>
#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "nodes.hpp"

namespace {

namespace op = ov::op;

// Whether a node is a Reshape to the constant sizes `leading`, followed by one more constant size.
bool reshapes_to(const ov::Node& node, std::vector<int64_t> leading) {
    if (!ov::is_type<op::v1::Reshape>(&node)) return false;
    auto target = ov::as_type_ptr<op::v0::Constant>(node.get_input_node_shared_ptr(1));
    if (!target || ov::shape_size(target->get_shape()) != leading.size() + 1) return false;
    const auto sizes = target->cast_vector<int64_t>();
    return std::equal(leading.begin(), leading.end(), sizes.begin());
}

// Which products of the experts the search has already passed. It walks from outputs to inputs, so it passes the second
// products before the first ones.
enum class Behind { none, second_products };

// Returns the input of the experts that compute `node`: the tokens before the Reshape for the first products of the experts.
// If each token has only one expert, the inputs of the first and second products have the same shape, so the search must first
// pass the second products.
ov::Output<ov::Node> tokens_of(ov::Node* node, Behind behind, std::set<ov::Node*>& seen) {
    if (!seen.insert(node).second) return {};
    const bool experts = std::strcmp(node->get_type_name(), "GatherMatmul") == 0;
    if (experts && behind == Behind::second_products && reshapes_to(*node->get_input_node_ptr(0), {1, -1}))
        return node->get_input_node_ptr(0)->input_value(0);
    for (const auto& input : node->input_values()) {
        if (ov::is_type<op::v13::ScaledDotProductAttention>(input.get_node())) continue;
        auto found = tokens_of(input.get_node(), experts ? Behind::second_products : behind, seen);
        if (found.get_node()) return found;
        if (experts) break;
    }
    return {};
}

// Divides the weights of a token's experts by their sum, unless the graph already does so. If the weights are the softmax of
// logits, moves the softmax to the axis of the experts instead: the front end applies it to the last axis, which has size 1.
void normalize_weights(const ov::Model& model) {
    const auto ends_with = [](const std::string& name, const std::string& end) {
        return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
    };
    std::vector<std::shared_ptr<ov::Node>> weights;
    size_t corrected = 0;
    for (const auto& node : model.get_ordered_ops()) {
        if (ends_with(node->get_friendly_name(), ".moe_w_norm")) return;
        if (ends_with(node->get_friendly_name(), ".moe_w")) weights.push_back(node);
        if (!ends_with(node->get_friendly_name(), ".moe_w_sm")) continue;
        const auto softmax = ov::as_type_ptr<op::v8::Softmax>(node);
        OPENVINO_ASSERT(softmax && softmax->get_output_partial_shape(0).rank() == 4,
                        "the weights of the experts are computed in an unknown way");
        softmax->set_axis(2);  // [1, tokens, experts, 1]
        ++corrected;
    }
    if (corrected > 0) return;
    for (const auto& node : weights) {
        const auto readers = node->output(0).get_target_inputs();
        auto axis = ovfleet::integer_constant({2});  // [1, tokens, experts, 1]
        auto sum = std::make_shared<op::v1::ReduceSum>(node, axis, true);
        auto normalized = std::make_shared<op::v1::Divide>(node, sum);
        for (auto reader : readers) reader.replace_source_output(normalized);
    }
}

// Corrects the shapes of the indices with which the graph gathers the biases of the chosen experts. The graph reads the number
// of tokens from the third dimension, but in some layers, and with paged attention, the tokens are in another dimension.
void correct_bias_indices(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops()) {
        if (!ov::is_type<op::v1::Reshape>(node) || !ov::is_type<op::v8::Gather>(node->get_input_node_ptr(1))) continue;
        const auto* top = ov::as_type<op::v11::TopK>(node->get_input_node_ptr(0));
        if (!top) continue;
        const auto used = top->get_output_partial_shape(1).rbegin()->get_length();
        node->input(1).replace_source_output(ovfleet::integer_constant({-1, used}));
    }
}

}  // namespace

extern "C" int ovfleet_fix_experts(ov_model_t* model, size_t* layers) {
    return ovfleet::guarded([&] {
        normalize_weights(*model->object);
        correct_bias_indices(*model->object);
        *layers = 0;
        for (const auto& node : model->object->get_ordered_ops()) {
            if (node->get_friendly_name().find("moe_out") == std::string::npos || !reshapes_to(*node, {1, 1, -1})) continue;
            std::set<ov::Node*> seen;
            const auto tokens = tokens_of(node.get(), Behind::none, seen);
            OPENVINO_ASSERT(tokens.get_node(), "cannot find the input of the experts");
            node->input(1).replace_source_output(std::make_shared<op::v3::ShapeOf>(tokens));
            ++*layers;
        }
        model->object->validate_nodes_and_infer_types();
    });
}
