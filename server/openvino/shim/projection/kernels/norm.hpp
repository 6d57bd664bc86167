// The RMS norm of the rows of the source. Only for kernels.
#pragma once

#include "../../vectors.hpp"
#include "projection.hpp"

namespace {

using namespace ovfleet::projection;

// Computes 1 / sqrt(mean(row * row) + epsilon).
template <typename T>
inline float inverse_rms(const Matmul& matmul, const T* row) {
    Floats squares{};
    for (size_t i = 0; i < matmul.K; i += LANES) {
        const Floats value = load(row + i);
        squares += value * value;
    }
    return 1 / __builtin_sqrtf(horizontal_sum(squares) / float(matmul.K) + matmul.epsilon);
}

}  // namespace
