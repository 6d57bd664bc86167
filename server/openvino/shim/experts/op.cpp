#include "op.hpp"

#include "../attributes.hpp"
#include "../thread_groups.hpp"

namespace ovfleet::experts {
namespace {

FloatData floats(const ov::Tensor& tensor) {
    return {const_cast<void*>(tensor.data()), tensor.get_element_type() == ov::element::bf16};
}

}  // namespace

ExpertsOp::ExpertsOp(const ov::OutputVector& inputs, Isa isa, const Experts& experts, bool to_bf16)
    : Op(inputs), isa_(isa), experts_(experts), to_bf16_(to_bf16) {
    constructor_validate_and_infer_types();
}

void ExpertsOp::check_attributes() const {
    const auto check = [](bool holds, const char* fault) {
        OPENVINO_ASSERT(holds, "native experts have invalid attributes: ", fault);
    };
    check(isa_ > Isa::plugin && int64_t(isa_) < ISA_COUNT, "the instruction set is unknown");
    const char* fault = unsupported(experts_);
    check(!fault, fault);
    check(get_input_size() == MEMORY + 1, "the number of inputs must be 2");
}

void ExpertsOp::check_tensors(const ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    // The kernels access the memory of the tensors as these types.
    const auto check_type = [](const ov::Tensor& tensor, const char* name, const ov::element::Type& expected) {
        OPENVINO_ASSERT(tensor.get_element_type() == expected, "the ", name, " of native experts has the type ",
                        tensor.get_element_type(), " instead of ", expected);
    };
    const auto& src = inputs.at(SRC);
    const bool is_bf16 = src.get_element_type() == ov::element::bf16;
    check_type(src, "source", is_bf16 ? ov::element::bf16 : ov::element::f32);
    const auto& shape = src.get_shape();
    const size_t columns = experts_.gate_up.K;
    OPENVINO_ASSERT(!shape.empty() && shape.back() == columns, "the source of native experts has the shape ", shape,
                    "; its last dimension must be ", columns);
    OPENVINO_ASSERT(src.get_size() / columns <= ROWS_MAX, "the source of native experts has ", src.get_size() / columns,
                    " rows; at most ", ROWS_MAX, " are supported");
    check_type(inputs.at(MEMORY), "memory", ov::element::u8);
    OPENVINO_ASSERT(inputs[MEMORY].get_size() == memory_bytes(experts_), "the memory of native experts has ",
                    inputs[MEMORY].get_size(), " bytes instead of ", memory_bytes(experts_));
    check_type(outputs.at(0), "destination", to_bf16_ ? ov::element::bf16 : ov::element::f32);
}

void ExpertsOp::validate_and_infer_types() {
    check_attributes();
    set_output_type(0, to_bf16_ ? ov::element::bf16 : ov::element::f32, get_input_partial_shape(SRC));
}

std::shared_ptr<ov::Node> ExpertsOp::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    return std::make_shared<ExpertsOp>(inputs, isa_, experts_, to_bf16_);
}

bool ExpertsOp::visit_attributes(ov::AttributeVisitor& visitor) {
    auto& [count, used, has_biases, gate_up, down] = experts_;
    // The other members of `experts_` are computed from these.
    std::vector<int64_t> all{int64_t(count),
                             int64_t(used),
                             int64_t(gate_up.K),
                             int64_t(down.K),
                             int64_t(gate_up.terms),
                             int64_t(gate_up.bits),
                             int64_t(gate_up.group),
                             bits_of(gate_up.scale_factor),
                             int64_t(down.bits),
                             int64_t(down.group),
                             bits_of(down.scale_factor),
                             int64_t(gate_up.epilogue),
                             has_biases ? 1 : 0,
                             gate_up.per_channel ? 1 : 0,
                             down.per_channel ? 1 : 0};
    const size_t expected = all.size();
    visit_isa(visitor, isa_);
    visitor.on_attribute("experts", all);
    visitor.on_attribute("to_bf16", to_bf16_);
    OPENVINO_ASSERT(all.size() == expected, "native experts have ", all.size(), " attributes instead of ", expected);
    count = size_t(all[0]), used = size_t(all[1]);
    gate_up.K = down.N = size_t(all[2]);
    down.K = size_t(all[3]), gate_up.N = 2 * down.K;
    gate_up.terms = down.terms = size_t(all[4]);
    gate_up.bits = size_t(all[5]), gate_up.group = size_t(all[6]), gate_up.scale_factor = float_of(all[7]);
    down.bits = size_t(all[8]), down.group = size_t(all[9]), down.scale_factor = float_of(all[10]);
    gate_up.epilogue = projection::Epilogue(all[11]);
    has_biases = all[12] != 0;
    gate_up.per_channel = all[13] != 0, down.per_channel = all[14] != 0;
    return true;
}

bool ExpertsOp::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    const auto* kernels = projection::projection_kernels(isa_);
    OPENVINO_ASSERT(kernels, "this processor does not support the instruction set of native experts: ", int64_t(isa_));
    check_tensors(outputs, inputs);
    const auto& src = inputs[SRC];
    outputs[0].set_shape(src.get_shape());
    const auto* memory = static_cast<const uint8_t*>(inputs[MEMORY].data());
    if (num_thread_groups() > 1 && placed_.exchange(memory) != memory) place(experts_, memory);
    run(*kernels, experts_, memory, src.get_size() / experts_.gate_up.K, floats(src), floats(outputs[0]));
    return true;
}

ov::Extension::Ptr extension() { return std::make_shared<ov::OpExtension<ExpertsOp>>(); }

}  // namespace ovfleet::experts
