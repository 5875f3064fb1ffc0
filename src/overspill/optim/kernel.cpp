// A fused AdamW step over one record, and gradient accumulation, on the CPU.
//
// Plain C ABI, called through ctypes (which releases the GIL during a call). Each body is written
// once, element by element, and inlined into one function per instruction set, where the compiler
// vectorizes it. The best instruction set is chosen at run time.
//
// Every stored value depends on the index of its element only, never on the thread or chunk that
// computed it: any number of threads gives the same bits.

#include <cmath>
#include <vector>

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

// Small enough to balance the threads at the end of a record, large enough to schedule at no cost.
constexpr int64_t CHUNK = 1 << 16;

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

// Of a value that is rounded already.
INLINE void store_rounded(float* to, float value) { *to = value; }
INLINE void store_rounded(uint16_t* to, float value) { *to = uint16_t(to_bits(value) >> 16); }

struct AdamArgs {
    void* weight;
    int16_t* low;
    const void* grad;
    const void* added;
    void* exp_avg;
    void* exp_avg_sq;
    uint32_t start;  // index of the first element in its record
    AdamScalars scalars;
};

// How many gradients an update adds up.
enum Grads { NONE = 0, ONE = 1, TWO = 2 };

// W is the type of weight and gradients, M that of the moments. The sum of two gradients is rounded
// to W, as if it had been stored.
template <class W, class M, Grads GRADS>
INLINE void adam_body(const AdamArgs& args, int64_t begin, int64_t end) {
    W* __restrict weight = static_cast<W*>(args.weight) + begin;
    int16_t* __restrict low = args.low ? args.low + begin : nullptr;
    const W* __restrict grad = GRADS != NONE ? static_cast<const W*>(args.grad) + begin : nullptr;
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
            if (GRADS == TWO) g = rounded(g + load(added + i), grad);
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

template <class T>
INLINE double accumulate_body(void* into_, const void* grad_, int64_t begin, int64_t end) {
    constexpr int64_t BLOCK = 1024;
    float sums[BLOCK];  // in the L1 cache; compilers do not vectorize a loop from bf16 to double
    double squares = 0.0;
    for (int64_t block = begin; block < end; block += BLOCK) {
        T* __restrict into = static_cast<T*>(into_) + block;
        const T* __restrict grad = static_cast<const T*>(grad_) + block;
        const int size = int(end - block < BLOCK ? end - block : BLOCK);
#pragma omp simd
        for (int i = 0; i < size; ++i) {
            const float sum = rounded(load(into + i) + load(grad + i), into);
            store_rounded(into + i, sum);
            sums[i] = sum;
        }
#pragma omp simd reduction(+ : squares)
        for (int i = 0; i < size; ++i) squares += double(sums[i]) * double(sums[i]);
    }
    return squares;
}

using AdamRange = void (*)(const AdamArgs&, int64_t, int64_t);
using AccumulateRange = double (*)(void*, const void*, int64_t, int64_t);

#define DEFINE_ISA(NAME, TARGET)                                                          \
    template <class W, class M, Grads GRADS>                                            \
    TARGET void adam_##NAME(const AdamArgs& args, int64_t begin, int64_t end) {           \
        adam_body<W, M, GRADS>(args, begin, end);                                      \
    }                                                                                     \
    template <class T>                                                                    \
    TARGET double accumulate_##NAME(void* into, const void* grad, int64_t begin, int64_t end) { \
        return accumulate_body<T>(into, grad, begin, end);                                \
    }

DEFINE_ISA(generic, )
#if HAVE_X86
DEFINE_ISA(avx2, TARGET_AVX2)
DEFINE_ISA(avx512, TARGET_AVX512)
#endif

template <class W, class M, Grads GRADS>
AdamRange adam_for(int isa) {
#if HAVE_X86
    if (isa == AVX512) return adam_avx512<W, M, GRADS>;
    if (isa == AVX2) return adam_avx2<W, M, GRADS>;
#endif
    return adam_generic<W, M, GRADS>;
}

template <class W, class M>
AdamRange adam_for(int isa, Grads grads) {
    if (grads == NONE) return adam_for<W, M, NONE>(isa);
    return grads == ONE ? adam_for<W, M, ONE>(isa) : adam_for<W, M, TWO>(isa);
}

template <class T>
AccumulateRange accumulate_for(int isa) {
#if HAVE_X86
    if (isa == AVX512) return accumulate_avx512<T>;
    if (isa == AVX2) return accumulate_avx2<T>;
#endif
    return accumulate_generic<T>;
}

}  // namespace

extern "C" {

const char* overspill_isa() { return ISA_NAMES[best_vector_isa()]; }

// `isa`: -1 for the best, else an Isa of this CPU (checked by the caller).
void overspill_adamw(void* weight, int16_t* low, const void* grad, const void* added, void* exp_avg,
                     void* exp_avg_sq, int64_t numel, int64_t start, int weight_is_bf16,
                     int moments_are_bf16, const AdamScalars* scalars, int threads, int isa) {
    const AdamArgs args{weight,  low,        grad,            added,
                        exp_avg, exp_avg_sq, uint32_t(start), *scalars};
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    const Grads grads = grad == nullptr ? NONE : added == nullptr ? ONE : TWO;
    const AdamRange range =
        weight_is_bf16 ? (moments_are_bf16 ? adam_for<uint16_t, uint16_t>(chosen, grads)
                                           : adam_for<uint16_t, float>(chosen, grads))
                       : (moments_are_bf16 ? adam_for<float, uint16_t>(chosen, grads)
                                           : adam_for<float, float>(chosen, grads));
    const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = chunk * CHUNK;
        range(args, begin, begin + CHUNK < numel ? begin + CHUNK : numel);
    }
}

// into += grad; returns the sum of squares of the result.
double overspill_accumulate(void* into, const void* grad, int64_t numel, int is_bf16, int threads,
                            int isa) {
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    const AccumulateRange range =
        is_bf16 ? accumulate_for<uint16_t>(chosen) : accumulate_for<float>(chosen);
    const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
    std::vector<double> squares(chunks);  // added in order below, for the same bits
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = chunk * CHUNK;
        squares[chunk] = range(into, grad, begin, begin + CHUNK < numel ? begin + CHUNK : numel);
    }
    double total = 0.0;
    for (const double part : squares) total += part;
    return total;
}
}
