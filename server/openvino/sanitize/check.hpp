// The parts that the sanitizer tests share: instruction sets, random numbers, memory of an exact size, and reports of failures.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "isa.hpp"

constexpr ovfleet::Isa ISAS[] = {ovfleet::Isa::portable, ovfleet::Isa::avx2,        ovfleet::Isa::avx_vnni,
                                 ovfleet::Isa::avx512,   ovfleet::Isa::avx512_vnni, ovfleet::Isa::avx512_bf16,
                                 ovfleet::Isa::amx};

inline const char* name_of(ovfleet::Isa isa) {
    constexpr const char* names[] = {"plugin", "portable",    "avx2",        "avx_vnni",
                                     "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"};
    return names[size_t(isa)];
}

// A pseudorandom number generator (SplitMix64), whose numbers depend only on the seed.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t value = state_ += 0x9e3779b97f4a7c15;
        value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
        value = (value ^ value >> 27) * 0x94d049bb133111eb;
        return value ^ value >> 31;
    }
    size_t below(size_t end) { return size_t(next() % end); }
    // A number from -1 to 1 that bf16 and f16 represent exactly.
    float number() { return float(below(257)) / 128.0f - 1.0f; }

private:
    uint64_t state_;
};

// An array that is allocated with its exact size, so that AddressSanitizer detects any access beyond its end.
template <typename T>
class Exact {
public:
    explicit Exact(size_t count) : memory_(static_cast<T*>(std::malloc(count * sizeof(T)))), count_(count) {}
    T* data() { return memory_.get(); }
    const T* data() const { return memory_.get(); }
    size_t size() const { return count_; }
    T& operator[](size_t index) { return memory_.get()[index]; }
    const T& operator[](size_t index) const { return memory_.get()[index]; }

private:
    struct Free {
        void operator()(T* memory) const { std::free(memory); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t count_;
};

inline float from_bf16(uint16_t bits) {
    const uint32_t whole = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &whole, sizeof(value));
    return value;
}

// The conversion is exact for the values that `Random::number` returns, because their lower 16 bits are 0.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return uint16_t(bits >> 16);
}

#define FAIL(...)                          \
    do {                                   \
        std::fprintf(stderr, "FAIL: ");    \
        std::fprintf(stderr, __VA_ARGS__); \
        std::fprintf(stderr, "\n");        \
        std::exit(1);                      \
    } while (false)

// Each check returns its number of cases, and ends the process at the first failure.
size_t check_attention();
size_t check_projections();
size_t check_experts();
// Runs for at least `seconds` seconds, and checks at least a fixed number of cases.
size_t check_operations(double seconds);
