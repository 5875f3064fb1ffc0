// Products of a row of codes with token rows, which are in an order that suits the codes.
//
// Codes of four bits: a block is a vector of words of eight codes. In an ordered token row, the
// numbers that belong to the first code of each word come first, then those of the second one, and
// so on: then a shift of the words brings the next codes to where they are looked up. The sum of each
// word of a token row is stored beside it, for zero points. Codes of eight bits: float32 in the usual
// order. Token rows are padded with zeros.
#pragma once

#include "cpu_codes.h"

namespace {

// Sums of a block of each of M token rows: a product must not wait for the one before.
template <int M>
constexpr int SUMS = M == 1 ? 4 : 2;

constexpr int64_t ORDERED = 128;  // numbers: token rows are padded to a multiple of it

// One row of a packed matrix.
struct CodeRow {
    const uint8_t* codes;
    int64_t columns;
    const float* scales;  // by group, and numbers that are not used after them
    const float* zeros;   // of four bits: zero point times scale, as scales; may be null
    int shift;            // of four bits: a group has 1 << shift words; 62: there is one group
    int64_t group;        // of eight bits
    const PackedMatrix* matrix;
    const char* tokens;   // the first one
    int64_t token_bytes;  // from one to the next
    int64_t ahead;        // bytes from the codes to those that are prefetched

    const float* token(int m) const {
        return reinterpret_cast<const float*>(tokens + m * token_bytes);
    }
    // The last codes of a row, and zeros.
    __attribute__((noinline)) const uint8_t* last_codes(int64_t at, uint8_t (&to)[16]) const {
        std::memset(to, 0, 16);
        std::memcpy(to, codes + at, columns - at);
        return to;
    }
    const float* sums(int m) const { return token(m) + padded(columns, ORDERED); }
};

// Bytes of an ordered token row of k numbers: of the numbers and the sums.
INLINE int64_t ordered_bytes(int64_t k) { return padded(k, ORDERED) * 4 + padded(k, ORDERED) / 2; }

struct GenericDots : GenericCodes {
    static constexpr bool FUSED = false;  // has no products of codes
};

#if HAVE_X86

struct Avx2Dots : Avx2Codes {
    static constexpr bool FUSED = true;
    using Token = float;
    static constexpr int64_t LANES = 8;

    // Position of a column's number in an ordered token row.
    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 64;
        return column - at + at % 8 * 8 + at / 8;
    }

    // Codes are looked up as integers, in the upper byte of a word.
    INLINE float token_unit(const PackedMatrix& matrix) { return matrix.unit * 5.9604645e-8f; }

    template <int M>
    TARGET_AVX2 static void dot_nibbles(const CodeRow& row, float* c) {
        alignas(32) int8_t steps[32];
        for (int i = 0; i < 32; ++i)
            steps[i] = int8_t(row.matrix->values[i % 16] / row.matrix->unit);
        const __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(steps));
        const __m256i low = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xff000000));
        const __m256i spread = _mm256_srl_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                _mm_cvtsi32_si128(row.shift));
        __m256 total[M];
        for (int m = 0; m < M; ++m) total[m] = _mm256_setzero_ps();
        const int64_t bytes = row.columns / 2;
        for (int64_t at = 0, block = 0; at < bytes; at += 32, ++block) {
            __m256i codes;
            if (at + 32 <= bytes) {
                codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.codes + at));
            } else {
                alignas(32) uint8_t rest[32] = {};
                std::memcpy(rest, row.codes + at, bytes - at);
                codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(rest));
            }
            __builtin_prefetch(row.codes + at + row.ahead, 0, 2);
            const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
            const __m256i odd = _mm256_shuffle_epi8(
                table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
            __m256 part[M][SUMS<M>] = {};
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const __m256i shifted = _mm256_slli_epi32(j ? odd : even, 24 - 8 * i);
                    const __m256 weight = _mm256_cvtepi32_ps(_mm256_and_si256(shifted, upper));
                    for (int m = 0; m < M; ++m) {
                        const __m256 numbers =
                            _mm256_loadu_ps(row.token(m) + block * 64 + (2 * i + j) * 8);
                        __m256& sum = part[m][(2 * i + j) % SUMS<M>];
                        sum = _mm256_fmadd_ps(weight, numbers, sum);
                    }
                }
            for (int m = 0; m < M; ++m)
                for (int i = 1; i < SUMS<M>; ++i) part[m][0] += part[m][i];
            const int64_t group = block * 8 >> row.shift;
            const __m256 scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(row.scales + group), spread);
            for (int m = 0; m < M; ++m) total[m] = _mm256_fmadd_ps(part[m][0], scale, total[m]);
            if (!row.zeros) continue;
            const __m256 zero = _mm256_permutevar8x32_ps(_mm256_loadu_ps(row.zeros + group), spread);
            for (int m = 0; m < M; ++m)
                total[m] = _mm256_fnmadd_ps(zero, _mm256_loadu_ps(row.sums(m) + block * 8), total[m]);
        }
        for (int m = 0; m < M; ++m) c[m] = add_up(total[m]);
    }

    TARGET_AVX2 INLINE float add_up(__m256 total) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
    }

    // 16 codes of eight bits, without their unit.
    template <bool INTEGERS>
    TARGET_AVX2 INLINE void load_bytes(const CodeRow& row, int64_t at, __m128i turn,
                                       __m256 (&weight)[2]) {
        alignas(16) uint8_t rest[16];
        const uint8_t* codes = row.codes + at;
        if (at + 16 > row.columns) codes = row.last_codes(at, rest);
        if constexpr (INTEGERS) {
            const __m128i bytes = _mm_xor_si128(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), turn);
            weight[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            weight[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
        } else {
            const __m256i half = halves(codes);
            weight[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            weight[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
        }
    }

    // Scales of few columns multiply the weights, others the sums of ORDERED products.
    template <int M, bool INTEGERS>
    TARGET_AVX2 static void dot_bytes(const CodeRow& row, float* c) {
        const __m128i turn = _mm_set1_epi8(row.matrix->code_type == UINT8_CODES ? -128 : 0);
        __m256 total[M][2] = {}, weight[2];
        if (row.group < ORDERED && row.group < row.columns) {
            for (int64_t at = 0, group = 0, stop = row.group; at < row.columns; at += 16) {
                if (at == stop) ++group, stop += row.group;
                if (at % LINE == 0) __builtin_prefetch(row.codes + at + row.ahead, 0, 2);
                const __m256 scale = _mm256_broadcast_ss(row.scales + group);
                load_bytes<INTEGERS>(row, at, turn, weight);
                for (int i = 0; i < 2; ++i) {
                    weight[i] = _mm256_mul_ps(weight[i], scale);
                    for (int m = 0; m < M; ++m)
                        total[m][i] = _mm256_fmadd_ps(
                            weight[i], _mm256_loadu_ps(row.token(m) + at + 8 * i), total[m][i]);
                }
            }
        } else {
            for (int64_t at = 0, group = 0, stop = row.group; at < row.columns;) {
                if (at >= stop) ++group, stop += row.group;
                const int64_t end = least(least(at + ORDERED, stop), row.columns);
                __m256 part[M][2] = {};
                for (; at < end; at += 16) {
                    if (at % LINE == 0) __builtin_prefetch(row.codes + at + row.ahead, 0, 2);
                    load_bytes<INTEGERS>(row, at, turn, weight);
                    for (int m = 0; m < M; ++m)
                        for (int i = 0; i < 2; ++i)
                            part[m][i] = _mm256_fmadd_ps(
                                weight[i], _mm256_loadu_ps(row.token(m) + at + 8 * i), part[m][i]);
                }
                const __m256 scale = _mm256_broadcast_ss(row.scales + group);
                for (int m = 0; m < M; ++m)
                    for (int i = 0; i < 2; ++i)
                        total[m][i] = _mm256_fmadd_ps(part[m][i], scale, total[m][i]);
            }
        }
        for (int m = 0; m < M; ++m) c[m] = add_up(total[m][0] + total[m][1]);
    }
};

struct Avx512Dots : Avx512Codes {
    static constexpr bool FUSED = true;
    using Token = float;
    static constexpr int64_t LANES = 16;

    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 128;
        return column - at + at % 8 * 16 + at / 8;
    }

    INLINE float token_unit(const PackedMatrix&) { return 1.0f; }

    // The group of each word of a block, from that of the first one on.
    TARGET_AVX512 INLINE __m512i groups_of(const CodeRow& row) {
        const __m512i lanes =
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(row.shift));
    }

    TARGET_AVX512 INLINE __m512i load_words(const CodeRow& row, int64_t block) {
        const int64_t words = least(16, row.columns / 8 - block * 16);
        return _mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1), row.codes + block * 64);
    }

    // total += part * scale - zero * sums, by word.
    template <int M>
    TARGET_AVX512 INLINE void add_block(const CodeRow& row, int64_t block, __m512i spread,
                                        __m512 (&part)[M][SUMS<M>], __m512 (&total)[M]) {
        for (int m = 0; m < M; ++m)
            for (int i = 1; i < SUMS<M>; ++i) part[m][0] += part[m][i];
        const int64_t group = block * 16 >> row.shift;
        const __m512 scale = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(row.scales + group));
        for (int m = 0; m < M; ++m) total[m] = _mm512_fmadd_ps(part[m][0], scale, total[m]);
        if (!row.zeros) return;
        const __m512 zero = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(row.zeros + group));
        for (int m = 0; m < M; ++m)
            total[m] =
                _mm512_fnmadd_ps(zero, _mm512_loadu_ps(row.sums(m) + block * 16), total[m]);
    }

    template <int M>
    TARGET_AVX512 static void dot_nibbles(const CodeRow& row, float* c) {
        const __m512 table = _mm512_loadu_ps(row.matrix->values);
        const __m512i spread = groups_of(row);
        __m512 total[M];
        for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
        const int64_t blocks = pieces(row.columns, 128);
        for (int64_t block = 0; block < blocks; ++block) {
            __m512i codes = load_words(row, block);
            __builtin_prefetch(row.codes + block * 64 + row.ahead, 0, 2);
            __m512 part[M][SUMS<M>] = {};
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {  // the lowest four bits of a word count
                const __m512 weight = _mm512_permutexvar_ps(codes, table);
                for (int m = 0; m < M; ++m) {
                    const __m512 numbers =
                        _mm512_loadu_ps(row.token(m) + block * 128 + j * 16);
                    __m512& sum = part[m][j % SUMS<M>];
                    sum = _mm512_fmadd_ps(weight, numbers, sum);
                }
                codes = _mm512_srli_epi32(codes, 4);
            }
            add_block<M>(row, block, spread, part, total);
        }
        for (int m = 0; m < M; ++m) c[m] = _mm512_reduce_add_ps(total[m]);
    }

    // 16 codes of eight bits, without their unit.
    template <bool INTEGERS>
    TARGET_AVX512 INLINE __m512 load_bytes(const CodeRow& row, int64_t at, __m128i turn) {
        alignas(16) uint8_t rest[16];
        const uint8_t* codes = row.codes + at;
        if (at + 16 > row.columns) codes = row.last_codes(at, rest);
        if constexpr (!INTEGERS) return _mm512_cvtph_ps(Avx2Codes::halves(codes));
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(bytes, turn)));
    }

    // As in Avx2Dots.
    template <int M, bool INTEGERS>
    TARGET_AVX512 static void dot_bytes(const CodeRow& row, float* c) {
        const __m128i turn = _mm_set1_epi8(row.matrix->code_type == UINT8_CODES ? -128 : 0);
        __m512 total[M][2] = {};
        if (row.group < ORDERED && row.group < row.columns) {
            for (int64_t at = 0, group = 0, stop = row.group; at < row.columns;) {
                if (at >= stop) ++group, stop += row.group;
                const int64_t end = least(stop, row.columns);
                const __m512 scale = _mm512_set1_ps(row.scales[group]);
                if (at % LINE == 0) __builtin_prefetch(row.codes + at + row.ahead, 0, 2);
                for (int i = 0; at < end; at += 16, i ^= 1) {
                    const __m512 weight =
                        _mm512_mul_ps(load_bytes<INTEGERS>(row, at, turn), scale);
                    for (int m = 0; m < M; ++m) {
                        __m512& sum = i ? total[m][1] : total[m][0];
                        sum = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row.token(m) + at), sum);
                    }
                }
            }
        } else {
            for (int64_t at = 0, group = 0, stop = row.group; at < row.columns;) {
                if (at >= stop) ++group, stop += row.group;
                const int64_t end = least(least(at + ORDERED, stop), row.columns);
                __m512 part[M][2] = {};
                while (at < end) {  // two products at once do not wait for each other
                    if (at % LINE == 0) __builtin_prefetch(row.codes + at + row.ahead, 0, 2);
                    for (int i = 0; i < 2 && at < end; ++i, at += 16) {
                        const __m512 weight = load_bytes<INTEGERS>(row, at, turn);
                        for (int m = 0; m < M; ++m)
                            part[m][i] = _mm512_fmadd_ps(
                                weight, _mm512_loadu_ps(row.token(m) + at), part[m][i]);
                    }
                }
                const __m512 scale = _mm512_set1_ps(row.scales[group]);
                for (int m = 0; m < M; ++m)
                    for (int i = 0; i < 2; ++i)
                        total[m][i] = _mm512_fmadd_ps(part[m][i], scale, total[m][i]);
            }
        }
        for (int m = 0; m < M; ++m) c[m] = _mm512_reduce_add_ps(total[m][0] + total[m][1]);
    }
};

#if HAVE_BF16

// Token rows in bf16, two of whose numbers are multiplied at once: the words of a block have sixteen
// bits, and four codes.
struct Bf16Dots : Avx512Dots {
    using Token = uint16_t;

    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 128;
        return column - at + at % 4 * 32 + at / 4;
    }

    template <int M>
    TARGET_BF16 static void dot_nibbles(const CodeRow& row, float* c) {
        alignas(64) uint16_t values[32];  // twice: the fifth bit belongs to the next code
        for (int i = 0; i < 32; ++i) values[i] = uint16_t(to_bits(row.matrix->values[i % 16]) >> 16);
        const __m512i table = _mm512_load_si512(values), spread = groups_of(row);
        __m512 total[M];
        for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
        const int64_t blocks = pieces(row.columns, 128);
        for (int64_t block = 0; block < blocks; ++block) {
            __m512i codes = load_words(row, block);
            __builtin_prefetch(row.codes + block * 64 + row.ahead, 0, 2);
            __m512 part[M][SUMS<M>] = {};
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m512i weight = _mm512_permutexvar_epi16(codes, table);
                for (int m = 0; m < M; ++m) {
                    const uint16_t* token = reinterpret_cast<const uint16_t*>(row.token(m));
                    const __m512i numbers = _mm512_loadu_si512(token + block * 128 + j * 32);
                    __m512& sum = part[m][j % SUMS<M>];
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)numbers);
                }
                codes = _mm512_srli_epi16(codes, 4);
            }
            add_block<M>(row, block, spread, part, total);
        }
        for (int m = 0; m < M; ++m) c[m] = _mm512_reduce_add_ps(total[m]);
    }
};

#endif  // HAVE_BF16

#endif  // HAVE_X86

// c[token] for `count` token rows, at most M.
template <int M, class Codes>
INLINE void dot_some(const CodeRow& row, int64_t count, float* c) {
    if constexpr (M > 1) {
        if (count < M) return dot_some<M - 1, Codes>(row, count, c);
    }
    if (row.matrix->code_type == NIBBLES) return Codes::template dot_nibbles<M>(row, c);
    if (row.matrix->code_type == E4M3_CODES) return Codes::template dot_bytes<M, false>(row, c);
    Codes::template dot_bytes<M, true>(row, c);
}

}  // namespace
