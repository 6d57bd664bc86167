// The attention kernels under sanitizers: every instruction set of this machine, over all head sizes, groups, row counts and
// tails, compared with softmax attention in f64.
#include "check.hpp"

#include <algorithm>

#include "attention/run.hpp"

namespace {

using namespace ovfleet;

struct HeadSizes {
    size_t key, value;
};

// Keys come in multiples of 32 numbers, values in multiples of 16.
constexpr HeadSizes SIZES[] = {{64, 64},   {64, 80},   {96, 96},   {128, 112}, {128, 128}, {192, 128},
                               {192, 192}, {256, 256}, {512, 512}, {32, 16},   {64, 512},  {512, 64}};
constexpr size_t GROUPS[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 48};
constexpr size_t ROWS_MAX = 70;
constexpr Precision PRECISIONS[] = {Precision::f32, Precision::bf16, Precision::f16, Precision::u8};

// Multiplications that a case may take: more context where less is computed for each token of it.
constexpr size_t CASE_PRODUCTS = 2 << 20;
constexpr size_t LONG_CONTEXT = 33'000;

struct Case {
    size_t set;
    HeadSizes sizes;
    size_t kv_heads, group, rows, past, window;
    Precision precision;
    bool is_bf16, in_bf16, weighs, rotates;
    float share;
};

void print(const Case& c) {
    std::fprintf(stderr,
                 "set %zu, key size %zu, value size %zu, %zu KV heads, group %zu, %zu rows after %zu, window %zu, precision %d, "
                 "bf16 %d %d, weights %d, rotary %d, share %g\n",
                 c.set, c.sizes.key, c.sizes.value, c.kv_heads, c.group, c.rows, c.past, c.window, int(c.precision), c.is_bf16,
                 c.in_bf16, c.weighs, c.rotates, double(c.share));
}

// The queries, keys or values of a step, as the kernels get them.
class Numbers {
public:
    Numbers(Random& random, size_t count, bool is_bf16) : is_bf16_(is_bf16), bytes_(count * (is_bf16 ? 2 : 4)) {
        for (size_t i = 0; i < count; ++i) {
            const float value = random.number();
            if (is_bf16) reinterpret_cast<uint16_t*>(bytes_.data())[i] = to_bf16(value);
            else reinterpret_cast<float*>(bytes_.data())[i] = value;
        }
    }
    float operator[](size_t index) const {
        return is_bf16_ ? from_bf16(reinterpret_cast<const uint16_t*>(bytes_.data())[index])
                        : reinterpret_cast<const float*>(bytes_.data())[index];
    }
    void* data() { return bytes_.data(); }

private:
    bool is_bf16_;
    Exact<uint8_t> bytes_;
};

// Rotates a head's numbers by its row of the tables.
std::vector<double> rotated(const std::vector<double>& x, const float* cos, const float* sin) {
    const size_t half = x.size() / 2;
    std::vector<double> to(x.size());
    for (size_t i = 0; i < x.size(); ++i)
        to[i] = x[i] * double(cos[i]) + (i < half ? -x[i + half] : x[i - half]) * double(sin[i]);
    return to;
}

class Step {
public:
    explicit Step(const Case& c)
        : case_(c), context_(c.past + c.rows), blocks_((context_ + BLOCK_TOKENS - 1) / BLOCK_TOKENS), table_(blocks_.size()) {
        layer_.heads = c.kv_heads * c.group;
        layer_.kv_heads = c.kv_heads;
        layer_.key_size = c.sizes.key;
        layer_.value_size = c.sizes.value;
        layer_.precision = c.precision;
        layer_.scale = 1 / std::sqrt(float(c.sizes.key));
        layer_.window = c.window;
        layer_.is_bf16 = c.is_bf16;
        layer_.in_bf16 = c.in_bf16;
        layer_.share = c.share;
        layer_.weighs = c.weighs;
        measure(layer_);
        if (const char* fault = unsupported(layer_)) FAIL("%s", fault);
        // Blocks in an order that is not that of memory.
        for (size_t i = 0; i < blocks_.size(); ++i) table_[i] = int32_t(blocks_.size() - 1 - i);
    }

    void run_on(const Kernels& kernels, Random& random) {
        const Case& c = case_;
        const size_t all = blocks_.size() * c.kv_heads;
        Exact<uint8_t> key_cache(all * layer_.key_bytes), value_cache(all * layer_.value_bytes);
        // What was never written is not a number.
        std::memset(key_cache.data(), 0xff, key_cache.size());
        std::memset(value_cache.data(), 0xff, value_cache.size());
        const size_t key_row = c.kv_heads * c.sizes.key, value_row = c.kv_heads * c.sizes.value;
        const size_t query_row = layer_.heads * c.sizes.key;
        Numbers keys(random, context_ * key_row, c.is_bf16), values(random, context_ * value_row, c.is_bf16);
        Exact<float> cos(c.rotates ? context_ * c.sizes.key : 0), sin(c.rotates ? context_ * c.sizes.key : 0);
        for (size_t i = 0; i < cos.size(); ++i) {
            const float angle = float(random.below(4)) * 1.5707963f;
            cos[i] = std::round(std::cos(angle));
            sin[i] = std::round(std::sin(angle));
        }
        Memory memory{};
        memory.key_row = key_row, memory.value_row = value_row, memory.query_row = query_row;
        memory.key_cache = key_cache.data(), memory.value_cache = value_cache.data();
        memory.step_blocks = blocks_.size();
        const size_t number = c.is_bf16 ? 2 : 4;
        // What is past was put there in steps before, without any query.
        for (size_t done = 0; done < c.past;) {
            const size_t count = std::min<size_t>(c.past - done, 4096);
            set_inputs(memory, keys, values, cos, sin, done, number);
            const Sequence sequence{0, count, done, table_.data(), 0};
            for (size_t head = 0; head < c.kv_heads; ++head) kernels.store(layer_, sequence, memory, head);
            done += count;
        }
        Numbers queries(random, c.rows * query_row, c.is_bf16);
        set_inputs(memory, keys, values, cos, sin, c.past, number);
        memory.queries = queries.data();
        Exact<uint8_t> output(c.rows * layer_.heads * c.sizes.value * number);
        Exact<float> weights(c.kv_heads * blocks_.size());
        std::fill(weights.data(), weights.data() + weights.size(), 0.0f);
        memory.output = output.data();
        memory.weights = c.weighs ? weights.data() : nullptr;
        run(kernels, layer_, {{0, c.rows, c.past, table_.data(), 0}}, memory);
        compare(queries, keys, values, cos, sin, output, weights);
    }

private:
    void set_inputs(Memory& memory, Numbers& keys, Numbers& values, Exact<float>& cos, Exact<float>& sin, size_t from, size_t number) {
        memory.keys = static_cast<uint8_t*>(keys.data()) + from * memory.key_row * number;
        memory.values = static_cast<uint8_t*>(values.data()) + from * memory.value_row * number;
        memory.cos = case_.rotates ? cos.data() + from * layer_.key_size : nullptr;
        memory.sin = case_.rotates ? sin.data() + from * layer_.key_size : nullptr;
    }

    void compare(const Numbers& queries, const Numbers& keys, const Numbers& values, const Exact<float>& cos,
                 const Exact<float>& sin, const Exact<uint8_t>& output, const Exact<float>& weights) {
        const Case& c = case_;
        double tolerance = c.precision == Precision::u8 ? 0.02 : 1e-4;
        if (c.is_bf16 || c.in_bf16) tolerance += 0.02;
        std::vector<double> masses(c.kv_heads * blocks_.size(), 0.0);
        const bool reports = c.weighs && c.rows == 1;
        for (size_t row = 0; row < c.rows; ++row) {
            if (row > 1 && row + 2 < c.rows && row % 23 != 0) continue;
            for (size_t head = 0; head < layer_.heads; ++head) {
                // All where the weights of blocks are compared, else the first, the last and some.
                if (!reports && head != 0 && head + 1 != layer_.heads && head % 7 != 3) continue;
                const auto expected = attend(queries, keys, values, cos, sin, row, head, masses);
                for (size_t i = 0; i < c.sizes.value; ++i) {
                    const size_t at = (row * layer_.heads + head) * c.sizes.value + i;
                    const float found = c.is_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(output.data())[at])
                                                  : reinterpret_cast<const float*>(output.data())[at];
                    if (c.share > 0 ? !std::isfinite(found) : !(std::abs(double(found) - expected[i]) <= tolerance)) {
                        print(c);
                        FAIL("row %zu, head %zu, number %zu: %g, not %g", row, head, i, double(found), expected[i]);
                    }
                }
            }
        }
        for (size_t i = 0; reports && i < masses.size(); ++i)
            if (!(std::abs(double(weights[i]) - masses[i]) <= 0.02 * double(c.group))) {
                print(c);
                FAIL("the weight of block %zu is %g, not %g", i, double(weights[i]), masses[i]);
            }
    }

    std::vector<double> attend(const Numbers& queries, const Numbers& keys, const Numbers& values, const Exact<float>& cos,
                               const Exact<float>& sin, size_t row, size_t head, std::vector<double>& masses) const {
        const Case& c = case_;
        const size_t at = c.past + row, kv_head = head / c.group;
        const auto vector_of = [&](const Numbers& all, size_t begin, size_t size) {
            std::vector<double> to(size);
            for (size_t i = 0; i < size; ++i) to[i] = double(all[begin + i]);
            return to;
        };
        const auto turned = [&](std::vector<double> x, size_t token) {
            return c.rotates ? rotated(x, cos.data() + token * c.sizes.key, sin.data() + token * c.sizes.key) : x;
        };
        const auto query = turned(vector_of(queries, (row * layer_.heads + head) * c.sizes.key, c.sizes.key), at);
        const size_t first = c.window && at + 1 > c.window ? at + 1 - c.window : 0;
        std::vector<double> scores;
        double most = -1e300, total = 0;
        for (size_t token = first; token <= at; ++token) {
            const auto key = turned(vector_of(keys, (token * c.kv_heads + kv_head) * c.sizes.key, c.sizes.key), token);
            double sum = 0;
            for (size_t i = 0; i < key.size(); ++i) sum += query[i] * key[i];
            scores.push_back(sum * double(layer_.scale));
            most = std::max(most, scores.back());
        }
        for (auto& score : scores) total += score = std::exp(score - most);
        std::vector<double> to(c.sizes.value, 0.0);
        for (size_t token = first; token <= at; ++token) {
            const double weight = scores[token - first] / total;
            masses[kv_head * blocks_.size() + token / BLOCK_TOKENS] += weight;
            const size_t begin = (token * c.kv_heads + kv_head) * c.sizes.value;
            for (size_t i = 0; i < to.size(); ++i) to[i] += weight * double(values[begin + i]);
        }
        return to;
    }

    Case case_;
    size_t context_;
    std::vector<char> blocks_;
    Exact<int32_t> table_;
    Layer layer_{};
};

}  // namespace

size_t check_attention() {
    // Each dimension is walked at its own pace, so that over the cases each of its values meets many of every other's.
    constexpr size_t sizes = sizeof(SIZES) / sizeof(*SIZES), groups = sizeof(GROUPS) / sizeof(*GROUPS);
    constexpr size_t cases = 3 * 140;
    size_t tried = 0;
    for (size_t set = 0; set < KERNEL_SETS; ++set) {
        const auto* kernels = kernels_of(set);
        if (!kernels) continue;
        for (size_t i = 0; i < cases; ++i) {
            Random random(i);
            Case c{};
            c.set = set;
            c.sizes = SIZES[(i + i / sizes) % sizes];
            c.group = GROUPS[(i + i / groups) % groups];
            c.rows = i % 3 == 0 ? 1 : 1 + (i * 37 + i / ROWS_MAX) % ROWS_MAX;
            c.kv_heads = 1 + i % 3 / 2;
            c.precision = PRECISIONS[(i + i / 4) % 4];
            c.is_bf16 = i % 5 == 1;
            c.in_bf16 = c.is_bf16 || i % 5 == 2;
            c.rotates = i % 7 == 3 && !c.is_bf16 && c.sizes.key % 32 == 0;
            c.weighs = i % 2 == 0;
            c.window = i % 11 == 4 ? 1 + random.below(300) : 0;
            const size_t per_token = c.rows * c.kv_heads * c.group * (c.sizes.key + c.sizes.value);
            const size_t tokens = std::max<size_t>(CASE_PRODUCTS / per_token, 40);
            // Every tail of a block, and of the blocks that are computed at once.
            c.past = std::min(tokens / 128 * 128, LONG_CONTEXT / 128 * 128) + (i * 29) % 128;
            if (c.past + c.rows > LONG_CONTEXT) c.past = LONG_CONTEXT - c.rows;
            c.share = i % 13 == 5 && c.rows * c.group >= 16 ? 0.9f : 0.0f;
            Step(c).run_on(*kernels, random);
            ++tried;
        }
        // Long contexts: decodes in many parts, and a prompt's chunk that chooses the keys that it reads.
        for (const auto precision : PRECISIONS)
            for (const size_t rows : {size_t(1), size_t(17)}) {
                Random random(rows);
                Case c{set, {64, 64}, 1, 2, rows, LONG_CONTEXT - rows, 0, precision, false, false, true, false, 0.0f};
                Step(c).run_on(*kernels, random);
                c.share = 0.9f;
                if (rows > 1) Step(c).run_on(*kernels, random);
                ++tried;
            }
    }
    // Sizes that the kernels do not have are refused, and not computed.
    Layer layer{};
    layer.heads = layer.kv_heads = 1, layer.scale = 1;
    for (size_t key = 0; key <= 1024; ++key)
        for (size_t value : {0, 8, 16, 80, 112, 512, 528}) {
            layer.key_size = key, layer.value_size = value;
            const bool fits = key > 0 && key % 32 == 0 && key <= 512 && value > 0 && value % 16 == 0 && value <= 512;
            if ((unsupported(layer) == nullptr) != fits) FAIL("key size %zu, value size %zu", key, value);
        }
    return tried;
}
