// What all parts of the CPU kernels share: instruction sets, sizes, numbers, scratch memory.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HAVE_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define AVX512_TARGETS "avx512f,avx512bw,avx512vl,avx512dq,fma"
#if defined(__clang__)
#define WIDE ""
#else  // gcc's default tuning would stop at 256 bits
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET_AVX512 __attribute__((target(AVX512_TARGETS WIDE)))
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_AMX 1
#define TARGET_AMX __attribute__((target(AVX512_TARGETS ",amx-tile,amx-bf16" WIDE)))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only
#endif

namespace {

enum Isa { GENERIC = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };

constexpr int64_t LINE = 64;                  // bytes of a cache line
constexpr int64_t TILE = 16;                  // rows of a tile, and its columns of 4 bytes
constexpr int64_t STEP = 32;                  // bf16 in a row of a tile
constexpr int64_t BLOCK = 128;                // hidden units of one task in backward
constexpr int64_t CHUNK = 128;                // rows of weights that nn holds in the cache
constexpr int64_t ROWS_AHEAD = 32;            // rows that nn is ahead with fetching
constexpr int64_t LOOK_OUT_NS = 50000;        // that a helper waits for work before he sleeps
constexpr int64_t CACHED_TOKENS = 512 << 10;  // bytes of tokens that nt holds in the cache
constexpr int64_t FEW_ROWS = 32;              // tokens, for which weights take longer to come
constexpr int64_t MANY_ROWS = 128;            // tokens, for which to load tokens takes longest
constexpr int64_t HANDFUL = 4;                // tokens, for which vectors do better than tiles
constexpr int64_t STREAM = 8 << 10;           // bytes of weights in one run, worth to be followed
constexpr int64_t IN_FLIGHT = 64;             // lines that all streams together are fetched ahead
constexpr int64_t MAX_TALL = 4;               // tiles of weights in a task of forward
constexpr int64_t MAX_AHEAD = 512 << 10;      // bytes of weights in such a task
constexpr int64_t MAX_SCRATCH = 64 << 20;     // bytes: larger groups are cut
// Up to here every block writes its own share of dx and w_in is read from memory once. With more
// rows these shares are more bytes than a second reading of w_in.
constexpr int64_t SHARED_DX_ROWS = 48;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }
INLINE int64_t padded(int64_t size, int64_t piece) { return pieces(size, piece) * piece; }

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

// The 16 bits of the nearest bf16, ties to even, NaN kept NaN: as torch rounds.
INLINE uint32_t bf16_bits(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? 0x7fc0u : nearest;
}

// While it lives, this thread takes numbers too small for a normal float as zeros, as tiles always
// do. CPUs take a hundred times as long for each, and GELU of large negative values gives them.
class FlushDenormals {
  public:
#if HAVE_X86
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }  // results, and what is read
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }

  private:
    const unsigned before = __builtin_ia32_stmxcsr();
#endif
};

INLINE float load(const float* from) { return *from; }
INLINE float load(const uint16_t* from) { return from_bits(uint32_t(*from) << 16); }
INLINE void store(float* to, float value) { *to = value; }
INLINE void store(uint16_t* to, float value) { *to = uint16_t(bf16_bits(value)); }

template <class T>
INLINE float rounded(float value) {
    return sizeof(T) == 2 ? from_bits(bf16_bits(value) << 16) : value;
}

// e^x, within 2 ulp where the result is a normal float; below, the smallest of these.
INLINE float exponential(float x) {
    x = x < -87.33654f ? -87.33654f : x;
    x = x > 88.37626f ? 88.37626f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * from_bits((to_bits(shifted) - to_bits(magic) + 127u) << 23);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The normal distribution function, given e^(-x*x/2). Its lower tail is that times t P(t) with
// t = 1 / (1 + 0.3 |x|); P is a minimax fit of the relative error, which is below 4e-9.
INLINE float normal_cdf(float x, float gauss) {
    const float t = 1.0f / (1.0f + 0.3f * std::fabs(x));
    float p = -0.020612836f;
    p = p * t + 0.11237581f;
    p = p * t - 0.22806758f;
    p = p * t + 0.19158179f;
    p = p * t - 0.079247408f;
    p = p * t + 0.096057862f;
    p = p * t + 0.078425571f;
    p = p * t + 0.11022732f;
    p = p * t + 0.11957284f;
    p = p * t + 0.11968663f;
    const float tail = gauss * (p * t);
    return x < 0.0f ? tail : 1.0f - tail;
}

// The activation of `count` pre-activations, in place; `up` is only read, and null without a gate.
template <class T>
INLINE void activate_body(float* __restrict h, const float* __restrict up, int64_t count) {
    if (up) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const float gate = rounded<T>(h[i]);
            h[i] = rounded<T>(gate * sigmoid(gate) * rounded<T>(up[i]));
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float x = rounded<T>(h[i]);
        h[i] = rounded<T>(x * normal_cdf(x, exponential(-0.5f * x * x)));
    }
}

// One row of `activate_backward`: dh, dup and the weighted activation; returns the row's part of
// the gradient of its routing weight.
template <class T>
INLINE float activate_backward_body(const float* __restrict h, const float* __restrict up,
                                    const float* __restrict da_, float weight, int64_t count,
                                    T* __restrict dh, T* __restrict dup, T* __restrict weighted) {
    float total = 0.0f;
    if (up) {
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; ++i) {
            const float gate = rounded<T>(h[i]), other = rounded<T>(up[i]);
            const float da = rounded<T>(da_[i]), s = sigmoid(gate), silu = gate * s;
            const float a = silu * other, scaled = da * weight;
            total += a * da;
            store(dh + i, scaled * other * (s + silu * (1.0f - s)));
            store(dup + i, scaled * silu);
            store(weighted + i, a * weight);
        }
        return total;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
        const float x = rounded<T>(h[i]), da = rounded<T>(da_[i]);
        const float gauss = exponential(-0.5f * x * x), cdf = normal_cdf(x, gauss);
        const float a = x * cdf;
        total += a * da;
        store(dh + i, da * weight * (cdf + x * (0.39894228f * gauss)));
        store(weighted + i, a * weight);
    }
    return total;
}

// Results, rounded; returns the sum of squares of what was written.
template <class T>
INLINE double put_body(const float* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                       int64_t to_stride) {
    double squares = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        const float* __restrict source = from + row * from_stride;
        T* __restrict target = to + row * to_stride;
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < columns; ++i) {
            store(target + i, source[i]);
            total += rounded<T>(source[i]) * rounded<T>(source[i]);
        }
        squares += double(total);
    }
    return squares;
}

INLINE void add_body(float* __restrict total, const float* __restrict more, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) total[i] += more[i];
}

// Grows and is kept: pages that a call has to take anew would cost as much as its weights.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    // Room for `bytes`, whose content is anything.
    char* take(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = padded(bytes, 4096);
            memory_ = static_cast<char*>(std::aligned_alloc(4096, size_));
            if (!memory_) std::abort();
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};

thread_local Scratch task_scratch;  // of each worker: what one task needs

// The next `count` items of a scratch, beginning on a cache line.
template <class P>
INLINE P* cut_array(char*& at, int64_t count) {
    P* here = reinterpret_cast<P*>(at);
    at += padded(count * int64_t(sizeof(P)), LINE);
    return here;
}

// A part of the weights that will be needed soon: rows of whole cache lines.
struct Ahead {
    const char* row = nullptr;
    int64_t stride = 0, lines = 0, rows = 0, line = 0;

    Ahead() = default;
    Ahead(const void* begin, int64_t stride_, int64_t bytes, int64_t rows_)
        : row(static_cast<const char*>(begin)),
          stride(stride_),
          lines(bytes / LINE),
          rows(bytes / LINE > 0 ? rows_ : 0) {}

    // Asks for the next `count` lines, into the second cache.
    __attribute__((noinline)) void fetch(int64_t count) {
        while (count > 0 && rows > 0) {
            const int64_t now = least(count, lines - line);
            for (int64_t i = 0; i < now; ++i) __builtin_prefetch(row + (line + i) * LINE, 0, 2);
            count -= now;
            line += now;
            if (line == lines) {
                line = 0;
                row += stride;
                --rows;
            }
        }
    }
};

}  // namespace
