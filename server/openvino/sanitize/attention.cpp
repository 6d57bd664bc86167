// Runs the attention kernels under sanitizers, and compares them with softmax attention in f64: every instruction set of this
// machine, with all head sizes, groups, numbers of tokens and tails.
#include "check.hpp"

#include <algorithm>

#include "attention/run.hpp"

namespace {

using namespace ovfleet;

struct HeadSizes {
    size_t key, value;
};

// The sizes of keys are multiples of 32, and those of values multiples of 16.
constexpr HeadSizes SIZES[] = {{64, 64},   {64, 80},   {96, 96},   {128, 112}, {128, 128}, {192, 128},
                               {192, 192}, {256, 256}, {512, 512}, {32, 16},   {64, 512},  {512, 64}};
constexpr size_t GROUPS[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 48};
constexpr size_t TOKENS_MAX = 70;
constexpr Precision PRECISIONS[] = {Precision::f32, Precision::bf16, Precision::f16, Precision::u8};

// The number of multiplications of a case: it has a longer context if less is computed for each token of the context.
constexpr size_t CASE_PRODUCTS = 2 << 20;
constexpr size_t LONG_CONTEXT = 33'000;

struct Case {
    Isa isa;
    HeadSizes sizes;
    size_t kv_heads, group, tokens, past, window;
    Precision precision;
    bool is_bf16, prompts_in_bf16, block_scores, rotates;
    float attention_mass;
};

void print(const Case& c) {
    std::fprintf(stderr,
                 "%s, key size %zu, value size %zu, %zu KV heads, group %zu, %zu tokens after %zu, window %zu, precision %d, "
                 "bf16 %d %d, block scores %d, rotary %d, attention mass %g\n",
                 name_of(c.isa), c.sizes.key, c.sizes.value, c.kv_heads, c.group, c.tokens, c.past, c.window, int(c.precision),
                 c.is_bf16, c.prompts_in_bf16, c.block_scores, c.rotates, double(c.attention_mass));
}

// The queries, keys or values of a step in the format of the kernels.
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

// Applies a rotary embedding to the numbers of a head.
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
        : case_(c), context_(c.past + c.tokens), blocks_((context_ + BLOCK_TOKENS - 1) / BLOCK_TOKENS), table_(blocks_.size()) {
        layer_.heads = c.kv_heads * c.group;
        layer_.kv_heads = c.kv_heads;
        layer_.key_size = c.sizes.key;
        layer_.value_size = c.sizes.value;
        layer_.precision = c.precision;
        layer_.scale = 1 / std::sqrt(float(c.sizes.key));
        layer_.window = c.window;
        layer_.is_bf16 = c.is_bf16;
        layer_.prompts_in_bf16 = c.prompts_in_bf16;
        layer_.attention_mass = c.attention_mass;
        layer_.block_scores = c.block_scores;
        set_cache_sizes(layer_);
        if (const char* fault = unsupported(layer_)) FAIL("%s", fault);
        // The order of the blocks is not that of tensors.
        for (size_t i = 0; i < blocks_.size(); ++i) table_[i] = int32_t(blocks_.size() - 1 - i);
    }

    void run_on(const Kernels& kernels, Random& random) {
        const Case& c = case_;
        const size_t all = blocks_.size() * c.kv_heads;
        Exact<uint8_t> key_cache(all * layer_.key_bytes), value_cache(all * layer_.value_bytes);
        // The initial content is not a number.
        std::memset(key_cache.data(), 0xff, key_cache.size());
        std::memset(value_cache.data(), 0xff, value_cache.size());
        const size_t key_stride = c.kv_heads * c.sizes.key, value_stride = c.kv_heads * c.sizes.value;
        const size_t query_stride = layer_.heads * c.sizes.key;
        Numbers keys(random, context_ * key_stride, c.is_bf16), values(random, context_ * value_stride, c.is_bf16);
        Exact<float> cos(c.rotates ? context_ * c.sizes.key : 0), sin(c.rotates ? context_ * c.sizes.key : 0);
        for (size_t i = 0; i < cos.size(); ++i) {
            const float angle = float(random.below(4)) * 1.5707963f;
            cos[i] = std::round(std::cos(angle));
            sin[i] = std::round(std::sin(angle));
        }
        StepTensors tensors{};
        tensors.key_stride = key_stride, tensors.value_stride = value_stride, tensors.query_stride = query_stride;
        tensors.key_cache = key_cache.data(), tensors.value_cache = value_cache.data();
        tensors.step_blocks = blocks_.size();
        const size_t number = c.is_bf16 ? 2 : 4;
        // The past tokens were stored in earlier steps.
        for (size_t done = 0; done < c.past;) {
            const size_t count = std::min<size_t>(c.past - done, 4096);
            set_inputs(tensors, keys, values, cos, sin, done, number);
            const Sequence sequence{0, count, done, table_.data(), 0};
            for (size_t head = 0; head < c.kv_heads; ++head) kernels.store(layer_, sequence, tensors, head);
            done += count;
        }
        Numbers queries(random, c.tokens * query_stride, c.is_bf16);
        set_inputs(tensors, keys, values, cos, sin, c.past, number);
        tensors.queries = queries.data();
        Exact<uint8_t> output(c.tokens * layer_.heads * c.sizes.value * number);
        Exact<float> scores(c.kv_heads * blocks_.size());
        std::fill(scores.data(), scores.data() + scores.size(), 0.0f);
        tensors.output = output.data();
        tensors.block_scores = c.block_scores ? scores.data() : nullptr;
        run(kernels, layer_, {{0, c.tokens, c.past, table_.data(), 0}}, tensors);
        compare(queries, keys, values, cos, sin, output, scores);
    }

private:
    void set_inputs(StepTensors& tensors, Numbers& keys, Numbers& values, Exact<float>& cos, Exact<float>& sin, size_t from,
                    size_t number) {
        tensors.keys = static_cast<uint8_t*>(keys.data()) + from * tensors.key_stride * number;
        tensors.values = static_cast<uint8_t*>(values.data()) + from * tensors.value_stride * number;
        tensors.cos = case_.rotates ? cos.data() + from * layer_.key_size : nullptr;
        tensors.sin = case_.rotates ? sin.data() + from * layer_.key_size : nullptr;
    }

    void compare(const Numbers& queries, const Numbers& keys, const Numbers& values, const Exact<float>& cos,
                 const Exact<float>& sin, const Exact<uint8_t>& output, const Exact<float>& scores) {
        const Case& c = case_;
        double tolerance = c.precision == Precision::u8 ? 0.02 : 1e-4;
        if (c.is_bf16 || c.prompts_in_bf16) tolerance += 0.02;
        std::vector<double> masses(c.kv_heads * blocks_.size(), 0.0);
        const bool reports = c.block_scores && c.tokens == 1;
        for (size_t row = 0; row < c.tokens; ++row) {
            if (row > 1 && row + 2 < c.tokens && row % 23 != 0) continue;
            for (size_t head = 0; head < layer_.heads; ++head) {
                // All where the weights of blocks are compared, else the first, the last and some.
                if (!reports && head != 0 && head + 1 != layer_.heads && head % 7 != 3) continue;
                const auto expected = attend(queries, keys, values, cos, sin, row, head, masses);
                for (size_t i = 0; i < c.sizes.value; ++i) {
                    const size_t at = (row * layer_.heads + head) * c.sizes.value + i;
                    const float found = c.is_bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(output.data())[at])
                                                  : reinterpret_cast<const float*>(output.data())[at];
                    if (c.attention_mass > 0 ? !std::isfinite(found) : !(std::abs(double(found) - expected[i]) <= tolerance)) {
                        print(c);
                        FAIL("row %zu, head %zu, number %zu: %g, not %g", row, head, i, double(found), expected[i]);
                    }
                }
            }
        }
        for (size_t i = 0; reports && i < masses.size(); ++i)
            if (!(std::abs(double(scores[i]) - masses[i]) <= 0.02 * double(c.group))) {
                print(c);
                FAIL("the score of block %zu is %g, not %g", i, double(scores[i]), masses[i]);
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
    // Each parameter changes at its own pace, so that each of its values is combined with many values of the others.
    constexpr size_t sizes = sizeof(SIZES) / sizeof(*SIZES), groups = sizeof(GROUPS) / sizeof(*GROUPS);
    constexpr size_t cases = 3 * 140;
    size_t tried = 0;
    for (const auto isa : ISAS) {
        const auto* kernels = attention_kernels(isa);
        if (!kernels) continue;
        for (size_t i = 0; i < cases; ++i) {
            Random random(i);
            Case c{};
            c.isa = isa;
            c.sizes = SIZES[(i + i / sizes) % sizes];
            c.group = GROUPS[(i + i / groups) % groups];
            c.tokens = i % 3 == 0 ? 1 : 1 + (i * 37 + i / TOKENS_MAX) % TOKENS_MAX;
            c.kv_heads = 1 + i % 3 / 2;
            c.precision = PRECISIONS[(i + i / 4) % 4];
            c.is_bf16 = i % 5 == 1;
            c.prompts_in_bf16 = c.is_bf16 || i % 5 == 2;
            c.rotates = i % 7 == 3 && !c.is_bf16 && c.sizes.key % 32 == 0;
            c.block_scores = i % 2 == 0;
            c.window = i % 11 == 4 ? 1 + random.below(300) : 0;
            const size_t per_token = c.tokens * c.kv_heads * c.group * (c.sizes.key + c.sizes.value);
            const size_t tokens = std::max<size_t>(CASE_PRODUCTS / per_token, 40);
            // Every tail of a block and of a chunk of blocks.
            c.past = std::min(tokens / 128 * 128, LONG_CONTEXT / 128 * 128) + (i * 29) % 128;
            if (c.past + c.tokens > LONG_CONTEXT) c.past = LONG_CONTEXT - c.tokens;
            c.attention_mass = i % 13 == 5 && c.tokens * c.group >= 16 ? 0.9f : 0.0f;
            Step(c).run_on(*kernels, random);
            ++tried;
        }
        // Long contexts: decodes in many parts, and a chunk of a prompt with sparse attention.
        for (const auto precision : PRECISIONS)
            for (const size_t tokens : {size_t(1), size_t(17)}) {
                Random random(tokens);
                Case c{isa, {64, 64}, 1, 2, tokens, LONG_CONTEXT - tokens, 0, precision, false, false, true, false, 0.0f};
                Step(c).run_on(*kernels, random);
                c.attention_mass = 0.9f;
                if (tokens > 1) Step(c).run_on(*kernels, random);
                ++tried;
            }
    }
    // Unsupported sizes are rejected.
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
