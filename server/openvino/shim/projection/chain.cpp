// Projections that follow each other become one operation.
#include "chain.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include <openvino/op/constant.hpp>

#include "op.hpp"

namespace ovfleet::projection {
namespace {

using Output = ov::Output<ov::Node>;
using Chain = std::vector<std::shared_ptr<Projection>>;

// What the last sum of a chain gives; nothing if it has none.
Output stream_of(const Chain& chain) {
    for (auto one = chain.rbegin(); one != chain.rend(); ++one)
        if ((*one)->is_added()) return (*one)->output(0);
    return {};
}

bool is_of(const ov::Node* node, const Chain& chain) {
    return std::any_of(chain.begin(), chain.end(), [&](const auto& one) { return one.get() == node; });
}

// Whether everybody who reads a value is of a chain.
bool is_within(const Output& value, const Chain& chain) {
    const auto readers = value.get_target_inputs();
    return std::all_of(readers.begin(), readers.end(), [&](const auto& reader) { return is_of(reader.get_node(), chain); });
}

// The projection that goes on from a chain, whose results are its rows; null if there is none, or it would need what the chain
// does not keep.
std::shared_ptr<Projection> next_of(const Chain& chain) {
    const Output last = chain.back()->output(0), stream = stream_of(chain);
    for (const auto& reader : last.get_target_inputs()) {
        auto next = std::dynamic_pointer_cast<Projection>(reader.get_node()->shared_from_this());
        if (!next || reader.get_index() != ROWS || chain.back()->to_bf16()) continue;
        Chain longer = chain;
        longer.push_back(next);
        const bool replaces_stream = next->is_added() && stream.get_node();
        if (replaces_stream && next->input_value(STREAM) != stream) return nullptr;
        // What the chain does not give when it is one, nobody else may read: all but its last results and its last stream.
        if (last != stream && !is_within(last, longer)) return nullptr;
        if (replaces_stream && !is_within(stream, longer)) return nullptr;
        return next;
    }
    return nullptr;
}

// Makes a chain one operation.
void join(const Chain& chain) {
    ov::OutputVector inputs{chain.front()->input_value(ROWS), {}};
    Output adapters;
    std::vector<Stage> stages;
    size_t bytes = 0;
    for (const auto& one : chain) {
        stages.push_back(one->stages().front());
        bytes += memory_of(stages.back());
        if (one->has_stream() && inputs.size() == STREAM) inputs.push_back(one->input_value(STREAM));
        // The same of all of them, as their rows are.
        if (one->has_adapters()) adapters = one->input_value(one->get_input_size() - 1);
    }
    if (adapters.get_node()) inputs.push_back(adapters);
    ov::Tensor memory(ov::element::u8, {bytes});
    auto* to = static_cast<uint8_t*>(memory.data());
    for (const auto& one : chain) {
        auto part = ov::as_type_ptr<ov::op::v0::Constant>(one->get_input_node_shared_ptr(MEMORY));
        std::memcpy(to, part->get_data_ptr(), part->get_byte_size());
        to += part->get_byte_size();
    }
    inputs[MEMORY] = std::make_shared<ov::op::v0::Constant>(memory);
    Output last = chain.back()->output(0), stream = stream_of(chain);
    const bool gives_stream = stream.get_node() && stream != last && !is_within(stream, chain);
    auto whole = std::make_shared<Projection>(inputs, stages, chain.back()->to_bf16(), gives_stream);
    whole->set_friendly_name(chain.front()->get_friendly_name());
    if (gives_stream)
        for (auto reader : stream.get_target_inputs())
            if (!is_of(reader.get_node(), chain)) reader.replace_source_output(whole->output(1));
    last.replace(whole->output(0));
}

}  // namespace

void join_chains(ov::Model& model) {
    std::set<ov::Node*> joined;
    for (const auto& node : model.get_ordered_ops()) {
        auto first = std::dynamic_pointer_cast<Projection>(node);
        if (!first || joined.count(node.get())) continue;
        Chain chain{first};
        while (auto next = next_of(chain)) chain.push_back(next);
        for (const auto& one : chain) joined.insert(one.get());
        if (chain.size() > 1) join(chain);
    }
}

}  // namespace ovfleet::projection
