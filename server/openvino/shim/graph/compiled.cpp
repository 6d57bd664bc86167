// Writes and reads compiled models, so that the server does not have to compile the model at each start.
//
// The CPU plugin can write a compiled model and read it again, except for its paged attention: to read this operation, the
// plugin requires the numbers and sizes of the heads, but it does not write them. This code therefore stores them in the names
// of the key cache inputs, and adds them to the attention operations when it reads a model.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include <dlfcn.h>

#include <openvino/core/op_extension.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/openvino.hpp>

#include "../attention/op.hpp"
#include "../experts/op.hpp"
#include "../projection/op.hpp"
#include "model.hpp"

namespace {

constexpr size_t key_cache = 3;
constexpr const char* paged_attention = "PagedAttentionExtension";
constexpr const char* sizes[] = {"k_head_size", "num_k_heads", "v_head_size", "num_v_heads"};
constexpr const char* mark = " heads ";

// Reads a paged attention operation with the plugin's extension, and copies the numbers and sizes of the heads from the name of
// the key cache input to the runtime info of the operation.
class PagedAttentionReader : public ov::BaseOpExtension {
public:
    explicit PagedAttentionReader(ov::BaseOpExtension::Ptr plugin) : plugin_(std::move(plugin)) {}

    const ov::DiscreteTypeInfo& get_type_info() const override { return plugin_->get_type_info(); }

    ov::OutputVector create(const ov::OutputVector& inputs, ov::AttributeVisitor& visitor) const override {
        auto outputs = plugin_->create(inputs, visitor);
        const auto& name = inputs.at(key_cache).get_node()->get_friendly_name();
        const auto at = name.find(mark);
        long long values[4];
        if (at != std::string::npos && std::sscanf(name.c_str() + at + std::strlen(mark), "%lld %lld %lld %lld", &values[0],
                                                   &values[1], &values[2], &values[3]) == 4)
            for (size_t index = 0; index < 4; ++index)
                outputs.at(0).get_node()->get_rt_info()[sizes[index]] = int64_t(values[index]);
        return outputs;
    }

    std::vector<ov::Extension::Ptr> get_attached_extensions() const override { return {}; }

private:
    ov::BaseOpExtension::Ptr plugin_;
};

// Returns the plugin's extension that deserializes paged attention. The library remains loaded, because the extension is used
// until the process ends.
ov::BaseOpExtension::Ptr plugin_extension() {
    const std::string library = ovfleet_library_path();
    const auto plugin = library.substr(0, library.rfind('/') + 1) + "libopenvino_intel_cpu_plugin.so";
    void* handle = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    OPENVINO_ASSERT(handle, "cannot open ", plugin, ": ", dlerror());
    using Create = void (*)(std::vector<ov::Extension::Ptr>&);
    auto create = reinterpret_cast<Create>(dlsym(handle, "create_extensions"));
    OPENVINO_ASSERT(create, "the CPU plugin has no function create_extensions");
    std::vector<ov::Extension::Ptr> all;
    create(all);
    for (const auto& one : all)
        if (auto extension = std::dynamic_pointer_cast<ov::BaseOpExtension>(one))
            if (std::strcmp(extension->get_type_info().name, paged_attention) == 0) return extension;
    OPENVINO_THROW("the CPU plugin has no extension for paged attention");
}

}  // namespace

void ovfleet::name_heads(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops()) {
        if (std::strcmp(node->get_type_name(), paged_attention) != 0) continue;
        auto cache = ov::as_type_ptr<ov::op::v0::Parameter>(node->get_input_node_shared_ptr(key_cache));
        OPENVINO_ASSERT(cache, "the cache of ", node->get_friendly_name(), " is not an input of the model");
        auto name = cache->get_friendly_name() + mark;
        for (const auto* size : sizes) {
            const auto found = node->get_rt_info().find(size);
            OPENVINO_ASSERT(found != node->get_rt_info().end(), "a paged attention operation lacks the rt_info ", size);
            name += std::to_string(found->second.as<int64_t>()) + " ";
        }
        cache->set_friendly_name(name);
    }
}

extern "C" int ovfleet_enable_import(ov_core_t* core) {
    return ovfleet::guarded([&] {
        core->object->add_extension(std::make_shared<PagedAttentionReader>(plugin_extension()));
        core->object->add_extension(ovfleet::attention_extension());
        core->object->add_extension(ovfleet::projection::extension());
        core->object->add_extension(ovfleet::experts::extension());
    });
}

extern "C" int ovfleet_export(const ov_compiled_model_t* compiled, const char* path) {
    return ovfleet::guarded([&] {
        std::ofstream file;
        file.exceptions(std::ios::badbit | std::ios::failbit);
        file.open(path, std::ios::binary);
        try {
            compiled->object->export_model(file);
            file.close();
        } catch (const ov::Exception&) {
            if (file.fail()) throw std::ios_base::failure("the write failed");
            throw;
        }
    });
}

extern "C" int ovfleet_import(ov_core_t* core, const char* path, size_t bytes, const char* device,
                              const char* const* properties, size_t count, ov_compiled_model_t** compiled) {
    return ovfleet::guarded([&] {
        const ov::PartialShape shape{ov::Dimension::value_type(bytes)};
        const auto content = ov::read_tensor_data(path, ov::element::u8, shape);
        ov::AnyMap known;
        for (size_t index = 0; index < count; ++index) known[properties[2 * index]] = std::string(properties[2 * index + 1]);
        *compiled =
            new ov_compiled_model{std::make_shared<ov::CompiledModel>(core->object->import_model(content, device, known))};
    });
}
