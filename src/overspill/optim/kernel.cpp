// A fused AdamW step over one record, and gradient accumulation, on the CPU.
//
// Plain C ABI, called through ctypes (which releases the GIL during a call).
//
// Every stored value depends on the index of its element only, never on the thread or chunk that
// computed it: any number of threads gives the same bits.

#include <vector>

#include "adamw.h"

namespace {

// Small enough to balance the threads at the end of a record, large enough to schedule at no cost.
constexpr int64_t CHUNK = 1 << 16;

// Of a value that is rounded already.
INLINE void store_rounded(float* to, float value) { *to = value; }
INLINE void store_rounded(uint16_t* to, float value) { *to = uint16_t(to_bits(value) >> 16); }

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

using AccumulateRange = double (*)(void*, const void*, int64_t, int64_t);

#define DEFINE_ACCUMULATE(NAME, TARGET)                                                         \
    template <class T>                                                                          \
    TARGET double accumulate_##NAME(void* into, const void* grad, int64_t begin, int64_t end) { \
        return accumulate_body<T>(into, grad, begin, end);                                      \
    }

DEFINE_ACCUMULATE(generic, )
#if HAVE_X86
DEFINE_ACCUMULATE(avx2, TARGET_AVX2)
DEFINE_ACCUMULATE(avx512, TARGET_AVX512)
#endif

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
    const AdamArgs args{weight,  low,        grad,            added,   0,
                        exp_avg, exp_avg_sq, uint32_t(start), *scalars};
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    const auto function_for = grad == nullptr    ? adam_for<NONE>
                              : added == nullptr ? adam_for<ONE>
                                                 : adam_for<TWO>;
    const AdamRange range = function_for(weight_is_bf16, moments_are_bf16, chosen);
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
