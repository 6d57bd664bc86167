// What the sanitizer tests share: random numbers, memory of an exact size, and how a failure is reported.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

// Numbers that depend on nothing but the seed (SplitMix64).
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
    // From -1 to 1, in steps that bf16 and f16 hold.
    float number() { return float(below(257)) / 128.0f - 1.0f; }

private:
    uint64_t state_;
};

// Memory of exactly so many items, so that AddressSanitizer sees an access beyond it.
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

// Exact for the numbers of `Random::number`.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return uint16_t(bits >> 16);
}

#define FAIL(...)                     \
    do {                              \
        std::fprintf(stderr, "FAIL: "); \
        std::fprintf(stderr, __VA_ARGS__); \
        std::fprintf(stderr, "\n");   \
        std::exit(1);                 \
    } while (false)

// Each answers how many cases it has tried; they exit at the first failure.
size_t check_attention();
size_t check_projections();
// For so many seconds, but a fixed number of cases at least.
size_t check_operations(double seconds);
