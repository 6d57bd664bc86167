// Reading GGUF through OpenVINO's front end, and what the whole shim shares.
#include <dlfcn.h>

#include <openvino/frontend/extension/decoder_transformation.hpp>
#include <openvino/frontend/gguf/adapt_to_genai.hpp>
#include <openvino/frontend/gguf/frontend.hpp>
#include <openvino/frontend/gguf/make_stateful.hpp>
#include <openvino/core/version.hpp>
#include <openvino/pass/manager.hpp>

#include "model.hpp"

namespace gguf = ov::frontend::gguf;

std::string& ovfleet::last_error() {
    thread_local std::string message;
    return message;
}

extern "C" const char* ovfleet_last_error(void) {
    return ovfleet::last_error().c_str();
}

extern "C" int ovfleet_read_gguf(const char* path, ov_model_t** model) {
    return ovfleet::guarded([&] {
        gguf::FrontEnd frontend;
        frontend.add_extension(std::make_shared<ov::frontend::DecoderTransformationExtension>(
            [](const std::shared_ptr<ov::Model>& converted) {
                return gguf::pass::GGUFMakeStateful().run_on_model(converted);
            }));
        auto converted = frontend.convert(frontend.load(std::string(path)));
        ov::pass::Manager manager;
        manager.register_pass<gguf::pass::AdaptToGenAI>();
        manager.run_passes(converted);
        *model = new ov_model{converted};
    });
}

extern "C" const char* ovfleet_library_path(void) {
    Dl_info info{};
    // Any symbol of the library will do; this one is the core's own.
    return dladdr(reinterpret_cast<const void*>(&ov::get_openvino_version), &info) ? info.dli_fname : nullptr;
}
