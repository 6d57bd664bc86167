// What adapters add to products of our own: in memory, and for the rows of a step.
#pragma once

#include <vector>

#include "../adapted.hpp"
#include "projection.hpp"

namespace ovfleet::projection {

// Adapters as a matrix has them, their number into it. What is measured of the matrix and what becomes of its products is known;
// `norm` is that of its rows, or null.
std::vector<uint8_t> pack_adapters(const std::vector<std::shared_ptr<LowRank>>& parts, const float* norm, Matrix& matrix);

// The rows of a step that have adapters, and what `down` makes of them: so many items that threads take one at a time.
class Lowering {
public:
    // The adapter of each row by its number; null if none has any. Rows that fill up the last tile are like the last.
    void plan(const Matrix& matrix, size_t count, size_t padded, const int32_t* numbers);

    size_t items() const { return items_.size(); }
    // Products of all items.
    size_t products() const { return products_; }
    void compute(const Kernels& kernels, const Matrix& matrix, Numbers from, size_t item) const;

    // For each row; null if none has an adapter that changes this matrix.
    const Lowered* rows() const { return items_.empty() ? nullptr : lowered_.data(); }

private:
    struct Item {
        Owned owned;
        size_t first, last;
    };

    std::vector<Item> items_;
    std::vector<Lowered> lowered_;
    std::vector<uint32_t> order_;
    std::vector<float> low_;
    size_t products_ = 0;
};

}  // namespace ovfleet::projection
