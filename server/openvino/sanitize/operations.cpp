// Runs the native operations with inputs that a hostile file could contain: random attributes, shapes, types and contents. An
// operation either rejects the inputs with an exception, or computes its outputs without accessing memory outside of its
// tensors.
#include "check.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>

#include <openvino/core/attribute_visitor.hpp>
#include <openvino/op/parameter.hpp>

#include "attention/op.hpp"
#include "attributes.hpp"
#include "experts/op.hpp"
#include "projection/op.hpp"

namespace {

using ovfleet::bits_of;

// Sets the attributes of an operation, as OpenVINO does when it reads a model from a file.
class Attributes : public ov::AttributeVisitor {
public:
    std::map<std::string, int64_t> numbers;
    std::map<std::string, bool> flags;
    std::vector<int64_t> stages;

    void on_adapter(const std::string& name, ov::ValueAccessor<void>&) override {
        FAIL("the attribute %s has an unexpected type", name.c_str());
    }
    void on_adapter(const std::string& name, ov::ValueAccessor<int64_t>& value) override { value.set(numbers[name]); }
    void on_adapter(const std::string& name, ov::ValueAccessor<bool>& value) override { value.set(flags[name]); }
    void on_adapter(const std::string&, ov::ValueAccessor<std::vector<int64_t>>& value) override { value.set(stages); }
};

// Returns `valid` or, with a probability of 1 / `rarely`, a hostile value.
int64_t mostly(Random& random, int64_t valid, size_t rarely) {
    constexpr int64_t hostile[] = {0, -1, 1, 3, 17, 31, 33, 1 << 16, (1 << 16) + 1, INT32_MAX, INT64_MAX, INT64_MIN};
    return random.below(rarely) > 0 ? valid : hostile[random.below(12)];
}

ov::Tensor tensor(Random& random, ov::element::Type type, size_t count, size_t rarely, size_t columns = 0) {
    constexpr size_t hostile[] = {0, 1, 7, 31, 1000};
    const bool is_valid = random.below(rarely) > 0;
    if (!is_valid && random.below(2) == 0) type = random.below(2) == 0 ? ov::element::f16 : ov::element::f32;
    else if (!is_valid) count = hostile[random.below(5)], columns = 0;
    ov::Tensor made(type, columns > 0 && count % columns == 0 ? ov::Shape{count / columns, columns} : ov::Shape{count});
    std::memset(made.data(), 0, made.get_byte_size());
    return made;
}

// Creates and evaluates an operation, and returns whether the operation accepted its attributes and inputs.
bool is_accepted(const ov::BaseOpExtension& extension, Attributes& attributes, ov::TensorVector inputs,
                 const std::vector<ov::element::Type>& types) {
    try {
        ov::OutputVector parameters;
        for (const auto& input : inputs)
            parameters.push_back(
                std::make_shared<ov::op::v0::Parameter>(input.get_element_type(), ov::PartialShape(input.get_shape())));
        const auto node = extension.create(parameters, attributes).at(0).get_node_shared_ptr();
        ov::TensorVector outputs;
        for (const auto& type : types) outputs.emplace_back(type, ov::Shape{0});
        return node->evaluate(outputs, inputs);
    } catch (const ov::Exception&) {
        return false;
    }
}

bool check_attention_operation(Random& random, const ov::BaseOpExtension& extension) {
    // Most cases have at most one fault.
    const size_t rarely = 40;
    const size_t kv_heads = 1 + random.below(3), heads = kv_heads * (1 + random.below(4)), key = 32 << random.below(3),
                 value = 16 << random.below(4), tokens = 1 + random.below(40), past = random.below(80), blocks = 8;
    const bool fuses_rope = random.below(2) == 0, block_scores = random.below(2) == 0, has_sinks = random.below(2) == 0,
               is_bf16 = !fuses_rope && random.below(3) == 0;
    Attributes attributes;
    const auto set = [&](const char* name, int64_t valid) { attributes.numbers[name] = mostly(random, valid, rarely); };
    const auto precision = random.below(5);
    set("isa", int64_t(ovfleet::Isa::portable));
    set("heads", int64_t(heads)), set("kv_heads", int64_t(kv_heads)), set("key_size", int64_t(key));
    set("value_size", int64_t(value)), set("precision", int64_t(precision)), set("scale_bits", bits_of(0.125f));
    set("attention_mass_bits", bits_of(0)), set("window", int64_t(random.below(2) * 9));
    attributes.flags["fuses_rope"] = fuses_rope;
    attributes.flags["has_sinks"] = has_sinks;
    ovfleet::Layer layer{};
    layer.key_size = key, layer.value_size = value, layer.precision = ovfleet::Precision(precision);
    ovfleet::set_cache_sizes(layer);
    const auto type = is_bf16 ? ov::element::bf16 : ov::element::f32;
    const size_t all = heads * key + kv_heads * (key + value);
    ov::TensorVector inputs;
    if (fuses_rope) {
        inputs.push_back(tensor(random, type, tokens * all, rarely, all));
        for (int table = 0; table < 2; ++table) inputs.push_back(tensor(random, type, tokens * key, rarely, key));
    } else {
        inputs.push_back(tensor(random, type, tokens * heads * key, rarely, heads * key));
        inputs.push_back(tensor(random, type, tokens * kv_heads * key, rarely, kv_heads * key));
        inputs.push_back(tensor(random, type, tokens * kv_heads * value, rarely, kv_heads * value));
    }
    inputs.push_back(tensor(random, ov::element::u8, blocks * kv_heads * layer.key_bytes, rarely));
    inputs.push_back(tensor(random, ov::element::u8, blocks * kv_heads * layer.value_bytes, rarely));
    const size_t used = (past + tokens + ovfleet::BLOCK_TOKENS - 1) / ovfleet::BLOCK_TOKENS;
    std::vector<int64_t> step{1, int64_t(past), 0, int64_t(tokens), 0, int64_t(used)};
    for (size_t block = 0; block < used; ++block) step.push_back(int64_t(block));
    auto steps = tensor(random, ov::element::i32, step.size(), rarely);
    if (steps.get_element_type() == ov::element::i32 && steps.get_size() == step.size())
        for (size_t i = 0; i < step.size(); ++i)
            static_cast<int32_t*>(steps.data())[i] = int32_t(mostly(random, step[i], rarely));
    inputs.push_back(steps);
    if (block_scores) inputs.push_back(tensor(random, ov::element::u8, used * kv_heads * sizeof(float), rarely));
    if (has_sinks) inputs.push_back(tensor(random, ov::element::u8, heads * sizeof(float), rarely));
    return is_accepted(extension, attributes, inputs, {random.below(rarely) > 0 ? type : ov::element::f16});
}

bool check_projection_operation(Random& random, const ov::BaseOpExtension& extension) {
    using namespace ovfleet::projection;
    const size_t rarely = 40, stage_count = 1 + random.below(3), M = 1 + random.below(9);
    Attributes attributes;
    std::vector<Stage> stages;
    size_t columns = random.below(4) ? 32 * (1 + random.below(4)) : SUPER_BLOCK, bytes = 0;
    const size_t first = columns;
    bool adds = false;
    size_t residual = 0;
    for (size_t at = 0; at < stage_count; ++at) {
        Stage stage{};
        auto& matmul = stage.matmul;
        matmul.K = columns;
        matmul.epilogue = Epilogue(random.below(size_t(Epilogue::quick_gelu) + 1));
        matmul.N = 64 * (1 + random.below(4));
        if (matmul.epilogue == Epilogue::residual && adds) matmul.N = residual;
        if (matmul.epilogue == Epilogue::residual) adds = true, residual = matmul.N;
        matmul.bits = random.below(2) ? 4 : 8;
        matmul.group = random.below(2) ? 16 : 32;
        if (matmul.K % WIDE_GROUP == 0 && random.below(2)) matmul.group = WIDE_GROUP;
        if (random.below(3) == 0) matmul.bits = SIX_BITS, matmul.group = matmul.K % SUPER_BLOCK == 0 ? SUPER_GROUP : 32;
        matmul.per_channel = matmul.bits != SIX_BITS && matmul.group != 16 && random.below(2) == 0;
        matmul.terms = 1 + random.below(2);
        stage.has_norm = random.below(2) == 0;
        stage.has_bias = random.below(2) == 0;
        matmul.adapter_count = random.below(3) == 0 ? 1 : 0;
        stage.adapter_bytes = matmul.adapter_count ? 1 << 14 : 0;
        const int64_t valid[] = {int64_t(matmul.K),
                                 int64_t(matmul.N),
                                 int64_t(matmul.bits),
                                 int64_t(matmul.group),
                                 matmul.per_channel,
                                 int64_t(matmul.terms),
                                 bits_of(1),
                                 int64_t(matmul.epilogue),
                                 bits_of(1e-5f),
                                 stage.has_norm,
                                 stage.has_bias,
                                 int64_t(matmul.adapter_count),
                                 int64_t(stage.adapter_bytes)};
        for (const auto number : valid) attributes.stages.push_back(mostly(random, number, 4 * rarely));
        bytes += memory_bytes(stage);
        columns = dst_columns(matmul);
        stages.push_back(stage);
    }
    attributes.numbers["isa"] = mostly(random, int64_t(ovfleet::Isa::portable), rarely);
    if (random.below(rarely) == 0) attributes.stages.pop_back();
    const bool adapted =
        std::any_of(stages.begin(), stages.end(), [](const Stage& one) { return one.matmul.adapter_count > 0; });
    const bool is_bf16 = random.below(3) == 0;
    ov::TensorVector inputs{tensor(random, is_bf16 ? ov::element::bf16 : ov::element::f32, M * first, rarely, first)};
    auto memory = tensor(random, ov::element::u8, bytes, rarely);
    if (memory.get_size() == bytes && memory.get_element_type() == ov::element::u8) {
        auto* at = static_cast<uint8_t*>(memory.data());
        for (const auto& stage : stages) {
            if (stage.matmul.adapter_count) {
                auto* adapter = reinterpret_cast<LoraAdapter*>(at + adapters_at(stage));
                adapter->number = 1;
                adapter->ranks = uint64_t(mostly(random, RANK_BLOCK, rarely));
                adapter->down = uint64_t(mostly(random, 64, rarely));
                adapter->up_blocks = uint64_t(mostly(random, 64 + RANK_BLOCK * SUPER_BLOCK * 4, rarely));
                if (adapter->up_blocks % 8 == 0 && adapter->up_blocks < stage.adapter_bytes / 2) {
                    auto* up_blocks = reinterpret_cast<UpBlock*>(reinterpret_cast<uint8_t*>(adapter) + adapter->up_blocks);
                    for (size_t half = 0; half < 2 * num_n_blocks(stage.matmul); ++half)
                        up_blocks[half] = {uint64_t(mostly(random, 0, rarely)), uint64_t(mostly(random, RANK_BLOCK, rarely)),
                                           uint64_t(mostly(random, 128, rarely))};
                }
            }
            at += memory_bytes(stage);
        }
    }
    inputs.push_back(memory);
    if (adds) inputs.push_back(tensor(random, ov::element::f32, M * residual, rarely));
    if (adapted) {
        auto numbers = tensor(random, ov::element::i32, M, rarely);
        if (numbers.get_element_type() == ov::element::i32)
            std::fill_n(static_cast<int32_t*>(numbers.data()), numbers.get_size(), 1);
        inputs.push_back(numbers);
    }
    if (random.below(rarely) == 0) inputs.pop_back();
    attributes.flags["to_bf16"] = random.below(2) == 0;
    attributes.flags["gives_residual"] = random.below(2) == 0;
    std::vector<ov::element::Type> types{attributes.flags["to_bf16"] ? ov::element::bf16 : ov::element::f32};
    if (attributes.flags["gives_residual"]) types.push_back(ov::element::f32);
    return is_accepted(extension, attributes, inputs, types);
}

bool check_experts_operation(Random& random, const ov::BaseOpExtension& extension) {
    using namespace ovfleet::experts;
    using ovfleet::projection::Epilogue, ovfleet::projection::SIX_BITS, ovfleet::projection::SUPER_GROUP,
        ovfleet::projection::SUPER_BLOCK;
    const size_t rarely = 40, M = random.below(9);
    Experts experts{};
    auto& [count, used, has_biases, gate_up, down] = experts;
    count = 1 + random.below(9), used = 1 + random.below(std::min<size_t>(count, 4));
    const auto columns = [&] { return random.below(4) ? 32 * (1 + random.below(4)) : SUPER_BLOCK; };
    gate_up.K = down.N = columns(), down.K = columns(), gate_up.N = 2 * down.K;
    constexpr size_t bits[] = {4, ovfleet::projection::E2M1_BITS, 8};
    gate_up.bits = bits[random.below(3)], down.bits = bits[random.below(3)];
    const auto group_of = [&](const Matmul& matmul) -> size_t {
        using namespace ovfleet::projection;
        if (matmul.bits == E2M1_BITS) return 32;
        if (matmul.K % WIDE_GROUP == 0 && random.below(3) == 0) return WIDE_GROUP;
        return random.below(2) ? 16 : 32;
    };
    gate_up.group = group_of(gate_up), down.group = group_of(down);
    for (auto* matmul : {&gate_up, &down})
        if (random.below(3) == 0) matmul->bits = SIX_BITS, matmul->group = matmul->K % SUPER_BLOCK == 0 ? SUPER_GROUP : 32;
    for (auto* matmul : {&gate_up, &down})
        matmul->per_channel = (matmul->bits == 4 || matmul->bits == 8) && matmul->group != 16 && random.below(2) == 0;
    gate_up.terms = down.terms = 1 + random.below(2);
    gate_up.epilogue = random.below(2) ? Epilogue::swiglu : Epilogue::clamped_swiglu;
    has_biases = random.below(2) == 0;
    Attributes attributes;
    const int64_t valid[] = {int64_t(count),
                             int64_t(used),
                             int64_t(gate_up.K),
                             int64_t(down.K),
                             int64_t(gate_up.terms),
                             int64_t(gate_up.bits),
                             int64_t(gate_up.group),
                             bits_of(1),
                             int64_t(down.bits),
                             int64_t(down.group),
                             bits_of(1),
                             int64_t(gate_up.epilogue),
                             has_biases,
                             gate_up.per_channel,
                             down.per_channel};
    for (const auto number : valid) attributes.stages.push_back(mostly(random, number, 4 * rarely));
    if (random.below(rarely) == 0) attributes.stages.pop_back();
    attributes.numbers["isa"] = mostly(random, int64_t(ovfleet::Isa::portable), rarely);
    const bool is_bf16 = random.below(3) == 0, to_bf16 = random.below(3) == 0;
    attributes.flags["to_bf16"] = to_bf16;
    ov::TensorVector inputs{tensor(random, is_bf16 ? ov::element::bf16 : ov::element::f32, M * gate_up.K, rarely, gate_up.K),
                            tensor(random, ov::element::u8, memory_bytes(experts), rarely)};
    // Any bytes are valid weights. Random weights of the router can also produce logits that are not finite.
    auto* bytes = static_cast<uint8_t*>(inputs[MEMORY].data());
    for (size_t at = 0; at < inputs[MEMORY].get_byte_size(); ++at) bytes[at] = uint8_t(random.below(256));
    if (random.below(rarely) == 0) inputs.pop_back();
    const auto type = to_bf16 ? ov::element::bf16 : ov::element::f32;
    return is_accepted(extension, attributes, inputs, {random.below(rarely) > 0 ? type : ov::element::f16});
}

}  // namespace

size_t check_operations(double seconds) {
    const auto attention = std::dynamic_pointer_cast<ov::BaseOpExtension>(ovfleet::attention_extension());
    const auto projection = std::dynamic_pointer_cast<ov::BaseOpExtension>(ovfleet::projection::extension());
    const auto experts = std::dynamic_pointer_cast<ov::BaseOpExtension>(ovfleet::experts::extension());
    constexpr size_t min_cases = 4000;
    const auto begin = std::chrono::steady_clock::now();
    const auto has_time = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds;
    };
    size_t accepted[3] = {}, cases = 0;
    for (; cases < min_cases || has_time(); ++cases) {
        Random random(cases);
        accepted[0] += check_attention_operation(random, *attention);
        accepted[1] += check_projection_operation(random, *projection);
        accepted[2] += check_experts_operation(random, *experts);
    }
    // Both acceptance and rejection must be frequent, so that the kernels and the checks are tested.
    for (const size_t count : accepted)
        if (count < cases / 20 || count > cases - cases / 20)
            FAIL("%zu of %zu operations were accepted; from 5%% to 95%% are expected", count, cases);
    return 3 * cases;
}
