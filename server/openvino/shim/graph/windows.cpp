// Rewrites the attention of Qwen's image encoders so that it needs no masks with an element for each pair of patches. Depending
// on the layer, patches attend to each other within windows or in the whole image.
#include <vector>

#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "nodes.hpp"

namespace {

using ovfleet::integer_constant;
using ovfleet::named_parameter;
namespace op = ov::op;
using Attention = op::v13::ScaledDotProductAttention;
using Parameter = std::shared_ptr<op::v0::Parameter>;
using Value = ov::Output<ov::Node>;

Parameter find_parameter(const ov::Model& model, const std::string& name) {
    for (const auto& parameter : model.get_parameters())
        if (parameter->output(0).get_names().count(name)) return parameter;
    return nullptr;
}

// Finds the attention operations that read a mask. Returns false if another operation reads the mask, or if one of the
// attention operations cannot be rewritten.
bool find_attention(const Parameter& mask, std::vector<std::shared_ptr<Attention>>& found) {
    for (const auto& input : mask->output(0).get_target_inputs()) {
        auto attention = ov::as_type_ptr<Attention>(input.get_node()->shared_from_this());
        if (!attention || input.get_index() != 3 || attention->get_input_size() != 4 || attention->get_causal()) return false;
        for (size_t index = 0; index < 3; ++index) {
            const auto& shape = attention->get_input_partial_shape(index);
            // [heads, patches, head size]
            if (shape.rank() != 3 || shape[0].is_dynamic() || shape[2].is_dynamic()) return false;
        }
        found.push_back(attention);
    }
    return true;
}

// Rewrites an attention operation so that all patches attend to each other.
void attend_to_image(Attention& attention) {
    const auto input = [&](size_t index) { return attention.input_value(index); };
    attention.output(0).replace(std::make_shared<Attention>(input(0), input(1), input(2), false)->output(0));
}

struct WindowInputs {
    Parameter slots;    // [windows, slots]: the patch of each slot of a window; any patch if the window has fewer
    Parameter mask;     // [windows, 1, 1, slots]: 0 for slots of patches, -inf for others
    Parameter patches;  // [patches]: the slot of each patch, counted over all windows
};

// Rewrites an attention operation so that the patches of each window attend to each other.
void attend_to_windows(Attention& attention, const WindowInputs& windows) {
    const auto axis = op::v0::Constant::create(ov::element::i64, {}, {1});
    const auto swap = integer_constant({1, 0, 2, 3});
    // [windows, heads, slots, head size]
    auto in_windows = [&](size_t index) {
        auto slots = std::make_shared<op::v8::Gather>(attention.input_value(index), windows.slots, axis);
        return std::make_shared<op::v1::Transpose>(slots, swap);
    };
    auto output = std::make_shared<Attention>(in_windows(0), in_windows(1), in_windows(2), windows.mask, false);
    const auto& shape = attention.get_input_partial_shape(2);
    auto slots = std::make_shared<op::v1::Reshape>(std::make_shared<op::v1::Transpose>(output, swap),
                                                   integer_constant({shape[0].get_length(), -1, shape[2].get_length()}), false);
    attention.output(0).replace(std::make_shared<op::v8::Gather>(slots, windows.patches, axis)->output(0));
}

}  // namespace

int ovfleet_remove_attention_masks(ov_model_t* model, size_t* replaced) {
    return ovfleet::guarded([&] {
        auto& graph = *model->object;
        *replaced = 0;
        const auto image_mask = find_parameter(graph, "attention_mask");
        const auto window_mask = find_parameter(graph, "window_attention_mask");
        std::vector<std::shared_ptr<Attention>> of_image, of_windows;
        if (!image_mask || !find_attention(image_mask, of_image)) return;
        if (window_mask && !find_attention(window_mask, of_windows)) return;
        for (const auto& attention : of_image) attend_to_image(*attention);
        graph.remove_parameter(image_mask);
        if (window_mask) {
            const WindowInputs windows{named_parameter("window_slots", ov::element::i64, {-1, -1}),
                                       named_parameter("window_mask", ov::element::f32, {-1, 1, 1, -1}),
                                       named_parameter("window_patches", ov::element::i64, {-1})};
            for (const auto& attention : of_windows) attend_to_windows(*attention, windows);
            graph.remove_parameter(window_mask);
            graph.add_parameters({windows.slots, windows.mask, windows.patches});
        }
        graph.validate_nodes_and_infer_types();
        *replaced = of_image.size() + of_windows.size();
    });
}
