// Groups the rows of a step by their experts, so that each read of an expert's weights serves many of its rows, and the weights
// of experts without rows are not read.
#include "run.hpp"

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include <openvino/core/type/bfloat16.hpp>

#include "../projection/run.hpp"
#include "../threads.hpp"

namespace ovfleet::experts {
namespace {

using namespace projection;

// The numbers of rows and of experts whose logits a thread computes at a time.
constexpr size_t ROUTED_ROWS = 32, ROUTED_EXPERTS = 8;
// The approximate number of multiplications that a thread computes at a time, and the minimum number of parts for each thread.
// With several parts per thread, a late thread delays the others less.
constexpr size_t GRAIN_PRODUCTS = 1 << 20, PARTS_PER_THREAD_MIN = 8;
// The minimum number of elements for which a second thread makes packing rows or adding results faster.
constexpr size_t PARALLEL_ELEMENTS = 1 << 14;

// The rows of an expert. The rows of all experts follow each other in the order of the experts.
struct Group {
    size_t expert, first;
    PackedSrc packed;
};

// A part of a tile, which one thread packs.
struct PackItem {
    const Group* group;
    size_t tile, part;
};

// A part of the product of an expert.
struct ProductItem {
    const Group* group;
    DstRange range;
};

// Memory that is reused from step to step. Each row has `used` assignments, each to one expert.
struct Workspace {
    // The logits of the router, and the weight of each assignment.
    std::vector<float> logits, weights;
    // `numbers` contains the indices of the source rows, and `chosen` the expert of each assignment. `places` contains the
    // index of each assignment among the rows of all experts, and `rows` the source row at each of these indices.
    std::vector<uint32_t> numbers, chosen, places, rows;
    std::vector<size_t> ends;
    // The rows of all experts: `gathered` contains copies of the source rows, `packed` the rows to be multiplied, in the format
    // of the kernels, and `intermediate` and `results` the results of the first and second multiplications.
    Buffer<uint8_t> gathered, packed;
    Buffer<float> intermediate, results;
    std::vector<Group> groups;
    std::vector<PackItem> pack_items;
    std::vector<ProductItem> product_items;
    // The index of the first product item of each group of threads, followed by the number of items.
    std::vector<size_t> first_products;
};

size_t bytes_of(FloatData data) { return data.is_bf16 ? 2 : 4; }

// Calls `body` for each item. Each thread begins with a contiguous part of the items, so that it often multiplies rows that it
// has packed itself.
template <typename Item, typename Body>
void for_each(const std::vector<Item>& items, Threading threading, const Body& body) {
    const size_t owners = num_threads();
    parallel_for_owned(
        owners, [&](size_t owner) { return items.size() * owner / owners; }, 1, threading,
        [&](size_t index) { body(items[index]); });
}

// Multiplies the rows by the matrix of the router in f32, with the kernel for the first matrix of an adapter.
void compute_logits(const Kernels& kernels, const Experts& experts, const uint8_t* memory, size_t M, FloatData src,
                    Workspace& space) {
    Matmul matmul = experts.gate_up;
    matmul.adapters = reinterpret_cast<const LoraAdapter*>(memory);
    const LoraAdapter router{0, router_rows(experts), 0, 0};
    space.numbers.resize(M);
    std::iota(space.numbers.begin(), space.numbers.end(), 0u);
    space.logits.resize(M * router.ranks);
    const size_t columns = div_up(router.ranks, ROUTED_EXPERTS);
    parallel_for(div_up(M, ROUTED_ROWS) * columns, 1, [&](size_t item) {
        const size_t row = item / columns * ROUTED_ROWS, first = item % columns * ROUTED_EXPERTS;
        const AdapterRows rows{&router, space.numbers.data() + row, std::min(ROUTED_ROWS, M - row),
                               space.logits.data() + row * router.ranks};
        kernels.lora_down(matmul, src, rows, first, std::min(first + ROUTED_EXPERTS, size_t(router.ranks)));
    });
}

// Chooses the experts with the largest logits, in descending order. If logits are equal, the expert with the lower index comes
// first. The weights of the experts are the softmax of their logits.
void choose(const Experts& experts, const float* logits, uint32_t* chosen, float* weights) {
    size_t filled = 0;
    for (uint32_t expert = 0; expert < experts.count; ++expert) {
        if (filled == experts.used && !(logits[expert] > logits[chosen[filled - 1]])) continue;
        size_t at = filled < experts.used ? filled++ : filled - 1;
        for (; at > 0 && logits[expert] > logits[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
    float sum = 0;
    for (size_t i = 0; i < experts.used; ++i) sum += weights[i] = std::exp(logits[chosen[i]] - logits[chosen[0]]);
    for (size_t i = 0; i < experts.used; ++i) weights[i] /= sum;
}

void route(const Kernels& kernels, const Experts& experts, const uint8_t* memory, size_t M, FloatData src, Workspace& space) {
    compute_logits(kernels, experts, memory, M, src, space);
    space.chosen.resize(M * experts.used);
    space.weights.resize(M * experts.used);
    const auto* bias = reinterpret_cast<const float*>(memory + router_bias_at(experts));
    parallel_for(M, ROUTED_ROWS, [&](size_t row) {
        float* logits = space.logits.data() + row * router_rows(experts);
        for (size_t expert = 0; experts.has_biases && expert < experts.count; ++expert) logits[expert] += bias[expert];
        choose(experts, logits, space.chosen.data() + row * experts.used, space.weights.data() + row * experts.used);
    });
}

// Sorts the assignments by expert, and the assignments to the same expert by row.
void group(const Experts& experts, Workspace& space) {
    const auto& chosen = space.chosen;
    auto& ends = space.ends;
    ends.assign(experts.count + 1, 0);
    for (const auto expert : chosen) ++ends[expert + 1];
    space.groups.clear();
    for (size_t expert = 0; expert < experts.count; ++expert) {
        Group one{expert, ends[expert], {}};
        one.packed.M = ends[expert + 1];
        if (one.packed.M > 0) space.groups.push_back(one);
        ends[expert + 1] += ends[expert];
    }
    // From here on, `ends[expert]` is the index of the expert's next assignment.
    space.places.resize(chosen.size());
    space.rows.resize(chosen.size());
    for (size_t i = 0; i < chosen.size(); ++i) {
        space.places[i] = uint32_t(ends[chosen[i]]++);
        space.rows[space.places[i]] = uint32_t(i / experts.used);
    }
}

// Packs `from`, which contains the rows of all experts, as the source of `matmul`. Before a part is packed, `prepare` is
// called with the range of its rows.
template <typename Prepare>
void pack_groups(const Kernels& kernels, const Matmul& matmul, FloatData from, Workspace& space, const Prepare& prepare) {
    const auto& division = kernels.division;
    size_t bytes = 0, elements = 0;
    space.pack_items.clear();
    for (auto& one : space.groups) {
        auto& packed = one.packed;
        packed.m_tile = division.rows_per_tile(packed.M);
        bytes += div_up(kernels.src_bytes(matmul, num_tiles(packed) * packed.m_tile), ALIGNMENT) * ALIGNMENT;
        elements += packed.M * matmul.K;
        for (size_t tile = 0; tile < num_tiles(packed); ++tile)
            for (size_t part = 0; part < div_up(packed.m_tile, division.packed_rows); ++part)
                space.pack_items.push_back({&one, tile, part});
    }
    auto* data = space.packed.at_least(bytes);
    for (auto& one : space.groups) {
        one.packed.data = data;
        data += div_up(kernels.src_bytes(matmul, num_tiles(one.packed) * one.packed.m_tile), ALIGNMENT) * ALIGNMENT;
    }
    const size_t row_bytes = matmul.K * bytes_of(from);
    const auto threading = elements < PARALLEL_ELEMENTS ? Threading::serial : Threading::parallel;
    for_each(space.pack_items, threading, [&](const PackItem& item) {
        const auto& [expert, first, packed] = *item.group;
        const size_t begin = item.tile * packed.m_tile + item.part * division.packed_rows;
        const size_t end = std::min(std::min(begin + division.packed_rows, (item.tile + 1) * packed.m_tile), packed.M);
        if (begin < end) prepare(first + begin, first + end);
        const FloatData rows{static_cast<uint8_t*>(from.data) + first * row_bytes, from.is_bf16};
        kernels.pack_src(matmul, rows, item.tile, item.part, packed);
    });
}

// The first or the second matrices of all experts, and their biases, which may be null.
struct Matrices {
    const uint8_t* weights;
    const float* biases;
};

// Multiplies the packed rows of each expert by its matrix.
void multiply_groups(const Kernels& kernels, const Matmul& matmul, const Matrices& matrices, float* dst, Workspace& space) {
    const auto& division = kernels.division;
    const size_t n_blocks = num_n_blocks(matmul), columns = dst_columns(matmul);
    const size_t blocks_max = n_blocks * space.groups.size() / (PARTS_PER_THREAD_MIN * num_threads());
    auto& items = space.product_items;
    auto& firsts = space.first_products;
    items.clear();
    firsts.clear();
    // Each group of threads multiplies by its own blocks of each matrix, which are on the NUMA node of the group.
    const Groups groups = Groups::of_arena();
    for (size_t thread_group = 0; thread_group < groups.count; ++thread_group) {
        const size_t first_block = groups.first_block(groups.begin(thread_group), n_blocks);
        const size_t last_block = groups.first_block(groups.begin(thread_group + 1), n_blocks);
        firsts.push_back(items.size());
        for (const auto& one : space.groups) {
            const size_t tiles = num_tiles(one.packed);
            // Each term of the source counts as a separate element.
            const size_t tile_elements = one.packed.m_tile * matmul.K * matmul.terms;
            const size_t part_tiles =
                std::min(std::max(division.cached_elements / tile_elements, division.cached_tiles_min), tiles);
            const size_t grain = GRAIN_PRODUCTS / (part_tiles * tile_elements * N_BLOCK);
            const size_t part_blocks = std::max<size_t>(std::min(grain, blocks_max), 1);
            for (size_t tile = 0; tile < tiles; tile += part_tiles)
                for (size_t block = first_block; block < last_block; block += part_blocks)
                    items.push_back({&one,
                                     {tile, std::min(tile + part_tiles, tiles), block,
                                      std::min(block + part_blocks, last_block), n_blocks - 1}});
        }
    }
    firsts.push_back(items.size());
    // The same thread probably computes the next item, so the first block of that item is prefetched. The matrices of all
    // experts follow each other in memory, so the blocks of later experts are numbered after those of this expert.
    for (size_t i = 0; i + 1 < items.size(); ++i) {
        const size_t expert = items[i].group->expert, next = items[i + 1].group->expert;
        if (next >= expert) items[i].range.next_block = (next - expert) * n_blocks + items[i + 1].range.block_begin;
    }
    const auto begin_of = [&](size_t slot) {
        if (slot == groups.threads) return items.size();
        const size_t thread_group = groups.of_slot(slot), first = firsts[thread_group], first_slot = groups.begin(thread_group);
        const size_t members = groups.begin(thread_group + 1) - first_slot;
        return first + (firsts[thread_group + 1] - first) * (slot - first_slot) / members;
    };
    parallel_for_owned(groups.threads, begin_of, 1, Threading::parallel, [&](size_t index) {
        const ProductItem& item = items[index];
        Matmul of_expert = matmul;
        of_expert.weights = matrices.weights + item.group->expert * matrix_bytes(matmul);
        if (matrices.biases) of_expert.bias = matrices.biases + item.group->expert * bias_size(matmul);
        kernels.multiply(of_expert, item.group->packed, item.range, {}, {dst + item.group->first * columns, false});
    });
}

// Four floats, which every supported processor adds with one instruction.
typedef float Four __attribute__((vector_size(16)));

Four load(const float* from) {
    Four values;
    std::memcpy(&values, from, sizeof(values));
    return values;
}

// Adds the weighted results of the experts of each row, in the order in which the experts were chosen.
void combine(const Experts& experts, size_t M, const float* results, FloatData dst, const Workspace& space) {
    const size_t columns = experts.down.N, used = experts.used;
    parallel_for(M, div_up(PARALLEL_ELEMENTS, used * columns), [&](size_t row) {
        const float* of_experts[USED_MAX];
        for (size_t i = 0; i < used; ++i) of_experts[i] = results + space.places[row * used + i] * columns;
        for (size_t column = 0; column < columns; column += 4) {
            Four sum{};
            for (size_t i = 0; i < used; ++i) sum += load(of_experts[i] + column) * space.weights[row * used + i];
            if (dst.is_bf16)
                for (size_t lane = 0; lane < 4; ++lane)
                    static_cast<ov::bfloat16*>(dst.data)[row * columns + column + lane] = ov::bfloat16(sum[lane]);
            else std::memcpy(static_cast<float*>(dst.data) + row * columns + column, &sum, sizeof(sum));
        }
    });
}

}  // namespace

const char* unsupported(const Experts& experts) {
    const auto& [count, used, has_biases, gate_up, down] = experts;
    if (count == 0 || count > COUNT_MAX) return "there must be from 1 to 4096 experts";
    if (used == 0 || used > count || used > USED_MAX) return "a row must use from 1 to 64 of the experts";
    if (const char* fault = projection::unsupported(gate_up)) return fault;
    if (const char* fault = projection::unsupported(down)) return fault;
    if (gate_up.K > COLUMNS_MAX || down.K > COLUMNS_MAX) return "the matrices of experts must have at most 2^20 columns";
    if (!is_gated(gate_up.epilogue) || down.epilogue != Epilogue::none)
        return "the first matrix of an expert must have a SwiGLU epilogue, and the second matrix must have none";
    if (dst_columns(gate_up) != down.K || down.N != gate_up.K) return "the sizes of an expert's matrices do not match";
    return nullptr;
}

void place(const Experts& experts, const uint8_t* memory) {
    const auto place_matrices = [&](const Matmul& matmul, size_t at) {
        for (size_t expert = 0; expert < experts.count; ++expert) {
            Matmul of_expert = matmul;
            of_expert.weights = memory + at + expert * matrix_bytes(matmul);
            projection::place(of_expert);
        }
    };
    place_matrices(experts.gate_up, gate_up_at(experts));
    place_matrices(experts.down, down_at(experts));
}

void run(const Kernels& kernels, const Experts& experts, const uint8_t* memory, size_t M, FloatData src, FloatData dst) {
    if (M == 0) return;
    // Other threads access this thread's workspace through the reference below. In a lambda, the name of a thread_local object
    // would refer to the object of the thread that runs the lambda.
    thread_local Workspace workspace_of_thread;
    auto& space = workspace_of_thread;
    route(kernels, experts, memory, M, src, space);
    group(experts, space);
    const size_t assignments = M * experts.used, row_bytes = experts.gate_up.K * bytes_of(src);
    auto* gathered = space.gathered.at_least(assignments * row_bytes);
    pack_groups(kernels, experts.gate_up, {gathered, src.is_bf16}, space, [&](size_t begin, size_t end) {
        for (size_t place = begin; place < end; ++place)
            std::memcpy(gathered + place * row_bytes, static_cast<const uint8_t*>(src.data) + space.rows[place] * row_bytes,
                        row_bytes);
    });
    auto* intermediate = space.intermediate.at_least(assignments * experts.down.K);
    const auto biases_at = [&](size_t at) {
        return experts.has_biases ? reinterpret_cast<const float*>(memory + at) : nullptr;
    };
    multiply_groups(kernels, experts.gate_up, {memory + gate_up_at(experts), biases_at(gate_up_bias_at(experts))}, intermediate,
                    space);
    pack_groups(kernels, experts.down, {intermediate, false}, space, [](size_t, size_t) {});
    auto* results = space.results.at_least(assignments * experts.down.N);
    multiply_groups(kernels, experts.down, {memory + down_at(experts), biases_at(down_bias_at(experts))}, results, space);
    combine(experts, M, results, dst, space);
}

}  // namespace ovfleet::experts
