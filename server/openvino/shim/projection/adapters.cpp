// What adapters add to products of our own: in memory, and for the rows of a step.
#include "adapters.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "../threads.hpp"
#include "pack.hpp"

namespace ovfleet::projection {
namespace {

// Rows and ranks of an item: the ranks' numbers stay in a processor's own cache while the rows pass by.
constexpr size_t ROWS_AT_ONCE = 32, RANKS_AT_ONCE = 8;

// A part of an adapter, and where its ranks are among the adapter's.
struct Placed {
    const LowRank* part;
    size_t rank;
};

// What is behind each other in memory.
class Memory {
public:
    // A place of so many bytes of zeros, where a cache line begins.
    size_t place(size_t bytes) {
        const size_t at = ceiling(bytes_.size(), 64) * 64;
        bytes_.resize(at + ceiling(bytes, 64) * 64);
        return at;
    }
    template <typename T>
    T* at(size_t place) {
        return reinterpret_cast<T*>(bytes_.data() + place);
    }
    std::vector<uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<uint8_t> bytes_;
};

// The part that changes an output; null if none does.
const Placed* placed_at(const std::vector<Placed>& all, size_t output) {
    for (const auto& one : all)
        if (output >= one.part->first && output < one.part->first + one.part->rows) return &one;
    return nullptr;
}

// Writes what changes half of a panel; where, is the answer.
Half pack_half(const Matrix& matrix, const std::vector<Placed>& all, size_t panel, size_t half, Memory& memory) {
    constexpr size_t width = PANEL / 2;
    const Placed* of[width];
    size_t first = SIZE_MAX, last = 0;
    for (size_t i = 0; i < width; ++i) {
        const auto output = output_at(matrix, panel, half * width + i);
        of[i] = output ? placed_at(all, *output) : nullptr;
        if (!of[i]) continue;
        first = std::min(first, of[i]->rank);
        last = std::max(last, of[i]->rank + of[i]->part->ranks);
    }
    if (last == 0) return {0, 0, 0};
    const size_t place = memory.place((last - first) * width * sizeof(float));
    auto* up = memory.at<float>(place);
    for (size_t i = 0; i < width; ++i) {
        if (!of[i]) continue;
        const auto& [part, begin] = *of[i];
        const float* row = part->up.data() + (*output_at(matrix, panel, half * width + i) - part->first) * part->ranks;
        for (size_t rank = 0; rank < part->ranks; ++rank) up[(begin + rank - first) * width + i] = row[rank];
    }
    return {first, last, place};
}

Adapter pack_adapter(const Matrix& matrix, int32_t number, const std::vector<Placed>& all, const float* norm, Memory& memory) {
    const size_t ranks = ceiling(all.back().rank + all.back().part->ranks, RANKS) * RANKS;
    const size_t down = memory.place(ranks * matrix.inputs * sizeof(float));
    for (const auto& [part, begin] : all) {
        auto* to = memory.at<float>(down) + begin * matrix.inputs;
        std::memcpy(to, part->down.data(), part->down.size() * sizeof(float));
        for (size_t i = 0; norm && i < part->down.size(); ++i) to[i] *= norm[i % matrix.inputs];
    }
    const size_t halves = memory.place(panels(matrix) * 2 * sizeof(Half));
    for (size_t i = 0; i < panels(matrix) * 2; ++i) {
        const auto half = pack_half(matrix, all, i / 2, i % 2, memory);
        memory.at<Half>(halves)[i] = half;
    }
    return {number, ranks, down, halves};
}

}  // namespace

std::vector<uint8_t> pack_adapters(const std::vector<std::shared_ptr<LowRank>>& parts, const float* norm, Matrix& matrix) {
    std::map<int32_t, std::vector<Placed>> adapters;
    for (const auto& part : parts) {
        auto& all = adapters[part->adapter];
        all.push_back({part.get(), all.empty() ? 0 : all.back().rank + all.back().part->ranks});
    }
    matrix.adapter_count = adapters.size();
    Memory memory;
    size_t at = memory.place(adapters.size() * sizeof(Adapter));
    for (const auto& [number, all] : adapters) {
        const auto adapter = pack_adapter(matrix, number, all, norm, memory);
        *memory.at<Adapter>(at) = adapter;
        at += sizeof(Adapter);
    }
    return memory.take();
}

void Lowering::plan(const Matrix& matrix, size_t count, size_t padded, const int32_t* numbers) {
    items_.clear();
    products_ = 0;
    if (!numbers || matrix.adapter_count == 0) return;
    lowered_.assign(padded, {});
    order_.clear();
    order_.reserve(count);
    // By adapter, in the order of the rows.
    std::vector<Owned> owned;
    size_t low = 0;
    for (const auto* adapter = matrix.adapters; adapter != matrix.adapters + matrix.adapter_count; ++adapter) {
        const size_t begin = order_.size();
        for (size_t row = 0; row < count; ++row) {
            if (numbers[row] != adapter->number) continue;
            lowered_[row].adapter = adapter;
            order_.push_back(uint32_t(row));
        }
        if (order_.size() == begin) continue;
        owned.push_back({adapter, order_.data() + begin, order_.size() - begin, nullptr});
        low += owned.back().count * adapter->ranks;
        products_ += owned.back().count * adapter->ranks * matrix.inputs;
    }
    if (low_.size() < low) low_.resize(low);
    float* to = low_.data();
    for (auto& [adapter, rows, all, _] : owned) {
        for (size_t begin = 0; begin < all; begin += ROWS_AT_ONCE) {
            const size_t some = std::min(ROWS_AT_ONCE, all - begin);
            for (size_t first = 0; first < adapter->ranks; first += RANKS_AT_ONCE)
                items_.push_back({{adapter, rows + begin, some, to}, first, std::min(first + RANKS_AT_ONCE, size_t(adapter->ranks))});
            for (size_t i = begin; i < begin + some; ++i, to += adapter->ranks) lowered_[rows[i]].low = to;
        }
    }
    std::fill(lowered_.begin() + count, lowered_.end(), lowered_[count - 1]);
}

void Lowering::compute(const Kernels& kernels, const Matrix& matrix, Numbers from, size_t item) const {
    const auto& [owned, first, last] = items_[item];
    kernels.lower(matrix, from, owned, first, last);
}

}  // namespace ovfleet::projection
