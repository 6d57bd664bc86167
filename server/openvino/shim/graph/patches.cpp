// Computes the patch embeddings of an image encoder with one matrix multiplication. Qwen's encoders compute them with a
// convolution whose kernel is as large as a patch. The plugin computes such convolutions one patch at a time, which is much
// slower.
#include <algorithm>
#include <memory>

#include <openvino/op/ops.hpp>

#include "model.hpp"
#include "nodes.hpp"

namespace {

namespace op = ov::op;
using Convolution = op::v1::Convolution;

// Whether the kernel of a convolution is as large as an element of the batch, so that it is applied to each element once.
bool covers_input(const Convolution& convolution) {
    const auto& input = convolution.get_input_partial_shape(0);
    const auto& kernel = convolution.get_input_partial_shape(1);
    if (kernel.is_dynamic() || input.rank().is_dynamic() || input.size() != kernel.size()) return false;
    if (ov::shape_size(kernel.to_shape()) == 0) return false;
    for (size_t axis = 1; axis < kernel.size(); ++axis)
        if (input[axis] != kernel[axis]) return false;
    const auto is_0 = [](std::ptrdiff_t padding) { return padding == 0; };
    const auto is_1 = [](size_t dilation) { return dilation == 1; };
    const auto &begin = convolution.get_pads_begin(), &end = convolution.get_pads_end();
    const auto& dilations = convolution.get_dilations();
    return std::all_of(begin.begin(), begin.end(), is_0) && std::all_of(end.begin(), end.end(), is_0) &&
           std::all_of(dilations.begin(), dilations.end(), is_1);
}

void replace_with_product(Convolution& convolution) {
    const auto kernel = convolution.get_input_shape(1);
    const int64_t outputs = int64_t(kernel[0]), elements = int64_t(ov::shape_size(kernel) / kernel[0]);
    const auto rows = [&](size_t input, int64_t count) {
        const auto shape = ovfleet::integer_constant({count, elements});
        return std::make_shared<op::v1::Reshape>(convolution.input_value(input), shape, false);
    };
    const auto product = std::make_shared<op::v0::MatMul>(rows(0, -1), rows(1, outputs), false, true);
    std::vector<int64_t> shape(kernel.size(), 1);
    shape[0] = -1, shape[1] = outputs;
    const auto output = std::make_shared<op::v1::Reshape>(product, ovfleet::integer_constant(shape), false);
    output->set_friendly_name(convolution.get_friendly_name());
    convolution.output(0).replace(output->output(0));
}

}  // namespace

int ovfleet_replace_patch_convolutions(ov_model_t* model, size_t* replaced) {
    return ovfleet::guarded([&] {
        *replaced = 0;
        for (const auto& node : model->object->get_ordered_ops()) {
            const auto convolution = ov::as_type_ptr<Convolution>(node);
            if (!convolution || !covers_input(*convolution)) continue;
            replace_with_product(*convolution);
            ++*replaced;
        }
    });
}
