#include "adapters.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "../threads.hpp"
#include "pack.hpp"

namespace ovfleet::projection {
namespace {

// The maximum size of a work item: the number of input rows, and the number of rows of the down matrix. These rows of the down
// matrix stay in the cache of a core while the input rows are multiplied by them.
constexpr size_t ITEM_ROWS = 32, ITEM_RANKS = 8;

// A part of an adapter, and its offset in the adapter's rank dimension, in which the parts are concatenated.
struct RankedPart {
    const LoraPart* part;
    size_t rank;
};

// Memory in which objects are stored one after the other.
class Memory {
public:
    // Adds zeroed bytes at a multiple of 64 bytes (a cache line), and returns their position.
    size_t allocate(size_t bytes) {
        const size_t at = div_up(bytes_.size(), 64) * 64;
        bytes_.resize(at + div_up(bytes, 64) * 64);
        return at;
    }
    template <typename T>
    T* at(size_t position) {
        return reinterpret_cast<T*>(bytes_.data() + position);
    }
    std::vector<uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<uint8_t> bytes_;
};

// Returns the part that applies to a row of the weights, or null if no part does.
const RankedPart* part_at(const std::vector<RankedPart>& all, size_t row) {
    for (const auto& one : all)
        if (row >= one.part->first && row < one.part->first + one.part->rows) return &one;
    return nullptr;
}

// Packs the rows of an adapter's `up` matrices that belong to one half of a block of columns.
UpBlock pack_up_block(const Matmul& matmul, const std::vector<RankedPart>& all, size_t block, size_t half, Memory& memory) {
    constexpr size_t width = N_BLOCK / 2;
    // The part that applies to each column, and the row of the column in this part.
    const RankedPart* parts[width];
    size_t rows[width], first = SIZE_MAX, last = 0;
    for (size_t i = 0; i < width; ++i) {
        const auto row = weight_row(matmul, block, half * width + i);
        parts[i] = row ? part_at(all, *row) : nullptr;
        if (!row || !parts[i]) continue;
        rows[i] = *row - parts[i]->part->first;
        first = std::min(first, parts[i]->rank);
        last = std::max(last, parts[i]->rank + parts[i]->part->ranks);
    }
    if (last == 0) return {0, 0, 0};
    const size_t position = memory.allocate((last - first) * width * sizeof(float));
    auto* up = memory.at<float>(position);
    for (size_t i = 0; i < width; ++i) {
        if (!parts[i]) continue;
        const auto& [part, begin] = *parts[i];
        const float* row = part->up.data() + rows[i] * part->ranks;
        for (size_t rank = 0; rank < part->ranks; ++rank) up[(begin + rank - first) * width + i] = row[rank];
    }
    return {first, last, position};
}

LoraAdapter pack_adapter(const Matmul& matmul, int32_t number, const std::vector<RankedPart>& all, const float* norm,
                         Memory& memory) {
    const size_t ranks = div_up(all.back().rank + all.back().part->ranks, RANK_BLOCK) * RANK_BLOCK;
    const size_t down = memory.allocate(ranks * matmul.K * sizeof(float));
    for (const auto& [part, begin] : all) {
        auto* to = memory.at<float>(down) + begin * matmul.K;
        std::memcpy(to, part->down.data(), part->down.size() * sizeof(float));
        for (size_t i = 0; norm && i < part->down.size(); ++i) to[i] *= norm[i % matmul.K];
    }
    const size_t up_blocks = memory.allocate(num_n_blocks(matmul) * 2 * sizeof(UpBlock));
    for (size_t i = 0; i < num_n_blocks(matmul) * 2; ++i) {
        const auto up_block = pack_up_block(matmul, all, i / 2, i % 2, memory);
        memory.at<UpBlock>(up_blocks)[i] = up_block;
    }
    return {number, ranks, down, up_blocks};
}

}  // namespace

std::vector<uint8_t> pack_adapters(const std::vector<std::shared_ptr<LoraPart>>& parts, const float* norm, Matmul& matmul) {
    std::map<int32_t, std::vector<RankedPart>> adapters;
    for (const auto& part : parts) {
        auto& all = adapters[part->adapter];
        all.push_back({part.get(), all.empty() ? 0 : all.back().rank + all.back().part->ranks});
    }
    matmul.adapter_count = adapters.size();
    Memory memory;
    size_t at = memory.allocate(adapters.size() * sizeof(LoraAdapter));
    for (const auto& [number, all] : adapters) {
        const auto adapter = pack_adapter(matmul, number, all, norm, memory);
        *memory.at<LoraAdapter>(at) = adapter;
        at += sizeof(LoraAdapter);
    }
    return memory.take();
}

void AdapterProducts::plan(const Matmul& matmul, size_t M, size_t padded, const int32_t* numbers) {
    items_.clear();
    products_ = 0;
    if (!numbers || matmul.adapter_count == 0) return;
    lora_.assign(padded, {});
    order_.clear();
    order_.reserve(M);
    // The rows of each adapter, in ascending order.
    std::vector<AdapterRows> all;
    size_t results = 0;
    for (const auto* adapter = matmul.adapters; adapter != matmul.adapters + matmul.adapter_count; ++adapter) {
        const size_t begin = order_.size();
        for (size_t row = 0; row < M; ++row) {
            if (numbers[row] != adapter->number) continue;
            lora_[row].adapter = adapter;
            order_.push_back(uint32_t(row));
        }
        if (order_.size() == begin) continue;
        all.push_back({adapter, order_.data() + begin, order_.size() - begin, nullptr});
        results += all.back().count * adapter->ranks;
        products_ += all.back().count * adapter->ranks * matmul.K;
    }
    if (down_.size() < results) down_.resize(results);
    float* to = down_.data();
    for (const auto& [adapter, rows, count, _] : all) {
        for (size_t begin = 0; begin < count; begin += ITEM_ROWS) {
            const size_t some = std::min(ITEM_ROWS, count - begin);
            for (size_t first = 0; first < adapter->ranks; first += ITEM_RANKS)
                items_.push_back(
                    {{adapter, rows + begin, some, to}, first, std::min(first + ITEM_RANKS, size_t(adapter->ranks))});
            for (size_t i = begin; i < begin + some; ++i, to += adapter->ranks) lora_[rows[i]].values = to;
        }
    }
    std::fill(lora_.begin() + M, lora_.end(), lora_[M - 1]);
}

void AdapterProducts::compute(const Kernels& kernels, const Matmul& matmul, FloatData src, size_t item) const {
    const auto& [rows, first, last] = items_[item];
    kernels.lora_down(matmul, src, rows, first, last);
}

}  // namespace ovfleet::projection
