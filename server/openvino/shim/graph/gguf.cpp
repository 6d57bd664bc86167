// Reads IRs, and GGUF files through OpenVINO's front end. This file also defines the functions that do not belong to a specific
// part of the shim.
#include <dlfcn.h>

#include <iostream>
#include <mutex>
#include <streambuf>
#include <string>
#include <string_view>

#include <openvino/core/version.hpp>
#include <openvino/frontend/extension/decoder_transformation.hpp>
#include <openvino/frontend/gguf/adapt_to_genai.hpp>
#include <openvino/frontend/gguf/frontend.hpp>
#include <openvino/frontend/gguf/make_stateful.hpp>
#include <openvino/pass/manager.hpp>

#include "model.hpp"

namespace gguf = ov::frontend::gguf;

std::string& ovfleet::last_error() {
    thread_local std::string message;
    return message;
}

extern "C" const char* ovfleet_last_error(void) { return ovfleet::last_error().c_str(); }

namespace {

// A stream buffer that drops the accuracy notices of the front end and forwards all other lines.
class NoticeFilter : public std::streambuf {
public:
    explicit NoticeFilter(std::streambuf* to) : to_(to) {}

protected:
    int_type overflow(int_type letter) override {
        const char one = traits_type::to_char_type(letter);
        if (!traits_type::eq_int_type(letter, traits_type::eof())) xsputn(&one, 1);
        return traits_type::not_eof(letter);
    }

    std::streamsize xsputn(const char* text, std::streamsize size) override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const char letter : std::string_view(text, size)) {
            line_ += letter;
            if (letter == '\n') forward_line();
        }
        return size;
    }

private:
    void forward_line() {
        if (line_.rfind("[GGUF] accuracy notice", 0) != 0) to_->sputn(line_.data(), std::streamsize(line_.size()));
        line_.clear();
    }

    std::streambuf* to_;
    std::string line_;
    std::mutex mutex_;
};

// The front end reports on std::cerr that it rounds weights, and has no option to suppress this report. The report is
// misleading, because the weights are replaced afterward, so it is dropped while an object of this class exists. The filter is
// never freed, because other threads may still write to it.
class WithoutNotices {
public:
    WithoutNotices() : lock_(mutex()), original_(std::cerr.rdbuf()) {
        static auto* const filter = new NoticeFilter(original_);
        std::cerr.rdbuf(filter);
    }
    ~WithoutNotices() { std::cerr.rdbuf(original_); }

private:
    static std::mutex& mutex() {
        static std::mutex mutex;
        return mutex;
    }
    std::lock_guard<std::mutex> lock_;
    std::streambuf* original_;
};

}  // namespace

extern "C" int ovfleet_read_ir(const ov_core_t* core, const char* path, ov_model_t** model) {
    return ovfleet::guarded([&] { *model = new ov_model{core->object->read_model(path)}; });
}

extern "C" int ovfleet_read_gguf(const char* path, ov_model_t** model) {
    return ovfleet::guarded([&] {
        WithoutNotices without_notices;
        gguf::FrontEnd frontend;
        frontend.add_extension(
            std::make_shared<ov::frontend::DecoderTransformationExtension>([](const std::shared_ptr<ov::Model>& converted) {
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
    // The address can be that of any symbol that the core library defines.
    return dladdr(reinterpret_cast<const void*>(&ov::get_openvino_version), &info) ? info.dli_fname : nullptr;
}
