// Packs groups of 32 weights as MXFP4 or int4: the loops of quantize.py, with the same bits.
//
// Every operation is one of single float32 values, without fused products, and sums are added in a
// fixed order: the result depends neither on the compiler nor on the machine.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "cpu_isa.h"

namespace {

constexpr int GROUP = 32;
constexpr float LEAST_SCALE = 0x1p-126f;
constexpr float DIVISORS[] = {7.0f, 7.25f, 7.5f, 7.75f, 8.0f, 8.25f, 8.5f, 9.0f};

constexpr uint32_t MAGNITUDE = 0x7fffffffu, EXPONENT = 0x7f800000u, ONE = 0x3f800000u,
                   HALF = 0x3f000000u, SIX = 0x40c00000u,
                   TOO_LARGE = 0x7f000000u;  // 2 ** 127: products of codes and scales overflow

// Integers instead of conditions on floats: compilers vectorize these. The bits of magnitudes are in
// their order, and those of infinity and NaN are the largest.
INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

template <int N>
INLINE void fold_most(int32_t* values) {
    for (int i = 0; i < N; ++i) values[i] = most(values[i], values[i + N]);
    if constexpr (N > 1) fold_most<N / 2>(values);
}

template <int N>
INLINE void fold_sum(float* values) {
    for (int i = 0; i < N; ++i) values[i] = values[i] + values[i + N];
    if constexpr (N > 1) fold_sum<N / 2>(values);
}

// The bits of the largest magnitude.
INLINE int32_t largest_bits(const float* x) {
    int32_t largest[GROUP];
    for (int i = 0; i < GROUP; ++i) largest[i] = int32_t(to_bits(x[i]) & MAGNITUDE);
    fold_most<GROUP / 2>(largest);
    return largest[0];
}

// The sum of the squares. Changes the errors.
INLINE float squares(float* errors) {
    for (int i = 0; i < GROUP; ++i) errors[i] = errors[i] * errors[i];
    fold_sum<GROUP / 2>(errors);
    return errors[0];
}

INLINE float power(int exponent) { return from_bits(uint32_t(exponent + 127) << 23); }

// The nearest value of e2m1 to a magnitude; of two that with an even code.
INLINE float round_e2m1(float size) {
    const int32_t bits = least(int32_t(to_bits(size)), SIX);
    const float limited = from_bits(uint32_t(bits));
    const float shift = from_bits(uint32_t(most(bits, ONE)) & EXPONENT) * 0x1.8p22f;
    return (limited + shift) - shift;
}

INLINE void mxfp4_group(const float* x, int32_t largest, uint8_t* codes, uint8_t* scale) {
    const int exponent = most((largest >> 23) - 129, -127);
    const float unit = power(-exponent);
    float sizes[GROUP], low[GROUP], high[GROUP], errors[GROUP];
    for (int i = 0; i < GROUP; ++i) sizes[i] = from_bits(to_bits(x[i] * unit) & MAGNITUDE);
    for (int i = 0; i < GROUP; ++i) low[i] = round_e2m1(sizes[i]);
    for (int i = 0; i < GROUP; ++i) high[i] = round_e2m1(sizes[i] * 0.5f);
    for (int i = 0; i < GROUP; ++i) errors[i] = low[i] - sizes[i];
    const float low_error = squares(errors);
    for (int i = 0; i < GROUP; ++i) errors[i] = 2.0f * high[i] - sizes[i];
    const bool takes_high = squares(errors) < low_error;
    const float* chosen = takes_high ? high : low;
    uint32_t of_each[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const uint32_t bits = to_bits(chosen[i]);
        // 1.0 and 1.5 are the codes 2 and 3, each doubling adds two; 0.5 is the code 1
        const int32_t code = most(int32_t(bits >> 22) - 252, 0) + int32_t(bits == HALF);
        of_each[i] = uint32_t(code) | (to_bits(x[i]) >> 31) << 3;
    }
    for (int i = 0; i < GROUP / 2; ++i)
        codes[i] = uint8_t(of_each[2 * i] | of_each[2 * i + 1] << 4);
    *scale = uint8_t(largest == 0 ? 127 : exponent + takes_high + 127);
}

INLINE void round_int4(const float* x, float scale, float* rounded) {
    const float inverse = 1.0f / scale;
    for (int i = 0; i < GROUP; ++i) {
        const float nearest = (x[i] * inverse + 0x1.8p23f) - 0x1.8p23f;
        const float above = nearest > -8.0f ? nearest : -8.0f;
        rounded[i] = above < 7.0f ? above : 7.0f;
    }
}

INLINE void int4_group(const float* x, int32_t largest, uint32_t* codes, uint16_t* stored_scale) {
    const float unit = power(-least((largest >> 23) - 126, 126)), magnitude = from_bits(uint32_t(largest));
    float best = from_bits(EXPONENT), best_scale = magnitude;
    float rounded[GROUP];
    for (const float divisor : DIVISORS) {
        const float nearest = from_bits(bf16_bits(magnitude / divisor) << 16);
        const float scale = nearest > LEAST_SCALE ? nearest : LEAST_SCALE;
        round_int4(x, scale, rounded);
        for (int i = 0; i < GROUP; ++i) rounded[i] = (rounded[i] * scale - x[i]) * unit;
        const float error = squares(rounded);
        if (error < best) {
            best = error;
            best_scale = scale;
        }
    }
    round_int4(x, best_scale, rounded);
    for (int word = 0; word < GROUP / 8; ++word) {
        uint32_t packed = 0;
        for (int place = 0; place < 8; ++place)
            packed |= uint32_t(int32_t(rounded[8 * word + place]) + 8) << 4 * place;
        codes[word] = packed;
    }
    *stored_scale = uint16_t(to_bits(best_scale) >> 16);
}

INLINE int quantize_body(const float* x, int64_t groups, int integers, void* codes, void* scales) {
    for (int64_t group = 0; group < groups; ++group, x += GROUP) {
        const int32_t largest = largest_bits(x);
        if (largest >= int32_t(TOO_LARGE)) return 0;
        if (integers)
            int4_group(x, largest, static_cast<uint32_t*>(codes) + 4 * group,
                       static_cast<uint16_t*>(scales) + group);
        else
            mxfp4_group(x, largest, static_cast<uint8_t*>(codes) + 16 * group,
                        static_cast<uint8_t*>(scales) + group);
    }
    return 1;
}

int quantize_generic(const float* x, int64_t groups, int integers, void* codes, void* scales) {
    return quantize_body(x, groups, integers, codes, scales);
}
#if HAVE_X86
__attribute__((target("avx2"))) int quantize_avx2(const float* x, int64_t groups, int integers,
                                                  void* codes, void* scales) {
    return quantize_body(x, groups, integers, codes, scales);
}
#endif

}  // namespace

extern "C" {

// Returns 0 if a weight is NaN, infinite or at least 2 ** 127. `isa`: -1 for the best, else an Isa of this CPU.
int overspill_quantize(const float* weights, int64_t groups, int integers, void* codes,
                       void* scales, int isa) {
#if HAVE_X86
    if ((isa < 0 ? best_vector_isa() : isa) >= AVX2)
        return quantize_avx2(weights, groups, integers, codes, scales);
#endif
    return quantize_generic(weights, groups, integers, codes, scales);
}
}
