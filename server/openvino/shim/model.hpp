// How the C API wraps a model, and how failures cross the C border.
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

#include "shim.h"

// The C API's own definitions, which it does not publish: their only members are the shared pointers.
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

// Whether it is a paged attention: a plugin's, or our own.
inline bool is_paged_attention(const ov::Node& node) {
    return std::strncmp(node.get_type_name(), "PagedAttention", 14) == 0;
}

constexpr const char* WANTED_INPUT = "wanted_rows";

// Makes `wanted_rows` an input of a paged model: it computes the logits of these tokens, and `logits` are rows.
void keep_wanted_rows(ov::Model& model);

// Puts the sizes of a paged model's heads where a compiled model that is written has them.
void name_heads(const ov::Model& model);

// Runs `body` and turns what it throws into a return code.
template <typename Body>
int guarded(Body body) {
    errno = 0;
    try {
        body();
        return 0;
    } catch (const std::ios_base::failure& error) {
        // What went wrong with the file is not among what streams say.
        last_error() = errno ? std::strerror(errno) : error.what();
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "unknown exception";
    }
    return 1;
}

}  // namespace ovfleet
