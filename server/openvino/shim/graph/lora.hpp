// The matrices of adapters, attached to projections that native projections will replace.
#pragma once

#include <memory>
#include <vector>

#include <openvino/core/model.hpp>
#include <openvino/core/runtime_attribute.hpp>

namespace ovfleet {

constexpr const char* ADAPTERS_INPUT = "adapters";

// The part of an adapter that adds `up * (down * x)` to `rows` outputs of a projection, starting at the output `first`.
struct LoraPart {
    int32_t adapter;
    size_t first, rows, ranks;
    // The shapes are `[ranks][columns]` and `[rows][ranks]`.
    std::vector<float> down, up;
};

// An attribute with the adapters of a MatMul. It is not copyable, so that passes do not copy it to the nodes that replace the
// MatMul.
class Lora : public ov::RuntimeAttribute {
public:
    OPENVINO_RTTI("lora", "ovfleet", ov::RuntimeAttribute);

    bool is_copyable() const override { return false; }
    bool is_copyable(const std::shared_ptr<ov::Node>&) const override { return false; }

    std::vector<std::shared_ptr<LoraPart>> parts;
};

// Returns the attribute of a node, or null if the node has no such attribute.
inline std::shared_ptr<Lora> lora_of(const ov::Node& node) {
    const auto& info = node.get_rt_info();
    const auto found = info.find(Lora::get_type_info_static());
    return found == info.end() ? nullptr : found->second.as<std::shared_ptr<Lora>>();
}

inline void set_lora(ov::Node& node, const std::shared_ptr<Lora>& lora) {
    node.get_rt_info()[Lora::get_type_info_static()] = lora;
}

// Returns the number of parts that have been attached to the projections of a model. `replace_projections` compares this number
// with the number of parts in the native projections, to detect lost parts.
inline size_t lora_parts(const ov::Model& model) {
    return model.has_rt_info("ovfleet", "lora_parts") ? size_t(model.get_rt_info<int64_t>("ovfleet", "lora_parts")) : 0;
}
inline void set_lora_parts(ov::Model& model, size_t count) { model.set_rt_info(int64_t(count), "ovfleet", "lora_parts"); }

}  // namespace ovfleet
