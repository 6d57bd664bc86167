// What adapters add to projections that will be our own, until they are.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <openvino/core/model.hpp>
#include <openvino/core/runtime_attribute.hpp>

namespace ovfleet {

constexpr const char* ADAPTERS_INPUT = "adapters";

// What one adapter adds to outputs of a projection, `rows` of them from `first` on: up * (down * x).
struct LowRank {
    int32_t adapter;
    size_t first, rows, ranks;
    // `[ranks][columns]` and `[rows][ranks]`.
    std::vector<float> down, up;
};

// An attribute of a MatMul. It is of that one alone: what else a pass makes of it is not adapted.
class Adapted : public ov::RuntimeAttribute {
public:
    OPENVINO_RTTI("adapted", "ovfleet", ov::RuntimeAttribute);

    bool is_copyable() const override { return false; }
    bool is_copyable(const std::shared_ptr<ov::Node>&) const override { return false; }

    std::vector<std::shared_ptr<LowRank>> parts;
};

// What is added to a node; null if nothing is.
inline std::shared_ptr<Adapted> adapted_of(const ov::Node& node) {
    const auto& info = node.get_rt_info();
    const auto found = info.find(Adapted::get_type_info_static());
    return found == info.end() ? nullptr : found->second.as<std::shared_ptr<Adapted>>();
}

inline void set_adapted(ov::Node& node, std::shared_ptr<Adapted> adapted) {
    node.get_rt_info()[Adapted::get_type_info_static()] = std::move(adapted);
}

// How many parts a model has been given, of which none may get lost.
inline size_t adapted_parts(const ov::Model& model) {
    return model.has_rt_info("ovfleet", "adapted_parts") ? size_t(model.get_rt_info<int64_t>("ovfleet", "adapted_parts")) : 0;
}
inline void set_adapted_parts(ov::Model& model, size_t count) { model.set_rt_info(int64_t(count), "ovfleet", "adapted_parts"); }

}  // namespace ovfleet
