// Runs the attention kernels under sanitizers, and compares their results with softmax attention in f64. The cases cover
// various head sizes, group sizes and numbers of tokens, and every number of tokens in the last block. They run with every
// instruction set that this machine supports and for which attention kernels exist. On every machine, the AMX kernels also run
// on the software model of the tiles.
#include "check.hpp"

#include <algorithm>

#include <tbb/task_arena.h>

#include "attention/run.hpp"
#include "threads.hpp"

namespace {

using namespace ovfleet;

struct HeadSizes {
    size_t key, value;
};

// The kernels pad keys whose size is not a multiple of 32, and values whose size is not a multiple of 16, with zeros.
constexpr HeadSizes SIZES[] = {{64, 64},   {64, 80},   {96, 96}, {128, 112}, {128, 128}, {192, 128}, {192, 192},
                               {256, 256}, {512, 512}, {32, 16}, {64, 512},  {512, 64},  {72, 72},   {80, 80}};
constexpr size_t GROUPS[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 48};
constexpr size_t TOKENS_MAX = 70;
constexpr Precision PRECISIONS[] = {Precision::f32, Precision::bf16, Precision::f16, Precision::u8, Precision::u4};
constexpr size_t PRECISION_COUNT = sizeof(PRECISIONS) / sizeof(*PRECISIONS);

// The approximate number of multiplications in a case. The fewer multiplications each token of the context needs, the longer
// the context is.
constexpr size_t CASE_PRODUCTS = 2 << 20;
constexpr size_t LONG_CONTEXT = 33'000;
// The approximate number of multiplications for a sequence that is divided into chunks in several ways.
constexpr double DIVIDED_PRODUCTS = 1.5e7;

struct TestedKernels {
    const char* name;
    const Kernels* kernels;
    // Whether products are computed in bf16.
    bool rounds_to_bf16;
};

std::vector<TestedKernels> tested_kernels() {
    std::vector<TestedKernels> all;
    for (const auto isa : ISAS) {
        const auto* kernels = attention_kernels(isa);
        if (kernels) all.push_back({name_of(isa), kernels, isa == Isa::avx512_bf16 || isa == Isa::amx});
        // Attention has no kernels for the instruction sets that add only 8-bit dot products.
        else if (isa == Isa::amx) std::fprintf(stderr, "SKIPPED: attention in real AMX tiles, which this machine lacks\n");
    }
    for (const auto vectors : {Isa::portable, Isa::avx512})
        if (const auto* kernels = attention_tile_model(vectors))
            all.push_back({vectors == Isa::portable ? "tile model, portable" : "tile model, avx512", kernels, true});
    return all;
}

struct Case {
    TestedKernels tested;
    HeadSizes sizes;
    size_t kv_heads, group, tokens, past, window;
    Precision precision;
    bool is_bf16, block_scores, rotates;
    float attention_mass;
    // Whether the values are so small that products with them can be subnormal numbers, which tile registers treat as zeros.
    bool has_tiny_values;
    bool is_bidirectional;

    bool is_padded() const { return sizes.key % KEY_MULTIPLE != 0 || sizes.value % VALUE_MULTIPLE != 0; }
};

void print(const Case& c) {
    std::fprintf(stderr,
                 "%s, key size %zu, value size %zu, %zu KV heads, group %zu, %zu tokens after %zu, window %zu, precision %d, "
                 "bf16 %d, block scores %d, rotary %d, attention mass %g, tiny values %d, bidirectional %d\n",
                 c.tested.name, c.sizes.key, c.sizes.value, c.kv_heads, c.group, c.tokens, c.past, c.window, int(c.precision),
                 c.is_bf16, c.block_scores, c.rotates, double(c.attention_mass), c.has_tiny_values, c.is_bidirectional);
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
        layer_.key_size = div_up(c.sizes.key, KEY_MULTIPLE) * KEY_MULTIPLE;
        layer_.value_size = div_up(c.sizes.value, VALUE_MULTIPLE) * VALUE_MULTIPLE;
        layer_.key_padding = layer_.key_size - c.sizes.key;
        layer_.value_padding = layer_.value_size - c.sizes.value;
        layer_.is_bidirectional = c.is_bidirectional;
        layer_.precision = c.precision;
        layer_.scale = 1 / std::sqrt(float(c.sizes.key));
        layer_.window = c.window;
        layer_.is_bf16 = c.is_bf16;
        layer_.attention_mass = c.attention_mass;
        layer_.block_scores = c.block_scores;
        set_cache_sizes(layer_);
        if (const char* fault = unsupported(layer_)) FAIL("%s", fault);
        // Assign the blocks in reverse order, so that the ID of a block differs from its index in the sequence.
        for (size_t i = 0; i < blocks_.size(); ++i) table_[i] = int32_t(blocks_.size() - 1 - i);
    }

    void run(Random& random) {
        const Case& c = case_;
        const Kernels& kernels = *c.tested.kernels;
        const size_t all = blocks_.size() * c.kv_heads;
        Exact<uint8_t> key_cache(all * layer_.key_bytes), value_cache(all * layer_.value_bytes);
        // Fill the cache with 0xFF bytes, which are NaN as floats.
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
        // Store the past tokens, as earlier steps would have done.
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
        // Some sinks are below the largest score, and others above it.
        Exact<float> sinks(layer_.heads);
        for (size_t head = 0; head < sinks.size(); ++head) sinks[head] = float(random.below(33)) - 16;
        if (random.below(2) == 0) tensors.sinks = sinks_ = sinks.data();
        ovfleet::run(kernels, layer_, {{0, c.tokens, c.past, table_.data(), 0}}, tensors);
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
        double tolerance = c.precision == Precision::u4 ? 0.4 : c.precision == Precision::u8 ? 0.02 : 1e-4;
        if (c.is_bf16 || c.tested.rounds_to_bf16) tolerance += 0.02;
        std::vector<double> masses(c.kv_heads * blocks_.size(), 0.0);
        const bool reports = c.block_scores && c.tokens == 1;
        for (size_t row = 0; row < c.tokens; ++row) {
            if (row > 1 && row + 2 < c.tokens && row % 23 != 0) continue;
            for (size_t head = 0; head < layer_.heads; ++head) {
                // Compare all heads if block scores are compared, because the scores are sums over heads. Otherwise compare
                // the first, the last and a few heads between them.
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
        const size_t last = c.is_bidirectional ? context_ - 1 : at;
        std::vector<double> scores;
        double most = -1e300, total = 0;
        for (size_t token = first; token <= last; ++token) {
            const auto key = turned(vector_of(keys, (token * c.kv_heads + kv_head) * c.sizes.key, c.sizes.key), token);
            double sum = 0;
            for (size_t i = 0; i < key.size(); ++i) sum += query[i] * key[i];
            scores.push_back(sum * double(layer_.scale));
            most = std::max(most, scores.back());
        }
        if (sinks_) most = std::max(most, double(sinks_[head]));
        for (auto& score : scores) total += score = std::exp(score - most);
        if (sinks_) total += std::exp(double(sinks_[head]) - most);
        std::vector<double> to(c.sizes.value, 0.0);
        for (size_t token = first; token <= last; ++token) {
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
    // Null without sinks.
    const float* sinks_ = nullptr;
};

// Whether the steps that compute a sequence also contain tokens of other sequences.
enum class OtherSequences { absent, present };

// Computes the output of a sequence in different chunks, alone and together with other sequences. All outputs must be
// bitwise identical.
class DividedSequence {
public:
    DividedSequence(const Case& c, Random& random)
        : case_(c),
          number_(c.is_bf16 ? 2 : 4),
          query_(c.kv_heads * c.group * c.sizes.key * number_),
          key_(c.kv_heads * c.sizes.key * number_),
          value_(c.kv_heads * c.sizes.value * number_),
          output_(c.kv_heads * c.group * c.sizes.value * number_) {
        layer_.heads = c.kv_heads * c.group;
        layer_.kv_heads = c.kv_heads;
        layer_.key_size = c.sizes.key;
        layer_.value_size = c.sizes.value;
        layer_.precision = c.precision;
        // The scale is larger than usual, so that the scores vary widely and the running maximum grows often.
        layer_.scale = 4 / std::sqrt(float(c.sizes.key));
        layer_.window = c.window;
        layer_.is_bf16 = c.is_bf16;
        set_cache_sizes(layer_);
        for (size_t index = 0; index < SEQUENCES; ++index) {
            const size_t tokens = index == 0 ? c.tokens : 1 + random.below(c.tokens);
            const size_t number = number_;
            auto& one = sequences_[index];
            one.tokens = tokens;
            for (const auto& [bytes, per_token] : {std::pair(&one.queries, query_), {&one.keys, key_}, {&one.values, value_}}) {
                Numbers numbers(random, tokens * per_token / number, c.is_bf16);
                bytes->assign(static_cast<uint8_t*>(numbers.data()),
                              static_cast<uint8_t*>(numbers.data()) + tokens * per_token);
            }
            for (size_t i = 0; c.has_tiny_values && i < one.values.size(); i += sizeof(float)) {
                float value;
                std::memcpy(&value, one.values.data() + i, sizeof(value));
                value *= 0x1p-120f;
                std::memcpy(one.values.data() + i, &value, sizeof(value));
            }
            one.angles.resize(c.rotates ? 2 * tokens * c.sizes.key : 0);
            for (float& angle : one.angles) angle = random.number();
        }
    }

    // Computes the output of the first sequence in chunks whose sizes `next_chunk` returns. If `others` is `present`, each step
    // also contains new tokens of all other sequences.
    template <typename NextChunk>
    std::vector<uint8_t> output(Random& random, int threads, OtherSequences others, const NextChunk& next_chunk) const {
        size_t blocks = 0;
        std::vector<int32_t> table;
        std::vector<size_t> first_block;
        for (const auto& one : sequences_) {
            first_block.push_back(blocks);
            blocks += (one.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        }
        for (size_t i = 0; i < blocks; ++i) table.push_back(int32_t(i));
        for (size_t i = blocks - 1; i > 0; --i) std::swap(table[i], table[random.below(i + 1)]);
        Exact<uint8_t> key_cache(blocks * case_.kv_heads * layer_.key_bytes),
            value_cache(blocks * case_.kv_heads * layer_.value_bytes);
        std::memset(key_cache.data(), 0xff, key_cache.size());
        std::memset(value_cache.data(), 0xff, value_cache.size());
        std::vector<uint8_t> found;
        std::vector<size_t> past(SEQUENCES, 0);
        tbb::task_arena arena(threads);
        while (past[0] < case_.tokens) {
            std::vector<Sequence> step;
            std::vector<uint8_t> queries, keys, values;
            std::vector<float> cos, sin;
            size_t begin = 0, begin_of_first = 0;
            for (size_t index = SEQUENCES; index-- > 0;) {
                if (index > 0 && others == OtherSequences::absent) continue;
                const auto& one = sequences_[index];
                // The other sequences start over when they end.
                if (index > 0 && past[index] == one.tokens) past[index] = 0;
                const size_t from = past[index];
                const size_t wanted = index == 0 ? next_chunk(from) : random.below(2) ? 1 : 1 + random.below(60);
                const size_t count = std::min(wanted, one.tokens - from);
                const auto append = [&](std::vector<uint8_t>& to, const std::vector<uint8_t>& all, size_t per_token) {
                    to.insert(to.end(), all.begin() + ptrdiff_t(from * per_token),
                              all.begin() + ptrdiff_t((from + count) * per_token));
                };
                append(queries, one.queries, query_);
                append(keys, one.keys, key_);
                append(values, one.values, value_);
                const auto angles = one.angles.begin() + ptrdiff_t(case_.rotates ? from * case_.sizes.key : 0);
                const size_t rotated = case_.rotates ? count * case_.sizes.key : 0, all = one.angles.size() / 2;
                cos.insert(cos.end(), angles, angles + ptrdiff_t(rotated));
                sin.insert(sin.end(), angles + ptrdiff_t(all), angles + ptrdiff_t(all + rotated));
                step.push_back({begin, count, from, table.data() + first_block[index], 0});
                if (index == 0) begin_of_first = begin;
                begin += count;
                past[index] = from + count;
            }
            StepTensors tensors{};
            tensors.queries = queries.data(), tensors.keys = keys.data(), tensors.values = values.data();
            tensors.query_stride = query_ / number_, tensors.key_stride = key_ / number_,
            tensors.value_stride = value_ / number_;
            tensors.cos = case_.rotates ? cos.data() : nullptr;
            tensors.sin = case_.rotates ? sin.data() : nullptr;
            Exact<uint8_t> output(begin * output_);
            tensors.output = output.data();
            tensors.key_cache = key_cache.data(), tensors.value_cache = value_cache.data();
            arena.execute([&] { run(*case_.tested.kernels, layer_, step, tensors); });
            found.insert(found.end(), output.data() + begin_of_first * output_,
                         output.data() + (begin_of_first + step.back().count) * output_);
        }
        return found;
    }

    void expect_equal(const std::vector<uint8_t>& found, const std::vector<uint8_t>& expected, const char* way) const {
        if (found == expected) return;
        print(case_);
        const auto [at, other] = std::mismatch(found.begin(), found.end(), expected.begin(), expected.end());
        FAIL("%s: the output of token %zu of %zu differs", way, size_t(at - found.begin()) / output_, case_.tokens);
    }

private:
    static constexpr size_t SEQUENCES = 4;
    struct Tokens {
        size_t tokens;
        std::vector<uint8_t> queries, keys, values;
        std::vector<float> angles;
    };
    Case case_;
    // The size of a number, and the size of one token in each tensor, in bytes.
    size_t number_, query_, key_, value_, output_;
    Layer layer_{};
    Tokens sequences_[SEQUENCES];
};

size_t check_divisions(const TestedKernels& tested) {
    constexpr HeadSizes sizes[] = {{64, 64}, {96, 80}, {96, 96}, {128, 128}, {256, 256}, {512, 512}};
    constexpr size_t groups[] = {1, 3, 4, 7, 48}, windows[] = {0, 0, 1, 40, 129, 700};
    constexpr size_t short_cases = 60, long_cases = 6;
    for (size_t i = 0; i < short_cases + long_cases; ++i) {
        Random random(1000 + i);
        // The contexts of long cases have several parts.
        const bool is_long = i >= short_cases;
        Case c{};
        c.tested = tested;
        c.sizes = is_long ? HeadSizes{64, 64} : sizes[i % 6];
        c.group = is_long ? 1 + i % 2 : groups[i % 5];
        c.kv_heads = is_long ? 1 : 1 + i % 2;
        c.precision = PRECISIONS[(i + i / PRECISION_COUNT) % PRECISION_COUNT];
        c.window = windows[(i + i / 6) % 6];
        c.is_bf16 = i % 5 == 1;
        c.rotates = !c.is_bf16 && i % 7 < 3;
        // Portable vectors round products before they add them, so the smallest products become zero.
        const bool is_fused = tested.kernels != attention_tile_model(Isa::portable);
        c.has_tiny_values = is_fused && !c.is_bf16 && c.precision == Precision::f32 && i % 2 == 0;
        const double per_pair = double(c.kv_heads * c.group * (c.sizes.key + c.sizes.value));
        c.tokens = (is_long ? 1030 : size_t(std::sqrt(DIVIDED_PRODUCTS / per_pair))) + i % 33;
        const DividedSequence sequence(c, random);
        const auto whole = sequence.output(random, 1, OtherSequences::absent, [&](size_t) { return c.tokens; });
        const auto any = [&](size_t) { return random.below(3) ? 1 + random.below(90) : 1 + random.below(400); };
        sequence.expect_equal(sequence.output(random, 2, OtherSequences::absent, any), whole, "in chunks, 2 threads");
        sequence.expect_equal(sequence.output(random, 3, OtherSequences::present, any), whole,
                              "in chunks, with other sequences, 3 threads");
        // Most steps compute one token, like decodes, and some compute several, like steps with drafts. The last 40 tokens are
        // computed one by one.
        const auto decodes = [&](size_t past) { return past + 40 > c.tokens || random.below(16) ? 1 : 1 + random.below(100); };
        const auto others = i % 2 == 0 ? OtherSequences::present : OtherSequences::absent;
        sequence.expect_equal(sequence.output(random, 2, others, decodes), whole, "mostly token by token");
    }
    return short_cases + long_cases;
}

}  // namespace

size_t check_attention() {
    // Each parameter changes with its own period, so that each of its values is combined with many values of the others.
    constexpr size_t sizes = sizeof(SIZES) / sizeof(*SIZES), groups = sizeof(GROUPS) / sizeof(*GROUPS);
    constexpr size_t cases = 3 * 140;
    size_t tried = 0;
    for (const auto& tested : tested_kernels()) {
        for (size_t i = 0; i < cases; ++i) {
            Random random(i);
            Case c{};
            c.tested = tested;
            c.sizes = SIZES[(i + i / sizes) % sizes];
            c.group = GROUPS[(i + i / groups) % groups];
            c.tokens = i % 3 == 0 ? 1 : 1 + (i * 37 + i / TOKENS_MAX) % TOKENS_MAX;
            c.kv_heads = 1 + i % 3 / 2;
            c.precision = PRECISIONS[(i + i / PRECISION_COUNT) % PRECISION_COUNT];
            c.is_bf16 = i % 5 == 1 && !c.is_padded();
            c.rotates = i % 7 == 3 && !c.is_bf16 && !c.is_padded();
            c.block_scores = i % 2 == 0;
            c.window = i % 11 == 4 ? 1 + random.below(300) : 0;
            const size_t per_token = c.tokens * c.kv_heads * c.group * (c.sizes.key + c.sizes.value);
            const size_t tokens = std::max<size_t>(CASE_PRODUCTS / per_token, 40);
            // The cases include every number of tokens in the last block, and in the last chunk of blocks.
            c.past = std::min(tokens / 128 * 128, LONG_CONTEXT / 128 * 128) + (i * 29) % 128;
            if (c.past + c.tokens > LONG_CONTEXT) c.past = LONG_CONTEXT - c.tokens;
            c.attention_mass = i % 13 == 5 && c.tokens * c.group >= 16 ? 0.9f : 0.0f;
            c.is_bidirectional = c.window == 0 && c.attention_mass == 0 && i % 4 < 2;
            Step(c).run(random);
            ++tried;
        }
        tried += check_divisions(tested);
        // Cases with long contexts: decodes in many parts, and a chunk of a prompt with sparse attention.
        for (const auto precision : PRECISIONS)
            for (const size_t tokens : {size_t(1), size_t(17)}) {
                Random random(tokens);
                Case c{tested, {64, 64}, 1,    2,     tokens, LONG_CONTEXT - tokens, 0, precision, false,
                       true,   false,    0.0f, false, false};
                Step(c).run(random);
                c.attention_mass = 0.9f;
                if (tokens > 1) Step(c).run(random);
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
