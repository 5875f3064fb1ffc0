// Codes of packed weights as numbers: tables, and loops that need intrinsics.
#pragma once

#include "cpu_math.h"

#if HAVE_X86
#include <immintrin.h>
#endif

namespace {

// 2**(code - 127)
INLINE float e8m0_value(uint8_t code) {
    return from_bits(code ? uint32_t(code) << 23 : 1u << 22);  // the first one is subnormal
}

// Finite numbers of IEEE half precision.
INLINE float half_value(uint16_t bits) {
    const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent ? from_bits((exponent + 112) << 23 | mantissa << 13)
                                : float(mantissa) * 5.9604645e-8f;  // 2**-24
    return bits >> 15 ? -size : size;
}

struct E4m3Values {
    float of[256];

    E4m3Values() {
        for (uint32_t code = 0; code < 256; ++code) {
            const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
            const float size = exponent ? from_bits((exponent + 120) << 23 | mantissa << 20)
                                        : float(mantissa) / 512;
            of[code] = code >> 7 ? -size : size;
        }
    }
};
const E4m3Values E4M3_VALUES;

template <class N>
INLINE N number_at(const char* from, int64_t index) {
    N value;
    std::memcpy(&value, from + index * int64_t(sizeof(N)), sizeof value);
    return value;
}

// An element of an array of scales, factors or zero points.
INLINE float number(int32_t type, const char* from, int64_t index) {
    switch (type) {
        case E8M0: return e8m0_value(number_at<uint8_t>(from, index));
        case E4M3: return E4M3_VALUES.of[number_at<uint8_t>(from, index)];
        case BF16: return from_bits(uint32_t(number_at<uint16_t>(from, index)) << 16);
        case F16: return half_value(number_at<uint16_t>(from, index));
        case I8: return number_at<int8_t>(from, index);
        case I16: return number_at<int16_t>(from, index);
    }
    return number_at<float>(from, index);
}

struct GenericCodes {

    // to[i] = tables[i / group][code i], of which bf16 gets the upper half of the bits.
    template <class T>
    static void look_up(const uint8_t* codes, const float* tables, int64_t group, int64_t count,
                        T* to) {
        for (int64_t i = 0; i < count; ++i)
            store_rounded(to + i, tables[i / group * 16 + (codes[i / 2] >> i % 2 * 4 & 15)]);
    }

    static void decode_e4m3(const uint8_t* codes, int64_t count, float* to) {
        for (int64_t i = 0; i < count; ++i) to[i] = E4M3_VALUES.of[codes[i]];
    }

    static void decode_halves(const uint8_t* from, int64_t count, float* to) {
        const char* bytes = reinterpret_cast<const char*>(from);
        for (int64_t i = 0; i < count; ++i) to[i] = half_value(number_at<uint16_t>(bytes, i));
    }
};

#if HAVE_X86

struct Avx2Codes {
    // Eight codes in the lowest bits of eight words.
    TARGET_AVX2 INLINE __m256i spread(const uint8_t* codes) {
        int32_t eight;
        std::memcpy(&eight, codes, 4);
        return _mm256_srlv_epi32(_mm256_set1_epi32(eight),
                                 _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    }

    struct Table {
        __m256 low, high;
        TARGET_AVX2 INLINE Table load(const float* from) {
            return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
        }
    };

    TARGET_AVX2 INLINE __m256 find(const Table& table, const uint8_t* codes) {
        const __m256i index = spread(codes);
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                                _mm256_permutevar8x32_ps(table.high, index),
                                _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    }

    TARGET_AVX2 INLINE void look_up_some(const uint8_t* codes, const float* table, int64_t count,
                                         float* to) {
        const Table entries = Table::load(table);
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, find(entries, codes + i / 2));
        for (; i < count; ++i) to[i] = table[codes[i / 2] >> i % 2 * 4 & 15];
    }

    TARGET_AVX2 INLINE void look_up_some(const uint8_t* codes, const float* table, int64_t count,
                                         uint16_t* to) {
        const Table entries = Table::load(table);
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) {
            const __m256i first = _mm256_castps_si256(find(entries, codes + i / 2));
            const __m256i second = _mm256_castps_si256(find(entries, codes + i / 2 + 4));
            const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(first, 16),
                                                     _mm256_srli_epi32(second, 16));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                                _mm256_permute4x64_epi64(both, 0xd8));
        }
        for (; i < count; ++i) store_rounded(to + i, table[codes[i / 2] >> i % 2 * 4 & 15]);
    }

    // The group is even, or there is one.
    template <class T>
    TARGET_AVX2 static void look_up(const uint8_t* codes, const float* tables, int64_t group,
                                    int64_t count, T* to) {
        for (int64_t at = 0; at < count; at += group, tables += 16)
            look_up_some(codes + at / 2, tables, least(group, count - at), to + at);
    }

    // 16 codes of e4m3 as IEEE half precision: the value times 2**-8.
    TARGET_AVX2 INLINE __m256i halves(const uint8_t* codes) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        return _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)));
    }

    TARGET_AVX2 static void decode_e4m3(const uint8_t* codes, int64_t count, float* to) {
        const __m256 unit = _mm256_set1_ps(256.0f);
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) {
            const __m256i half = halves(codes + i);
            const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
            _mm256_storeu_ps(to + i, _mm256_mul_ps(low, unit));
            _mm256_storeu_ps(to + i + 8, _mm256_mul_ps(high, unit));
        }
        GenericCodes::decode_e4m3(codes + i, count - i, to + i);
    }

    TARGET_AVX2 static void decode_halves(const uint8_t* from, int64_t count, float* to) {
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) {
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
        }
        GenericCodes::decode_halves(from + 2 * i, count - i, to + i);
    }
};

struct Avx512Codes {
    static void decode_halves(const uint8_t* from, int64_t count, float* to) {
        Avx2Codes::decode_halves(from, count, to);
    }

    TARGET_AVX512 INLINE __m512 find(__m512 table, const uint8_t* codes) {
        const __m512i words = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8,
                                                4, 0);
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        const __m512i pair = _mm512_permutexvar_epi32(words, _mm512_castsi128_si512(bytes));
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(pair, shifts), table);
    }

    TARGET_AVX512 INLINE void put(__m512 values, float* to) { _mm512_storeu_ps(to, values); }
    TARGET_AVX512 INLINE void put(__m512 values, uint16_t* to) {
        const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(values), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(upper));
    }

    // The group is even, or there is one.
    template <class T>
    TARGET_AVX512 static void look_up(const uint8_t* codes, const float* tables, int64_t group,
                                      int64_t count, T* to) {
        for (int64_t at = 0; at < count; at += group, tables += 16) {
            const __m512 entries = _mm512_loadu_ps(tables);
            const int64_t end = least(at + group, count);
            int64_t i = at;
            for (; i + 16 <= end; i += 16) put(find(entries, codes + i / 2), to + i);
            for (; i < end; ++i) store_rounded(to + i, tables[codes[i / 2] >> i % 2 * 4 & 15]);
        }
    }

    TARGET_AVX512 static void decode_e4m3(const uint8_t* codes, int64_t count, float* to) {
        const __m512 unit = _mm512_set1_ps(256.0f);
        int64_t i = 0;
        for (; i + 16 <= count; i += 16)
            _mm512_storeu_ps(to + i,
                             _mm512_mul_ps(_mm512_cvtph_ps(Avx2Codes::halves(codes + i)), unit));
        GenericCodes::decode_e4m3(codes + i, count - i, to + i);
    }
};

// to[column][row] = from[row][column] of 8 x 8 or 4 x 4 numbers in vectors of 16 bytes.
inline void transpose_block(const uint16_t* from, int64_t from_stride, uint16_t* to,
                            int64_t to_stride) {
    __m128i row[8], other[8];
    for (int i = 0; i < 8; ++i)
        row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
    for (int i = 0; i < 8; i += 2) {
        other[i] = _mm_unpacklo_epi16(row[i], row[i + 1]);
        other[i + 1] = _mm_unpackhi_epi16(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            row[i + 2 * j] = _mm_unpacklo_epi32(other[i + j], other[i + j + 2]);
            row[i + 2 * j + 1] = _mm_unpackhi_epi32(other[i + j], other[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m128i first = _mm_unpacklo_epi64(row[j], row[j + 4]);
        const __m128i second = _mm_unpackhi_epi64(row[j], row[j + 4]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * j * to_stride), first);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (2 * j + 1) * to_stride), second);
    }
}

inline void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m128 row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm_loadu_ps(from + i * from_stride);
    _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * to_stride, row[i]);
}

#endif  // HAVE_X86

// The loops that compilers vectorize themselves.

// Numbers of a type as float32.
template <int32_t TYPE>
INLINE void read_type(const char* from, int64_t first, int64_t count, float* __restrict to) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = number(TYPE, from, first + i);
}

INLINE void read_numbers_body(int32_t type, const char* from, int64_t first, int64_t count,
                              float* to) {
    switch (type) {
        case E8M0: return read_type<E8M0>(from, first, count, to);
        case E4M3: return read_type<E4M3>(from, first, count, to);
        case BF16: return read_type<BF16>(from, first, count, to);
        case F16: return read_type<F16>(from, first, count, to);
        case F32: return read_type<F32>(from, first, count, to);
        case I8: return read_type<I8>(from, first, count, to);
        case I16: return read_type<I16>(from, first, count, to);
    }
}

// tables[i][code] = (values[code] - zeros[i]) * scales[i], rounded to T.
template <class T>
INLINE void scale_tables_body(const float* __restrict values, const float* zeros,
                              const float* scales, int64_t groups, float* __restrict tables, T*) {
    for (int64_t i = 0; i < groups; ++i) {
        const float zero = zeros[i], scale = scales[i];
#pragma omp simd
        for (int j = 0; j < 16; ++j) tables[16 * i + j] = rounded<T>((values[j] - zero) * scale);
    }
}

// to = (values - zero) * scale of each group.
template <class T>
INLINE void scale_groups_body(const float* __restrict values, const float* zeros,
                              const float* scales, int64_t group, int64_t count,
                              T* __restrict to) {
    for (int64_t i = 0, at = 0; at < count; ++i, at += group) {
        const float zero = zeros[i], scale = scales[i];
        const int64_t end = least(at + group, count);
#pragma omp simd
        for (int64_t j = at; j < end; ++j) store(to + j, (values[j] - zero) * scale);
    }
}

// Integers of eight bits; those without a sign have 128 added.
INLINE void read_integers_body(const uint8_t* __restrict codes, int64_t count, bool without_sign,
                               float* __restrict to) {
    const uint8_t turn = without_sign ? 128 : 0;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = float(int8_t(codes[i] ^ turn));
}

}  // namespace
