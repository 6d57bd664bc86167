// Turns a stateful model into a paged one.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <openvino/op/ops.hpp>
#include <openvino/pass/manager.hpp>
#include <openvino/pass/sdpa_to_paged_attention.hpp>

#include "../attention/op.hpp"
#include "model.hpp"
#include "rotary.hpp"

namespace {

namespace op = ov::op;

// The section and the name of the model attribute that contains the sliding window of all attention layers. An IR also stores
// this attribute.
constexpr const char* window_section = "ovfleet";
constexpr const char* window_name = "sliding_window";

// The largest sliding window of the paged attention, in tokens.
constexpr int64_t window_max = INT32_MAX;

void check_window(int64_t tokens) {
    OPENVINO_ASSERT(tokens > 0 && tokens <= window_max, "the sliding window has ", tokens, " tokens; it must have from 1 to ",
                    window_max);
}

// Returns the sliding window of a mask of the GGUF front end, in tokens including the current one, or 0 if the mask has
// no window. The mask is Select(LogicalAnd(k <= q, k >= q - constant), 0, -inf), reshaped, sliced and converted.
int32_t window_of(const ov::Output<ov::Node>& mask) {
    auto node = mask.get_node_shared_ptr();
    const bool named = node->get_friendly_name().rfind("KQ_mask_swa", 0) == 0;
    for (int steps = 0; steps < 8 && node->get_input_size() > 0; ++steps) {
        if (auto both = ov::as_type_ptr<op::v1::LogicalAnd>(node)) {
            for (const auto& side : both->input_values()) {
                auto within = ov::as_type_ptr<op::v1::GreaterEqual>(side.get_node_shared_ptr());
                auto first = within ? ov::as_type_ptr<op::v1::Subtract>(within->get_input_node_shared_ptr(1)) : nullptr;
                auto past = first ? ov::as_type_ptr<op::v0::Constant>(first->get_input_node_shared_ptr(1)) : nullptr;
                if (past && ov::shape_size(past->get_shape()) == 1) {
                    // No sequence is longer than the largest window, so a larger window has the same effect.
                    const int64_t tokens = std::min(past->cast_vector<int64_t>()[0], window_max - 1) + 1;
                    // A constant of -1 gives 0 tokens, which the paged attention reads as no window.
                    if (tokens != 0) check_window(tokens);
                    return int32_t(tokens);
                }
            }
        }
        node = node->get_input_node_shared_ptr(0);
    }
    OPENVINO_ASSERT(!named, "the mask of a sliding window has an unknown structure");
    return 0;
}

// The sliding windows of the attention layers in the order of the graph, which is unique because each layer depends on the one
// before it.
std::vector<int32_t> windows(const ov::Model& model) {
    int64_t common = 0;
    if (model.has_rt_info(window_section, window_name)) {
        common = model.get_rt_info<int64_t>(window_section, window_name);
        check_window(common);
    }
    std::vector<int32_t> all;
    for (const auto& node : model.get_ordered_ops())
        if (ov::is_type<op::v13::ScaledDotProductAttention>(node))
            all.push_back(common ? int32_t(common) : node->get_input_size() > 3 ? window_of(node->input_value(3)) : 0);
    return all;
}

// Sets the sliding windows, which OpenVINO's pass drops because it does not recognize the masks of the GGUF front end.
void restore_windows(const ov::Model& model, const std::vector<int32_t>& windows) {
    constexpr size_t sliding_window = 10;
    size_t layer = 0;
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), "PagedAttentionExtension") != 0) continue;
        OPENVINO_ASSERT(layer < windows.size(), "SDPAToPagedAttention has created additional attention layers");
        if (const auto window = windows[layer++]) {
            auto input = node->input(sliding_window);
            OPENVINO_ASSERT(input.get_element_type() == ov::element::i32 && input.get_partial_shape() == ov::PartialShape{},
                            "input ", sliding_window, " of the paged attention is not the sliding window");
            input.replace_source_output(op::v0::Constant::create(ov::element::i32, {}, {window}));
        }
    }
    OPENVINO_ASSERT(layer == windows.size(), "SDPAToPagedAttention has not converted all attention layers");
}

}  // namespace

extern "C" int ovfleet_set_sliding_window(ov_model_t* model, uint32_t tokens) {
    return ovfleet::guarded([&] {
        check_window(tokens);
        model->object->set_rt_info(int64_t(tokens), window_section, window_name);
    });
}

extern "C" int ovfleet_make_paged(ov_model_t* model, int* supports_native_attention) {
    return ovfleet::guarded([&] {
        auto& graph = *model->object;
        const auto sliding_windows = windows(graph);
        ovfleet::rotate_whole_heads(graph);
        ov::pass::Manager manager;
        manager.register_pass<ov::pass::SDPAToPagedAttention>();
        manager.run_passes(model->object);
        restore_windows(graph, sliding_windows);
        ovfleet::check_attention_layers(graph);
        *supports_native_attention = ovfleet::supports_native_attention(graph);
    });
}
