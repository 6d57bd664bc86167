// The C API's wrappers of models, and the conversion of exceptions to return codes.
#pragma once

#include <cerrno>
#include <cstring>
#include <exception>
#include <ios>
#include <memory>
#include <string>

#include <openvino/core/model.hpp>
#include <openvino/runtime/compiled_model.hpp>
#include <openvino/runtime/core.hpp>

#include "../shim.h"

// The C API's definitions of these types, which are not in its public headers. Their only members are the shared pointers.
struct ov_model {
    std::shared_ptr<ov::Model> object;
};
struct ov_core {
    std::shared_ptr<ov::Core> object;
};
struct ov_compiled_model {
    std::shared_ptr<ov::CompiledModel> object;
};

namespace ovfleet {

std::string& last_error();

// Whether a node is a paged attention operation, either the plugin's or the native one.
inline bool is_paged_attention(const ov::Node& node) { return std::strncmp(node.get_type_name(), "PagedAttention", 14) == 0; }

// The name of the input that lists the tokens whose logits are computed.
constexpr const char* LOGITS_INDICES = "logits_indices";

// Limits the logits of a paged model to the tokens that the new input `logits_indices` lists. The rows of the logits are in the
// order of this input.
void select_logits(ov::Model& model);

// Stores the numbers and sizes of the heads of a paged model in the names of its key cache inputs, because a compiled model
// keeps these names.
void name_heads(const ov::Model& model);

// Runs `body`, and converts an exception to a return code.
template <typename Body>
int guarded(Body body) {
    errno = 0;
    try {
        body();
        return 0;
    } catch (const std::ios_base::failure& error) {
        // The message of a stream exception does not include the system error, which is in errno.
        last_error() = errno ? std::strerror(errno) : error.what();
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "unknown exception";
    }
    return 1;
}

}  // namespace ovfleet
