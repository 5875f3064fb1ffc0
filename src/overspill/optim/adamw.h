// The fused AdamW step over numbers of a record, for each instruction set.
//
// Each body is written once, element by element, and inlined into one function per instruction set,
// where the compiler vectorizes it. The best instruction set is chosen at run time.
#pragma once

#include <cmath>
#include <type_traits>

#include "../compute/cpu_isa.h"

// The scalars of one step, computed in double by the caller; mirrored by kernel.py.
struct AdamScalars {
    float decay;  // 1 - lr * weight_decay
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;       // lr / (1 - beta1^step)
    float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float grad_scale;
    uint32_t seed;  // of the stochastic rounding, different at each step
};

namespace {

// 32 random bits for an element of a step (the "lowbias32" hash). The low half rounds exp_avg, the
// high half exp_avg_sq.
INLINE uint32_t noise(uint32_t seed, uint32_t index) {
    uint32_t x = index ^ seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Stochastic rounding: rounds up with a probability equal to the distance from the lower bf16.
// Rounding to the nearest would freeze exp_avg_sq: at beta2 = 0.999 a step changes it by less than
// half a bf16 ulp.
INLINE void store_moment(float* to, int64_t i, float value, uint32_t) { to[i] = value; }
INLINE void store_moment(uint16_t* to, int64_t i, float value, uint32_t noise16) {
    to[i] = uint16_t((to_bits(value) + noise16) >> 16);
}

// The fp32 master of a bf16 weight is stored as the weight and its low 16 bits. The weight is the
// master rounded half up, so the difference always fits a signed 16-bit number.
INLINE float load_master(const uint16_t* weight, const int16_t* low, int64_t i) {
    return from_bits((uint32_t(weight[i]) << 16) + uint32_t(int32_t(low[i])));
}
INLINE void store_master(uint16_t* weight, int16_t* low, int64_t i, float master) {
    const uint32_t bits = to_bits(master);
    weight[i] = uint16_t((bits + 0x8000u) >> 16);
    low[i] = int16_t(uint16_t(bits));
}
INLINE float load_master(const float* weight, const int16_t*, int64_t i) { return weight[i]; }
INLINE void store_master(float* weight, int16_t*, int64_t i, float master) { weight[i] = master; }

INLINE float rounded(float value, const float*) { return value; }
INLINE float rounded(float value, const uint16_t*) { return from_bits(bf16_bits(value) << 16); }

struct AdamArgs {
    void* weight;
    int16_t* low;
    const void* grad;
    const void* added;
    int64_t grad_start;  // index of the first gradient
    void* exp_avg;
    void* exp_avg_sq;
    uint32_t start;  // index of the first element in its record
    AdamScalars scalars;
};

// How many gradients an update adds up, or one of floats.
enum Grads { NONE = 0, ONE = 1, TWO = 2, FLOATS = 3 };

// W is the type of weight and gradients (but FLOATS), M that of the moments. The sum of two gradients is rounded
// to W, as if it had been stored.
template <class W, class M, Grads GRADS>
INLINE void adam_body(const AdamArgs& args, int64_t begin, int64_t end) {
    W* __restrict weight = static_cast<W*>(args.weight) + begin;
    int16_t* __restrict low = args.low ? args.low + begin : nullptr;
    using G = std::conditional_t<GRADS == FLOATS, float, W>;
    const G* __restrict grad =
        GRADS != NONE ? static_cast<const G*>(args.grad) + (begin - args.grad_start) : nullptr;
    const W* __restrict added = GRADS == TWO ? static_cast<const W*>(args.added) + begin : nullptr;
    M* __restrict exp_avg = static_cast<M*>(args.exp_avg) + begin;
    M* __restrict exp_avg_sq = static_cast<M*>(args.exp_avg_sq) + begin;
    const AdamScalars s = args.scalars;
    const int size = int(end - begin);  // 32-bit: the noise's index needs no 64-bit lanes
    const uint32_t first = args.start + uint32_t(begin);
#pragma omp simd
    for (int i = 0; i < size; ++i) {
        float m = load(exp_avg + i) * s.beta1;
        float v = load(exp_avg_sq + i) * s.beta2;
        if (GRADS != NONE) {
            float g = load(grad + i);
            if (GRADS == TWO) g = rounded(g + load(added + i), added);
            g *= s.grad_scale;
            m += s.one_minus_beta1 * g;
            v += s.one_minus_beta2 * (g * g);
        }
        const float denominator = std::sqrt(v) * s.inv_sqrt_bias2 + s.eps;
        const float master =
            load_master(weight, low, i) * s.decay - s.step_size * (m / denominator);
        const uint32_t random = noise(s.seed, first + uint32_t(i));
        store_moment(exp_avg, i, m, random & 0xffffu);
        store_moment(exp_avg_sq, i, v, random >> 16);
        store_master(weight, low, i, master);
    }
}

using AdamRange = void (*)(const AdamArgs&, int64_t, int64_t);

#define DEFINE_ADAM(NAME, TARGET)                                               \
    template <class W, class M, Grads GRADS>                                  \
    TARGET void adam_##NAME(const AdamArgs& args, int64_t begin, int64_t end) { \
        adam_body<W, M, GRADS>(args, begin, end);                            \
    }

DEFINE_ADAM(generic, )
#if HAVE_X86
DEFINE_ADAM(avx2, TARGET_AVX2)
DEFINE_ADAM(avx512, TARGET_AVX512)
#endif

template <class W, class M, Grads GRADS>
AdamRange adam_for(int isa) {
#if HAVE_X86
    if (isa == AVX512) return adam_avx512<W, M, GRADS>;
    if (isa == AVX2) return adam_avx2<W, M, GRADS>;
#endif
    return adam_generic<W, M, GRADS>;
}

template <Grads GRADS>
AdamRange adam_for(bool weight_is_bf16, bool moments_are_bf16, int isa) {
    if (weight_is_bf16)
        return moments_are_bf16 ? adam_for<uint16_t, uint16_t, GRADS>(isa)
                                : adam_for<uint16_t, float, GRADS>(isa);
    return moments_are_bf16 ? adam_for<float, uint16_t, GRADS>(isa)
                            : adam_for<float, float, GRADS>(isa);
}

}  // namespace
