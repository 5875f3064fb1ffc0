// Instruction sets and bf16 conversion, shared by all CPU kernels.
#pragma once

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HAVE_X86 1
#include <cpuid.h>
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512_FEATURES "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"
#if defined(__clang__)
#define WIDE_VECTORS ""
#else  // gcc's default tuning stops at 256 bits
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define TARGET_AVX512 __attribute__((target(AVX512_FEATURES WIDE_VECTORS)))
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAVE_BF16 1
#define TARGET_BF16 __attribute__((target(AVX512_FEATURES ",avx512bf16" WIDE_VECTORS)))
#endif
#endif

namespace {

enum Isa { GENERIC = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };
constexpr const char* ISA_NAMES[] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};

#if HAVE_X86
// Not all compilers know the name of this feature.
inline bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}
#endif

// Chosen at run time: the compiled library may be shared between machines. At most AVX512.
inline Isa best_vector_isa() {
#if HAVE_X86
    if (!has_f16c()) return GENERIC;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return GENERIC;
}

INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The 16 bits of the nearest bf16, ties to even, NaN stays NaN: as torch rounds.
INLINE uint32_t bf16_bits(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? 0x7fc0u : nearest;
}

// uint16_t stands for bf16.
INLINE float load(const float* from) { return *from; }
INLINE float load(const uint16_t* from) { return from_bits(uint32_t(*from) << 16); }
INLINE void store(float* to, float value) { *to = value; }
INLINE void store(uint16_t* to, float value) { *to = uint16_t(bf16_bits(value)); }

}  // namespace
