// The C++ kernel for CPUs with AVX-512, but without AVX512-BF16: the instruction vdpbf16ps, which
// adds products of two pairs of bf16 numbers and takes subnormal ones as zero, is emulated.

#include <immintrin.h>

namespace {

__attribute__((target("avx512f"), always_inline)) inline __m512 emulated_dpbf16(
    __m512 sum, __m512bh a, __m512bh b) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), x = (__m512i)a, y = (__m512i)b;
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                          _mm512_castsi512_ps(_mm512_and_si512(y, upper)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), sum);
}

}  // namespace

#define _mm512_dpbf16_ps emulated_dpbf16
#include "../../src/overspill/compute/cpu_kernel.cpp"
