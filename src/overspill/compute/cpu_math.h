// Element-wise arithmetic of the expert kernels. Each function is inlined once per instruction set.
#pragma once

#include <cmath>

#include "cpu_group.h"

namespace {

// Flushes denormals to zero in this thread while it exists, as AMX tiles always do. CPUs take about
// a hundred times as long for a denormal, and GELU of large negative values produces them.
class FlushDenormals {
  public:
#if HAVE_X86
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }  // results and operands
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }

  private:
    const unsigned before = __builtin_ia32_stmxcsr();
#endif
};

template <class T>
INLINE float rounded(float value) {
    return sizeof(T) == 2 ? from_bits(bf16_bits(value) << 16) : value;
}

// e^x within 2 ulp; results below the smallest normal float become that float.
INLINE float exponential(float x) {
    x = x < -87.33654f ? -87.33654f : x;
    x = x > 88.37626f ? 88.37626f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
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

// The normal distribution function, given gauss = e^(-x*x/2). The lower tail is gauss * t * P(t)
// with t = 1 / (1 + 0.3 |x|); P is a minimax fit with a relative error below 4e-9.
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

// What becomes of up values, and of the gradients of gates and up values.
struct Unlimited {
    INLINE float of_up(float up) { return up; }
    INLINE float gradient(float, float grad) { return grad; }
    INLINE float gradient_of_up(float, float grad) { return grad; }
};

// The functions of `Function`: the value, and the value with the derivative.
struct Gelu : Unlimited {
    INLINE float value(float x) { return x * normal_cdf(x, exponential(-0.5f * x * x)); }
    INLINE float value(float x, float& slope) {
        const float gauss = exponential(-0.5f * x * x), cdf = normal_cdf(x, gauss);
        slope = cdf + x * (0.39894228f * gauss);
        return x * cdf;
    }
};
struct Silu : Unlimited {
    INLINE float value(float x) { return x * sigmoid(x); }
    INLINE float value(float x, float& slope) {
        const float s = sigmoid(x), silu = x * s;
        slope = s + silu * (1.0f - s);
        return silu;
    }
};
struct Relu : Unlimited {
    INLINE float value(float x) { return x <= 0.0f ? 0.0f : x; }  // NaN stays NaN
    INLINE float value(float x, float& slope) {
        slope = x <= 0.0f ? 0.0f : 1.0f;
        return value(x);
    }
};
struct Relu2 : Unlimited {
    INLINE float value(float x) { return Relu::value(x) * Relu::value(x); }
    INLINE float value(float x, float& slope) {
        slope = 2.0f * Relu::value(x);
        return value(x);
    }
};

// As in torch, a value that is beyond a limit, or NaN, has no gradient.
struct Limited {
    INLINE float value(float x) { return Silu::value(x > 10.0f ? 10.0f : x); }  // NaN stays NaN
    INLINE float value(float x, float& slope) {
        return Silu::value(x > 10.0f ? 10.0f : x, slope);
    }
    INLINE float of_up(float up) { return up > 10.0f ? 10.0f : up < -10.0f ? -10.0f : up; }
    INLINE float gradient(float x, float grad) { return x <= 10.0f ? grad : 0.0f; }
    INLINE float gradient_of_up(float up, float grad) {
        return up <= 10.0f && up >= -10.0f ? grad : 0.0f;
    }
};

template <class T, class F>
INLINE void apply(float* __restrict h, const float* __restrict up, int64_t count) {
    if (up) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i)
            h[i] = rounded<T>(F::value(rounded<T>(h[i])) * F::of_up(rounded<T>(up[i])));
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) h[i] = rounded<T>(F::value(rounded<T>(h[i])));
}

// Applies the activation to `count` pre-activations in place; `up` is null without a gate.
template <class T>
INLINE void activate_body(float* h, const float* up, int64_t count, Function function) {
    if (function == GELU) return apply<T, Gelu>(h, up, count);
    if (function == SILU) return apply<T, Silu>(h, up, count);
    if (function == RELU2) return apply<T, Relu2>(h, up, count);
    if (function == LIMITED) return apply<T, Limited>(h, up, count);
    apply<T, Relu>(h, up, count);
}

// The activation of GPT-OSS for `count` gates; the results replace them. Runs of `apart` gates and
// of as many up values alternate.
template <class T>
INLINE void activate_clamped_body(float* h, int64_t apart, int64_t count) {
    for (int64_t first = 0; first < apart; ++first) {
        float* __restrict pair = h + first;
#pragma omp simd
        for (int64_t i = 0; i < count / apart; ++i) {
            float gate = rounded<T>(pair[2 * apart * i]);
            float up = rounded<T>(pair[2 * apart * i + apart]);
            gate = gate > 7.0f ? 7.0f : gate;  // NaN stays NaN
            up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
            pair[2 * apart * i] = rounded<T>((up + 1.0f) * gate * sigmoid(1.702f * gate));
        }
    }
}

// With KEEP, `a` receives the activation times the routing weight.
template <class T, class F, bool KEEP>
INLINE float differentiate(const float* __restrict h, const float* __restrict up,
                           const float* __restrict da_, float weight, int64_t count,
                           T* __restrict dh, T* __restrict dup, T* __restrict a) {
    float total = 0.0f;
    if (up) {
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; ++i) {
            float slope;
            const float gate = rounded<T>(h[i]), in = rounded<T>(up[i]);
            const float value = F::value(gate, slope), other = F::of_up(in);
            const float da = rounded<T>(da_[i]), scaled = da * weight;
            total += value * other * da;
            store(dh + i, F::gradient(gate, scaled * other * slope));
            store(dup + i, F::gradient_of_up(in, scaled * value));
            if constexpr (KEEP) store(a + i, value * other * weight);
        }
        return total;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
        float slope;
        const float value = F::value(rounded<T>(h[i]), slope), da = rounded<T>(da_[i]);
        total += value * da;
        store(dh + i, da * weight * slope);
        if constexpr (KEEP) store(a + i, value * weight);
    }
    return total;
}

// Backward of the activation of GPT-OSS. As in torch, a value that is clamped, or NaN, has no
// gradient.
template <class T, bool KEEP>
INLINE float differentiate_clamped(const float* __restrict h, const float* __restrict up_,
                                   const float* __restrict da_, float weight, int64_t count,
                                   T* __restrict dh, T* __restrict dup, T* __restrict a) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
        const float gate_in = rounded<T>(h[i]), up_in = rounded<T>(up_[i]);
        const float gate = gate_in > 7.0f ? 7.0f : gate_in;  // NaN stays NaN
        const float up = (up_in > 7.0f ? 7.0f : up_in < -7.0f ? -7.0f : up_in) + 1.0f;
        const float s = sigmoid(1.702f * gate), value = gate * s;
        const float slope = s + 1.702f * value * (1.0f - s);
        const float da = rounded<T>(da_[i]), scaled = da * weight;
        total += value * up * da;
        store(dh + i, gate_in <= 7.0f ? scaled * up * slope : 0.0f);
        store(dup + i, up_in <= 7.0f && up_in >= -7.0f ? scaled * value : 0.0f);
        if constexpr (KEEP) store(a + i, value * up * weight);
    }
    return total;
}

template <class T, bool KEEP>
INLINE float differentiate_by(Function function, const float* h, const float* up, const float* da,
                              float weight, int64_t count, T* dh, T* dup, T* a) {
    if (function == GELU)
        return differentiate<T, Gelu, KEEP>(h, up, da, weight, count, dh, dup, a);
    if (function == SILU)
        return differentiate<T, Silu, KEEP>(h, up, da, weight, count, dh, dup, a);
    if (function == CLAMPED)
        return differentiate_clamped<T, KEEP>(h, up, da, weight, count, dh, dup, a);
    if (function == RELU2)
        return differentiate<T, Relu2, KEEP>(h, up, da, weight, count, dh, dup, a);
    if (function == LIMITED)
        return differentiate<T, Limited, KEEP>(h, up, da, weight, count, dh, dup, a);
    return differentiate<T, Relu, KEEP>(h, up, da, weight, count, dh, dup, a);
}

// Backward of the activation for one token row: writes dh (and dup with a gate, and a if it is not
// null) and returns the part of the routing weight's gradient. `weight` is the routing weight.
template <class T>
INLINE float activate_backward_body(const float* h, const float* up, const float* da, float weight,
                                    int64_t count, T* dh, T* dup, T* a, Function function) {
    return a ? differentiate_by<T, true>(function, h, up, da, weight, count, dh, dup, a)
             : differentiate_by<T, false>(function, h, up, da, weight, count, dh, dup, a);
}

// Stores a value that is rounded already.
INLINE void store_rounded(float* to, float value) { *to = value; }
INLINE void store_rounded(uint16_t* to, float value) { *to = uint16_t(to_bits(value) >> 16); }

// Rounds a piece of a weight gradient (at most BLOCK elements) and stores it, or with `add` adds it to
// the memory. Returns the sum of squares of the result.
template <class T>
INLINE float store_gradient_body(const float* __restrict from, int64_t count, T* __restrict to,
                                 bool add) {
    alignas(64) float values[BLOCK];  // two loops: compilers do not vectorize both in one
    float squares = 0.0f;
    if (add) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i)
            values[i] = rounded<T>(load(to + i) + rounded<T>(from[i]));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = rounded<T>(from[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store_rounded(to + i, values[i]);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; ++i) squares += values[i] * values[i];
    return squares;
}

// Rounds and stores a matrix.
template <class T>
INLINE void store_rows_body(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                            T* to, int64_t to_stride) {
    for (int64_t row = 0; row < rows; ++row) {
        const float* __restrict source = from + row * from_stride;
        T* __restrict target = to + row * to_stride;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) store(target + i, source[i]);
    }
}

template <class T>
INLINE void add_body(float* __restrict total, const T* __restrict more, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) total[i] += load(more + i);
}

// total += factor * more.
template <class T>
INLINE void add_scaled_body(float* __restrict total, const T* __restrict more, float factor,
                            int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) total[i] += factor * load(more + i);
}

template <class T>
INLINE float dot_body(const T* __restrict a, const T* __restrict b, int64_t count) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += load(a + i) * load(b + i);
    return total;
}

// Reads memory to measure its bandwidth; the result keeps the compiler from removing the loads.
// Four sums: with one, their additions would limit the bandwidth.
INLINE uint64_t read_body(const uint64_t* from, int64_t count) {
    typedef uint64_t Words __attribute__((vector_size(LINE)));
    Words total[4] = {};
    for (int64_t at = 0; at + 32 <= count; at += 32) {
        for (int i = 0; i < 4; ++i) {
            Words words;
            std::memcpy(&words, from + at + 8 * i, sizeof words);
            total[i] += words;
        }
    }
    const Words all = total[0] + total[1] + total[2] + total[3];
    uint64_t result = 0;
    for (int i = 0; i < 8; ++i) result += all[i];
    return result;
}

}  // namespace
