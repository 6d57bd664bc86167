#include "fuse_stages.hpp"

#include <algorithm>
#include <set>

#include <openvino/op/constant.hpp>

#include "../graph/deferred.hpp"
#include "op.hpp"

namespace ovfleet::projection {
namespace {

using Output = ov::Output<ov::Node>;
using Chain = std::vector<std::shared_ptr<Projection>>;

// Returns the last residual of a chain: the destination of the last stage that adds a residual, or an empty value if no stage
// does.
Output residual_of(const Chain& chain) {
    for (auto one = chain.rbegin(); one != chain.rend(); ++one)
        if ((*one)->ends_with_residual()) return (*one)->output(0);
    return {};
}

bool is_in(const ov::Node* node, const Chain& chain) {
    return std::any_of(chain.begin(), chain.end(), [&](const auto& one) { return one.get() == node; });
}

// Whether all readers of a value are in a chain.
bool is_internal(const Output& value, const Chain& chain) {
    const auto readers = value.get_target_inputs();
    return std::all_of(readers.begin(), readers.end(), [&](const auto& reader) { return is_in(reader.get_node(), chain); });
}

// Returns the projection that can be appended to a chain because its source is the destination of the chain. Returns
// null if no such projection exists, if the projection adds a residual other than the last residual of the chain, or if
// an operation outside the extended chain reads a value that the fused operation does not return.
std::shared_ptr<Projection> next_of(const Chain& chain) {
    const Output last = chain.back()->output(0), residual = residual_of(chain);
    for (const auto& reader : last.get_target_inputs()) {
        auto next = std::dynamic_pointer_cast<Projection>(reader.get_node()->shared_from_this());
        if (!next || reader.get_index() != SRC || chain.back()->to_bf16()) continue;
        Chain longer = chain;
        longer.push_back(next);
        const bool adds_residual = next->ends_with_residual() && residual.get_node();
        if (adds_residual && next->input_value(RESIDUAL) != residual) return nullptr;
        // The fused operation returns only its last destination and its last residual, so operations outside the chain may
        // read only these two.
        if (last != residual && !is_internal(last, longer)) return nullptr;
        if (adds_residual && !is_internal(residual, longer)) return nullptr;
        return next;
    }
    return nullptr;
}

// Replaces a chain with one operation.
void fuse(const Chain& chain) {
    ov::OutputVector inputs{chain.front()->input_value(SRC), {}};
    Output adapters;
    std::vector<Stage> stages;
    size_t bytes = 0;
    for (const auto& one : chain) {
        stages.push_back(one->stages().front());
        bytes += memory_bytes(stages.back());
        if (one->has_residual() && inputs.size() == RESIDUAL) inputs.push_back(one->input_value(RESIDUAL));
        // All stages have the same adapter numbers, because they have the same rows.
        if (one->has_adapters()) adapters = one->input_value(one->get_input_size() - 1);
    }
    if (adapters.get_node()) inputs.push_back(adapters);
    std::vector<std::shared_ptr<ov::op::v0::Constant>> parts;
    for (const auto& one : chain)
        parts.push_back(ov::as_type_ptr<ov::op::v0::Constant>(one->get_input_node_shared_ptr(MEMORY)));
    inputs[MEMORY] = concatenated(ov::element::u8, {bytes}, parts);
    Output last = chain.back()->output(0), residual = residual_of(chain);
    const bool gives_residual = residual.get_node() && residual != last && !is_internal(residual, chain);
    const Outputs outputs{chain.back()->to_bf16(), gives_residual};
    auto fused = std::make_shared<Projection>(inputs, chain.front()->isa(), stages, outputs);
    fused->set_friendly_name(chain.front()->get_friendly_name());
    if (gives_residual)
        for (auto reader : residual.get_target_inputs())
            if (!is_in(reader.get_node(), chain)) reader.replace_source_output(fused->output(1));
    last.replace(fused->output(0));
}

}  // namespace

void fuse_stages(ov::Model& model) {
    std::set<ov::Node*> fused;
    for (const auto& node : model.get_ordered_ops()) {
        auto first = std::dynamic_pointer_cast<Projection>(node);
        if (!first || fused.count(node.get())) continue;
        Chain chain{first};
        while (auto next = next_of(chain)) chain.push_back(next);
        for (const auto& one : chain) fused.insert(one.get());
        if (chain.size() > 1) fuse(chain);
    }
    model.validate_nodes_and_infer_types();
}

}  // namespace ovfleet::projection
