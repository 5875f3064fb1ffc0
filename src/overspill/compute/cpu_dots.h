// Products of a row of codes with token rows, which are in an order that suits the codes.
//
// Codes of four bits: a block is a vector of words of eight codes. In an ordered token row, the
// numbers that belong to the first code of each word come first, then those of the second one, and
// so on: then a shift of the words brings the next codes to where they are looked up. The sum of each
// word of a token row is stored beside it, for zero points. Codes of eight bits: float32 in the usual
// order, except with products in bf16. Token rows are padded with zeros.
#pragma once

#include "cpu_codes.h"

namespace {

constexpr int64_t ORDERED = 128;  // numbers: token rows are padded to a multiple of it
// Rows of a packed matrix that are multiplied at once, and token rows: a load of token numbers serves
// all of these rows.
struct CodeRows {
    const PackedMatrix* matrix;
    int64_t columns;
    const uint8_t *codes, *next;  // `next` are read after these rows
    int64_t row_bytes;
    int64_t code_stride;   // from one row to the next, as the next strides
    const float* scales;   // by group, and numbers that are not used after them
    const float* zeros;    // of four bits: zero point times scale, as scales; may be null
    int64_t scale_stride;
    int shift;             // a group has 1 << shift words of eight codes, or codes of eight bits; 62:
                           // there is one group
    const char* tokens;
    int64_t token_stride;  // bytes
    float* sums;           // [row][token]
    int64_t sum_stride;

    const float* token(int m) const {
        return reinterpret_cast<const float*>(tokens + m * token_stride);
    }
    // Requests codes that are read IN_FLIGHT lines after those at `at`.
    template <int W>
    __attribute__((always_inline)) void prefetch(int64_t at) const {
        const int64_t ahead = at + IN_FLIGHT / W * LINE;
        const uint8_t* from = ahead < row_bytes ? codes + ahead : next + (ahead - row_bytes);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) __builtin_prefetch(from + w * code_stride, 0, 3);
    }
    // Sums of words of a token row.
    const float* word_sums(int m) const { return token(m) + padded(columns, ORDERED); }
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

    static constexpr int ROWS = 2;  // of codes that are multiplied at once

    // Position of a column's number in an ordered token row.
    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 64;
        return column - at + at % 8 * 8 + at / 8;
    }

    // Stores the number of a column for codes of eight bits.
    INLINE void put_number(int32_t, int64_t column, float number, char* token) {
        reinterpret_cast<float*>(token)[column] = number;
    }

    // Codes are looked up as integers, in the upper byte of a word.
    INLINE float token_unit(const PackedMatrix& matrix) { return matrix.unit * 5.9604645e-8f; }

    // The last codes of a row, and zeros.
    template <int BYTES>
    __attribute__((noinline)) static const uint8_t* last_codes(const uint8_t* codes, int64_t count,
                                                               uint8_t (&to)[BYTES]) {
        std::memset(to, 0, BYTES);
        std::memcpy(to, codes, count);
        return to;
    }

    template <int W, int M>
    TARGET_AVX2 static void dot_nibbles(const CodeRows& rows) {
        alignas(32) int8_t steps[32];
        for (int i = 0; i < 32; ++i)
            steps[i] = int8_t(rows.matrix->values[i % 16] / rows.matrix->unit);
        const __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(steps));
        const __m256i low = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xff000000));
        const __m256i spread = _mm256_srl_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                _mm_cvtsi32_si128(rows.shift));
        __m256 total[W][M] = {};
        const int64_t bytes = rows.columns / 2;
        for (int64_t at = 0, block = 0; at < bytes; at += 32, ++block) {
            const int64_t group = block * 8 >> rows.shift;
            if (at % LINE == 0) rows.prefetch<W>(at);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                uint8_t rest[32];
                const uint8_t* from = rows.codes + w * rows.code_stride + at;
                if (at + 32 > bytes) from = last_codes(from, bytes - at, rest);
                const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
                const __m256i odd = _mm256_shuffle_epi8(
                    table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
                __m256 part[M] = {};
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    const __m256i shifted = _mm256_slli_epi32(j % 2 ? odd : even, 24 - j / 2 * 8);
                    const __m256 weight = _mm256_cvtepi32_ps(_mm256_and_si256(shifted, upper));
#pragma GCC unroll 4
                    for (int m = 0; m < M; ++m)
                        part[m] = _mm256_fmadd_ps(
                            weight, _mm256_loadu_ps(rows.token(m) + block * 64 + j * 8), part[m]);
                }
                const __m256 scale = _mm256_permutevar8x32_ps(
                    _mm256_loadu_ps(rows.scales + w * rows.scale_stride + group), spread);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m)
                    total[w][m] = _mm256_fmadd_ps(part[m], scale, total[w][m]);
                if (!rows.zeros) continue;
                const __m256 zero = _mm256_permutevar8x32_ps(
                    _mm256_loadu_ps(rows.zeros + w * rows.scale_stride + group), spread);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m)
                    total[w][m] = _mm256_fnmadd_ps(
                        zero, _mm256_loadu_ps(rows.word_sums(m) + block * 8), total[w][m]);
            }
        }
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) rows.sums[w * rows.sum_stride + m] = add_up(total[w][m]);
    }

    TARGET_AVX2 INLINE float add_up(__m256 total) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
    }

    // Values of 16 codes of eight bits, without their unit.
    template <bool INTEGERS>
    TARGET_AVX2 INLINE void load_bytes(const uint8_t* codes, __m128i turn, __m256 (&weight)[2]) {
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

    // Blocks of 16 codes have one scale.
    template <int W, int M, bool INTEGERS>
    TARGET_AVX2 static void dot_bytes(const CodeRows& rows) {
        const __m128i turn = _mm_set1_epi8(rows.matrix->code_type == UINT8_CODES ? -128 : 0);
        __m256 total[W][M] = {};
        for (int64_t at = 0; at < rows.columns; at += 16) {
            const int64_t group = at >> rows.shift;
            if (at % LINE == 0) rows.prefetch<W>(at);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                uint8_t rest[16];
                const uint8_t* from = rows.codes + w * rows.code_stride + at;
                if (at + 16 > rows.columns) from = last_codes(from, rows.columns - at, rest);
                __m256 weight[2];
                load_bytes<INTEGERS>(from, turn, weight);
                const __m256 scale = _mm256_broadcast_ss(rows.scales + w * rows.scale_stride + group);
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    weight[i] = _mm256_mul_ps(weight[i], scale);
#pragma GCC unroll 4
                    for (int m = 0; m < M; ++m)
                        total[w][m] = _mm256_fmadd_ps(
                            weight[i], _mm256_loadu_ps(rows.token(m) + at + 8 * i), total[w][m]);
                }
            }
        }
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) rows.sums[w * rows.sum_stride + m] = add_up(total[w][m]);
    }
};

struct Avx512Dots : Avx512Codes {
    static constexpr bool FUSED = true;
    using Token = float;

    static constexpr int ROWS = 4;

    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 128;
        return column - at + at % 8 * 16 + at / 8;
    }

    INLINE void put_number(int32_t code_type, int64_t column, float number, char* token) {
        Avx2Dots::put_number(code_type, column, number, token);
    }

    INLINE float token_unit(const PackedMatrix&) { return 1.0f; }

    // The group of each word of a block, from that of the first one on, if a group has 1 << shift.
    TARGET_AVX512 INLINE __m512i groups_of(int shift) {
        const __m512i lanes =
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift));
    }

    // The words of the last block, which is not whole.
    INLINE __mmask16 last_words(const CodeRows& rows) {
        return __mmask16((1u << rows.columns % 128 / 8) - 1);
    }

    // Words of a block of W rows.
    template <int W>
    TARGET_AVX512 INLINE void load_words(const CodeRows& rows, int64_t block, __mmask16 words,
                                         __m512i (&codes)[W]) {
        rows.prefetch<W>(block * 64);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
            codes[w] =
                _mm512_maskz_loadu_epi32(words, rows.codes + w * rows.code_stride + block * 64);
    }

    // total += part * scale - zero * sums, by word. A block begins with a group, or within one.
    template <int W, int M>
    TARGET_AVX512 INLINE void add_block(const CodeRows& rows, int64_t block, int64_t group,
                                        __m512i spread, const __m512 (&part)[W][M],
                                        __m512 (&total)[W][M]) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const __m512 scale = _mm512_permutexvar_ps(
                spread, _mm512_loadu_ps(rows.scales + w * rows.scale_stride + group));
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
                total[w][m] = _mm512_fmadd_ps(part[w][m], scale, total[w][m]);
            if (!rows.zeros) continue;
            const __m512 zero = _mm512_permutexvar_ps(
                spread, _mm512_loadu_ps(rows.zeros + w * rows.scale_stride + group));
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
                total[w][m] = _mm512_fnmadd_ps(
                    zero, _mm512_loadu_ps(rows.word_sums(m) + block * 16), total[w][m]);
        }
    }

    template <int W, int M>
    TARGET_AVX512 INLINE void store_sums(const CodeRows& rows, const __m512 (&total)[W][M]) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
                rows.sums[w * rows.sum_stride + m] = _mm512_reduce_add_ps(total[w][m]);
    }

    template <int W, int M>
    TARGET_AVX512 INLINE void add_nibbles(const CodeRows& rows, int64_t block, __mmask16 words,
                                          __m512 table, __m512i spread, __m512 (&total)[W][M]) {
        __m512i codes[W];
        load_words<W>(rows, block, words, codes);
        __m512 part[W][M] = {};
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {  // the lowest four bits of a word count
            __m512 weight[W];
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                weight[w] = _mm512_permutexvar_ps(codes[w], table);
                codes[w] = _mm512_srli_epi32(codes[w], 4);
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const __m512 numbers = _mm512_loadu_ps(rows.token(m) + block * 128 + j * 16);
#pragma GCC unroll 4
                for (int w = 0; w < W; ++w)
                    part[w][m] = _mm512_fmadd_ps(weight[w], numbers, part[w][m]);
            }
        }
        const int64_t group = block * 16 >> rows.shift;
        add_block<W, M>(rows, block, group, spread, part, total);
    }

    template <int W, int M>
    TARGET_AVX512 static void dot_nibbles(const CodeRows& rows) {
        const __m512 table = _mm512_loadu_ps(rows.matrix->values);
        const __m512i spread = groups_of(rows.shift);
        const int64_t blocks = rows.columns / 128;
        __m512 total[W][M] = {};
        for (int64_t block = 0; block < blocks; ++block)
            add_nibbles<W, M>(rows, block, 0xffff, table, spread, total);
        if (rows.columns % 128)
            add_nibbles<W, M>(rows, blocks, last_words(rows), table, spread, total);
        store_sums<W, M>(rows, total);
    }

    // Values of 32 codes of eight bits, without their unit.
    template <bool INTEGERS>
    TARGET_AVX512 INLINE void decode_bytes(__m256i codes, __m512 (&weight)[2]) {
        if constexpr (INTEGERS) {
            const __m128i high = _mm256_extracti128_si256(codes, 1);
            weight[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
            weight[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high));
        } else {  // as `halves`
            const __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
            const __m512i half = _mm512_and_si512(shifted, _mm512_set1_epi16(int16_t(0xbfff)));
            weight[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
            weight[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        }
    }

    // Adds the products of 32 columns from `at` on. 16 of them have one scale.
    template <int W, int M, bool INTEGERS>
    TARGET_AVX512 INLINE void add_bytes(const CodeRows& rows, int64_t at, __mmask32 columns,
                                        __m256i turn, __m512 (&total)[W][M]) {
        __m512 weight[W][2];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const uint8_t* const from = rows.codes + w * rows.code_stride + at;
            const __m256i codes = _mm256_maskz_loadu_epi8(columns, from);
            decode_bytes<INTEGERS>(INTEGERS ? _mm256_xor_si256(codes, turn) : codes, weight[w]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int64_t group = (at + 16 * i) >> rows.shift;
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w)
                weight[w][i] = _mm512_mul_ps(
                    weight[w][i], _mm512_set1_ps(rows.scales[w * rows.scale_stride + group]));
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const __m512 numbers = _mm512_loadu_ps(rows.token(m) + at + 16 * i);
#pragma GCC unroll 4
                for (int w = 0; w < W; ++w)
                    total[w][m] = _mm512_fmadd_ps(weight[w][i], numbers, total[w][m]);
            }
        }
    }

    template <int W, int M, bool INTEGERS>
    TARGET_AVX512 static void dot_bytes(const CodeRows& rows) {
        const __m256i turn = _mm256_set1_epi8(rows.matrix->code_type == UINT8_CODES ? -128 : 0);
        __m512 total[W][M] = {};
        int64_t at = 0;
        for (; at + 64 <= rows.columns; at += 64) {
            rows.prefetch<W>(at);
            add_bytes<W, M, INTEGERS>(rows, at, ~0u, turn, total);
            add_bytes<W, M, INTEGERS>(rows, at + 32, ~0u, turn, total);
        }
        for (; at < rows.columns; at += 32) {
            const int64_t left = least(32, rows.columns - at);
            add_bytes<W, M, INTEGERS>(rows, at, ~0u >> (32 - left), turn, total);
        }
        store_sums<W, M>(rows, total);
    }
};

#if HAVE_BF16

// Token rows in bf16, two of whose numbers are multiplied at once: the words of a block have sixteen
// bits, and four codes. Of codes of e4m3 they have two: the numbers of the even columns of a block
// come first. Integers of eight bits: as without bf16.
struct Bf16Dots : Avx512Dots {
    using Token = uint16_t;

    INLINE int64_t place(int64_t column) {
        const int64_t at = column % 128;
        return column - at + at % 4 * 32 + at / 4;
    }

    template <int W, int M>
    TARGET_BF16 INLINE void add_nibbles(const CodeRows& rows, int64_t block, __mmask16 words,
                                        __m512i table, __m512i spread, __m512 (&total)[W][M]) {
        __m512i codes[W];
        load_words<W>(rows, block, words, codes);
        __m512 part[W][M] = {};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            __m512i weight[W];
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                weight[w] = _mm512_permutexvar_epi16(codes[w], table);
                codes[w] = _mm512_srli_epi16(codes[w], 4);
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const uint16_t* const token = reinterpret_cast<const uint16_t*>(rows.token(m));
                const __m512i numbers = _mm512_loadu_si512(token + block * 128 + j * 32);
#pragma GCC unroll 4
                for (int w = 0; w < W; ++w)
                    part[w][m] =
                        _mm512_dpbf16_ps(part[w][m], (__m512bh)weight[w], (__m512bh)numbers);
            }
        }
        const int64_t group = block * 16 >> rows.shift;
        add_block<W, M>(rows, block, group, spread, part, total);
    }

    template <int W, int M>
    TARGET_BF16 static void dot_nibbles(const CodeRows& rows) {
        alignas(64) uint16_t values[32];  // twice: the fifth bit belongs to the next code
        for (int i = 0; i < 32; ++i)
            values[i] = uint16_t(to_bits(rows.matrix->values[i % 16]) >> 16);
        const __m512i table = _mm512_load_si512(values), spread = groups_of(rows.shift);
        const int64_t blocks = rows.columns / 128;
        __m512 total[W][M] = {};
        for (int64_t block = 0; block < blocks; ++block)
            add_nibbles<W, M>(rows, block, 0xffff, table, spread, total);
        if (rows.columns % 128)
            add_nibbles<W, M>(rows, blocks, last_words(rows), table, spread, total);
        store_sums<W, M>(rows, total);
    }

    INLINE void put_number(int32_t code_type, int64_t column, float number, char* token) {
        if (code_type != E4M3_CODES)
            return Avx512Dots::put_number(code_type, column, number, token);
        const int64_t at = column % 64, place = column - at + at % 2 * 32 + at / 2;
        store_rounded(reinterpret_cast<uint16_t*>(token) + place, number);
    }

    // Values of codes of e4m3 in words, without their unit, as `halves`. `size` has the bits of a
    // code without its sign from bit 4 on, `code` from bit 0 on, `sign` has the sign in bit 15. The
    // bits of exponents are moved; subnormal codes, which the products would flush, are looked up.
    TARGET_BF16 INLINE __m512i bf16_of_e4m3(__m512i size, __m512i code, __m512i sign,
                                            __mmask32 subnormal, __m512i table) {
        const __m512i moved = _mm512_ternarylogic_epi32(size, _mm512_set1_epi16(0x07f0),
                                                        _mm512_set1_epi16(0x3800), 0xea);  // a&b|c
        const __m512i found = _mm512_mask_permutexvar_epi16(moved, subnormal, code, table);
        return _mm512_ternarylogic_epi32(sign, _mm512_set1_epi16(int16_t(0x8000)), found, 0xea);
    }

    // Adds the products of 64 codes of e4m3. 16 of them have one scale.
    template <int W, int M>
    TARGET_BF16 INLINE void add_e4m3(const CodeRows& rows, int64_t block, __mmask64 columns,
                                     __m512i table, __m512i spread, __m512 (&total)[W][M]) {
        const int64_t at = block * 64;
        rows.prefetch<W>(at);
        __m512i even[W], odd[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const __m512i codes =
                _mm512_maskz_loadu_epi8(columns, rows.codes + w * rows.code_stride + at);
            const __mmask32 first = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x0078));
            const __mmask32 second = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x7800));
            even[w] = bf16_of_e4m3(_mm512_slli_epi16(codes, 4), codes, _mm512_slli_epi16(codes, 8),
                                   first, table);
            odd[w] = bf16_of_e4m3(_mm512_srli_epi16(codes, 4), _mm512_srli_epi16(codes, 8), codes,
                                  second, table);
        }
        __m512 part[W][M] = {};
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const uint16_t* const token = reinterpret_cast<const uint16_t*>(rows.token(m)) + at;
            const __m512bh first = (__m512bh)_mm512_loadu_si512(token);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(token + 32);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                part[w][m] = _mm512_dpbf16_ps(part[w][m], (__m512bh)even[w], first);
                part[w][m] = _mm512_dpbf16_ps(part[w][m], (__m512bh)odd[w], second);
            }
        }
        add_block<W, M>(rows, block, at >> rows.shift, spread, part, total);
    }

    template <int W, int M, bool INTEGERS>
    TARGET_BF16 static void dot_bytes(const CodeRows& rows) {
        if constexpr (INTEGERS) return Avx512Dots::dot_bytes<W, M, true>(rows);
        alignas(64) uint16_t values[32] = {};
        for (int i = 0; i < 8; ++i) values[i] = uint16_t(to_bits(E4M3_VALUES.of[i] / 256) >> 16);
        const __m512i table = _mm512_load_si512(values);
        const __m512i spread = groups_of(rows.shift - 2);  // four codes are summed in a lane
        const int64_t blocks = rows.columns / 64, left = rows.columns % 64;
        __m512 total[W][M] = {};
        for (int64_t block = 0; block < blocks; ++block)
            add_e4m3<W, M>(rows, block, ~0ull, table, spread, total);
        if (left) add_e4m3<W, M>(rows, blocks, (1ull << left) - 1, table, spread, total);
        store_sums<W, M>(rows, total);
    }
};

#endif  // HAVE_BF16

#endif  // HAVE_X86

// The sums of `count` token rows, at most M.
template <int M, class Codes>
INLINE void dot_some(const CodeRows& rows, int64_t count) {
    if constexpr (M > 1) {
        if (count < M) return dot_some<M - 1, Codes>(rows, count);
    }
    constexpr int W = Codes::ROWS;
    const int32_t type = rows.matrix->code_type;
    if (type == NIBBLES) return Codes::template dot_nibbles<W, M>(rows);
    if (type == E4M3_CODES) return Codes::template dot_bytes<W, M, false>(rows);
    Codes::template dot_bytes<W, M, true>(rows);
}

}  // namespace
