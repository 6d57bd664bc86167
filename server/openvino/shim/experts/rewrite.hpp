// Replaces the experts of a graph with native ones.
#pragma once

#include <set>

#include <openvino/core/model.hpp>

#include "../projection/rewrite.hpp"

namespace ovfleet::experts {

// Whether the native kernels support the experts of a model.
struct Support {
    // The number of layers with experts, and whether all of them are supported.
    size_t layers = 0;
    bool supports_all = true;
    // The multiplications by the weights of the supported layers' routers. The native experts include these multiplications.
    std::set<const ov::Node*> routers;
};

Support support(const ov::Model& model);

// Replaces all experts of a model, which must be supported, together with their routers. Returns the number of replaced
// layers.
size_t replace_experts(ov::Model& model, const projection::Target& target);

}  // namespace ovfleet::experts
