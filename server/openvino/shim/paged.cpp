// From a stateful model to a paged one.
#include <cstring>
#include <vector>

#include <openvino/op/ops.hpp>
#include <openvino/pass/manager.hpp>
#include <openvino/pass/sdpa_to_paged_attention.hpp>

#include "attention/op.hpp"
#include "model.hpp"
#include "rotary.hpp"

namespace {

namespace op = ov::op;

// Where a model that is not paged yet carries the window of all its attentions, also as an IR.
constexpr const char* window_section = "ovfleet";
constexpr const char* window_name = "sliding_window";

// The window that the GGUF front end's mask cuts out, in tokens with the present one; 0 if it cuts none. Its
// form is Select(LogicalAnd(k <= q, k >= q - constant), 0, -inf), reshaped, sliced and converted.
int32_t window_of(const ov::Output<ov::Node>& mask) {
    auto node = mask.get_node_shared_ptr();
    const bool named = node->get_friendly_name().rfind("KQ_mask_swa", 0) == 0;
    for (int steps = 0; steps < 8 && node->get_input_size() > 0; ++steps) {
        if (auto both = ov::as_type_ptr<op::v1::LogicalAnd>(node)) {
            for (const auto& side : both->input_values()) {
                auto within = ov::as_type_ptr<op::v1::GreaterEqual>(side.get_node_shared_ptr());
                auto first = within ? ov::as_type_ptr<op::v1::Subtract>(within->get_input_node_shared_ptr(1)) : nullptr;
                auto past = first ? ov::as_type_ptr<op::v0::Constant>(first->get_input_node_shared_ptr(1)) : nullptr;
                if (past && ov::shape_size(past->get_shape()) == 1) return past->cast_vector<int32_t>()[0] + 1;
            }
        }
        node = node->get_input_node_shared_ptr(0);
    }
    OPENVINO_ASSERT(!named, "the sliding window of its attention is not understood");
    return 0;
}

// The windows of the attentions, in the order of the graph, which the layers' dependence on each other makes
// the only one.
std::vector<int32_t> windows(const ov::Model& model) {
    int64_t of_all = 0;
    if (model.has_rt_info(window_section, window_name))
        of_all = model.get_rt_info<int64_t>(window_section, window_name);
    std::vector<int32_t> all;
    for (const auto& node : model.get_ordered_ops())
        if (ov::is_type<op::v13::ScaledDotProductAttention>(node))
            all.push_back(of_all                        ? int32_t(of_all)
                          : node->get_input_size() > 3 ? window_of(node->input_value(3))
                                                       : 0);
    return all;
}

// The pass knows the masks of other front ends, and drops this one's window without a word.
void restore_windows(const ov::Model& model, const std::vector<int32_t>& windows) {
    constexpr size_t sliding_window = 10;
    size_t layer = 0;
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), "PagedAttentionExtension") != 0) continue;
        OPENVINO_ASSERT(layer < windows.size(), "there are more paged attentions than attentions");
        if (const auto window = windows[layer++]) {
            auto place = node->input(sliding_window);
            OPENVINO_ASSERT(place.get_element_type() == ov::element::i32 && place.get_partial_shape() == ov::PartialShape{},
                            "the paged attention takes its sliding window elsewhere");
            place.replace_source_output(op::v0::Constant::create(ov::element::i32, {}, {window}));
        }
    }
    OPENVINO_ASSERT(layer == windows.size(), "an attention was not made paged");
}

}  // namespace

extern "C" int ovfleet_set_window(ov_model_t* model, uint32_t tokens) {
    return ovfleet::guarded([&] {
        OPENVINO_ASSERT(tokens > 0 && tokens <= INT32_MAX, "a window of ", tokens, " tokens");
        model->object->set_rt_info(int64_t(tokens), window_section, window_name);
    });
}

extern "C" int ovfleet_make_paged(ov_model_t* model, int own_cache, int compute, float share, int weighs, int* own) {
    return ovfleet::guarded([&] {
        const auto cut = windows(*model->object);
        ovfleet::rotate_whole_heads(*model->object);
        ov::pass::Manager manager;
        manager.register_pass<ov::pass::SDPAToPagedAttention>();
        manager.run_passes(model->object);
        restore_windows(*model->object, cut);
        ovfleet::check_attentions(*model->object);
        *own = own_cache >= 0 && ovfleet::put_own_attention(*model->object, ovfleet::Precision(own_cache),
                                                            ovfleet::Compute(compute), share, weighs != 0);
        ovfleet::keep_wanted_rows(*model->object);
        if (!*own) ovfleet::name_heads(*model->object);
    });
}
