#include "deferred.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

namespace ovfleet {
namespace {

using Constant = ov::op::v0::Constant;

class DeferredMemory;

// The memory that has not been filled yet, keyed by its address. The constants are not the keys, because passes may copy a
// constant, and the copies share its memory.
struct Registry {
    std::mutex mutex;
    std::map<const void*, DeferredMemory*> all;
};

Registry& registry() {
    // Never freed, because constants may outlive static objects.
    static auto* const registry = new Registry;
    return *registry;
}

class DeferredMemory {
public:
    DeferredMemory(size_t bytes, std::vector<DeferredPart> parts)
        : bytes_(std::max<size_t>(bytes, 1)), parts_(std::move(parts)) {
        data_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        OPENVINO_ASSERT(data_ != MAP_FAILED, "cannot reserve ", bytes_, " bytes for a weight: ", std::strerror(errno));
        std::lock_guard<std::mutex> lock(registry().mutex);
        registry().all[data_] = this;
    }
    DeferredMemory(const DeferredMemory&) = delete;
    DeferredMemory& operator=(const DeferredMemory&) = delete;
    ~DeferredMemory() {
        unregister();
        munmap(data_, bytes_);
    }

    const void* data() const { return data_; }
    const std::vector<DeferredPart>& parts() const { return parts_; }

    void fill() {
        OPENVINO_ASSERT(mprotect(data_, bytes_, PROT_READ | PROT_WRITE) == 0, "cannot allocate ", bytes_,
                        " bytes for a weight: ", std::strerror(errno));
        // Huge pages reduce page faults and TLB misses. The call fails on systems without huge pages, which is fine.
        madvise(data_, bytes_, MADV_HUGEPAGE);
        auto* at = static_cast<uint8_t*>(data_);
        for (auto& part : parts_) {
            part.fill(at);
            at += part.bytes;
            // Frees the weights that the part was computed from.
            part = {};
        }
        unregister();
        parts_.clear();
    }

private:
    void unregister() {
        std::lock_guard<std::mutex> lock(registry().mutex);
        registry().all.erase(data_);
    }

    size_t bytes_;
    std::vector<DeferredPart> parts_;
    void* data_;
};

DeferredMemory* memory_of(const Constant& constant) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().all.find(constant.get_data_ptr());
    return found == registry().all.end() ? nullptr : found->second;
}

}  // namespace

void TensorSource::read(size_t tensor, size_t first, size_t count, void* quants, float* scales, void* zeros) const {
    char message[512] = "";
    const ovfleet_tensor_rows rows{tensor, first, count, quants, scales, zeros, message, sizeof(message)};
    if (source_.read(source_.context, &rows) != 0) OPENVINO_THROW("cannot read the weights: ", message);
}

std::shared_ptr<Constant> deferred_constant(const ov::element::Type& type, const ov::Shape& shape,
                                            std::vector<DeferredPart> parts) {
    const size_t bytes = (ov::shape_size(shape) * type.bitwidth() + 7) / 8;
    const size_t in_parts = std::accumulate(parts.begin(), parts.end(), size_t(0),
                                            [](size_t sum, const DeferredPart& part) { return sum + part.bytes; });
    OPENVINO_ASSERT(in_parts == bytes, "the parts of a constant have ", in_parts, " bytes instead of ", bytes);
    const auto memory = std::make_shared<DeferredMemory>(bytes, std::move(parts));
    return std::make_shared<Constant>(type, shape, memory->data(), memory);
}

std::shared_ptr<Constant> concatenated(const ov::element::Type& type, const ov::Shape& shape,
                                       const std::vector<std::shared_ptr<Constant>>& constants) {
    std::vector<DeferredPart> parts;
    for (const auto& constant : constants) {
        if (const auto* deferred = deferred_parts(*constant)) {
            parts.insert(parts.end(), deferred->begin(), deferred->end());
            continue;
        }
        const size_t bytes = constant->get_byte_size();
        parts.push_back({bytes, [constant, bytes](uint8_t* to) { std::memcpy(to, constant->get_data_ptr(), bytes); }, {}});
    }
    return deferred_constant(type, shape, std::move(parts));
}

const std::vector<DeferredPart>* deferred_parts(const Constant& constant) {
    const auto* memory = memory_of(constant);
    return memory ? &memory->parts() : nullptr;
}

void fill(const Constant& constant) {
    if (auto* memory = memory_of(constant)) memory->fill();
}

void fill_constants(const ov::Model& model) {
    for (const auto& node : model.get_ordered_ops())
        if (const auto constant = ov::as_type_ptr<Constant>(node)) fill(*constant);
}

}  // namespace ovfleet
