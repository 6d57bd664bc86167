// Reading GGUF through OpenVINO's front end, and what the whole shim shares.
#include <dlfcn.h>

#include <iostream>
#include <mutex>
#include <streambuf>
#include <string>
#include <string_view>

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

namespace {

// A stream's buffer that leaves the front end's accuracy notices out, and passes other lines on.
class WithoutNotices : public std::streambuf {
public:
    explicit WithoutNotices(std::streambuf* to) : to_(to) {}

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
            if (letter == '\n') pass_on();
        }
        return size;
    }

private:
    void pass_on() {
        if (line_.rfind("[GGUF] accuracy notice", 0) != 0) to_->sputn(line_.data(), std::streamsize(line_.size()));
        line_.clear();
    }

    std::streambuf* to_;
    std::string line_;
    std::mutex mutex_;
};

// The front end says on std::cerr that it rounds weights, and has no switch for that. They are written anew
// afterwards, so that it misleads: no notice gets through while one of these lives. The buffer is never freed, for
// whoever may write to it at the last moment.
class Quiet {
public:
    Quiet() : lock_(one_at_a_time()), before_(std::cerr.rdbuf()) {
        static auto* const filter = new WithoutNotices(before_);
        std::cerr.rdbuf(filter);
    }
    ~Quiet() { std::cerr.rdbuf(before_); }

private:
    static std::mutex& one_at_a_time() {
        static std::mutex mutex;
        return mutex;
    }
    std::lock_guard<std::mutex> lock_;
    std::streambuf* before_;
};

}  // namespace

extern "C" int ovfleet_read_gguf(const char* path, ov_model_t** model) {
    return ovfleet::guarded([&] {
        Quiet quiet;
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
