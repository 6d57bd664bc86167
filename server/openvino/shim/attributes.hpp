// Converts attributes of operations to the types in which files store them, and back.
#pragma once

#include <cstdint>
#include <cstring>

#include <openvino/core/attribute_visitor.hpp>

#include "isa.hpp"

namespace ovfleet {

// Floats are written as bits, because their text form is not exact.
inline int64_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float float_of(int64_t number) {
    const auto bits = uint32_t(number);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline void visit_isa(ov::AttributeVisitor& visitor, Isa& isa) {
    auto number = int64_t(isa);
    visitor.on_attribute("isa", number);
    isa = Isa(number);
}

}  // namespace ovfleet
