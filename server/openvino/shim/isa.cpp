// Determines whether this process may use AMX. This file is compiled without flags for an instruction set, so it runs
// on any processor.
#include "isa.hpp"

#include "shim.h"

#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#endif

static_assert(int(ovfleet::TileSupport::absent) == OVFLEET_TILES_ABSENT);
static_assert(int(ovfleet::TileSupport::denied) == OVFLEET_TILES_DENIED);
static_assert(int(ovfleet::TileSupport::granted) == OVFLEET_TILES_GRANTED);

namespace ovfleet {
namespace {

struct Support {
    TileSupport support = TileSupport::absent;
    std::string reason;
};

#if defined(__x86_64__) && defined(__linux__)

// The bits of XCR0 that are set if the operating system saves the configuration and the content of the tile registers for each
// thread.
constexpr uint64_t TILE_CONFIG_STATE = 1 << 17, TILE_DATA_STATE = 1 << 18;

bool has_tiles() {
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & amx_bf16) && (edx & amx_tile);
}

bool saves_tiles() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned osxsave = 1u << 27;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & osxsave)) return false;
    asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    constexpr uint64_t both = TILE_CONFIG_STATE | TILE_DATA_STATE;
    return ((uint64_t(edx) << 32 | eax) & both) == both;
}

Support request() {
    // The numbers of two arch_prctl operations, which older headers do not define, and the number of the XSAVE component for
    // the tile data.
    constexpr int get_permission = 0x1022, request_permission = 0x1023, tile_data = 18;
    if (!has_tiles()) return {};
    if (!saves_tiles()) return {TileSupport::denied, "the operating system does not support AMX"};
    uint64_t permitted = 0;
    // The call fails with ENOSPC if a thread has a signal stack that is too small for the state of the tiles.
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0)
        return {TileSupport::denied,
                std::string("the operating system denies the permission to use AMX: ") + std::strerror(errno)};
    if (syscall(SYS_arch_prctl, get_permission, &permitted) != 0 || !(permitted & TILE_DATA_STATE))
        return {TileSupport::denied, "the operating system has not granted the permission to use AMX"};
    return {TileSupport::granted, ""};
}

#else

Support request() { return {}; }

#endif

}  // namespace

TileSupport tile_support(const char** reason) {
    static const Support support = request();
    if (reason) *reason = support.reason.c_str();
    return support.support;
}

}  // namespace ovfleet

extern "C" int ovfleet_tile_support(const char** reason) { return int(ovfleet::tile_support(reason)); }
