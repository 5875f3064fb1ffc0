// Numbers in the order in which the tiles of AMX take them.
#pragma once

#include "cpu_numbers.h"

namespace {

#if HAVE_AMX

// 16 rows of 16 words of 4 bytes become columns.
TARGET_AMX INLINE void turn_words(__m512i (&row)[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            other[i + j] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0x88);
            other[i + j + 4] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; ++j) {
        row[j] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0x88);
        row[j + 8] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0xdd);
    }
}

// to[column][row] = from[row][column] for 16 times 16 floats.
TARGET_AMX void turn_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m512i row[16];
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512(from + i * from_stride);
    turn_words(row);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, row[i]);
}

// The first `count` of 32 bf16, then zeros.
TARGET_AMX INLINE __m512i load_bf16(const uint16_t* from, int64_t count) {
    if (count >= STEP) return _mm512_loadu_si512(from);
    const __mmask32 mask = count > 0 ? (__mmask32(1) << count) - 1 : 0;
    return _mm512_maskz_loadu_epi16(mask, from);
}

// Up to 16 rows of k bf16 as the tiles of a B, [k / 32][16 pairs][16 rows], zeros where none are.
TARGET_AMX void pack_tiles(const uint16_t* from, int64_t stride, int64_t rows, int64_t k,
                           char* to) {
    for (int64_t at = 0; at < k; at += STEP, to += TILE * LINE) {
        __m512i row[16];
        for (int64_t i = 0; i < 16; ++i)
            row[i] = i < rows ? load_bf16(from + i * stride + at, k - at) : _mm512_setzero_si512();
        turn_words(row);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * LINE, row[i]);
    }
}

// Two rows of 32 bf16, side by side: 2 times 16 pairs.
TARGET_AMX INLINE void interleave(__m512i even, __m512i odd, void* left, void* right) {
    const __m512i order = _mm512_set_epi16(                            //
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    _mm512_storeu_si512(left, _mm512_permutex2var_epi16(even, order, odd));
    _mm512_storeu_si512(right, _mm512_permutex2var_epi16(even, upper, odd));
}

// 32 rows of 32 bf16 as two tiles of a B, zeros where none are.
TARGET_AMX void interleave_step(const uint16_t* from, int64_t stride, int64_t rows, int64_t width,
                                char* to) {
    char* right = to + TILE * LINE;
    if (rows >= STEP && width >= STEP) {
        for (int64_t i = 0; i < STEP; i += 2)
            interleave(_mm512_loadu_si512(from + i * stride),
                       _mm512_loadu_si512(from + (i + 1) * stride), to + i / 2 * LINE,
                       right + i / 2 * LINE);
        return;
    }
    for (int64_t i = 0; i < STEP; i += 2)
        interleave(load_bf16(from + i * stride, i < rows ? width : 0),
                   load_bf16(from + (i + 1) * stride, i + 1 < rows ? width : 0), to + i / 2 * LINE,
                   right + i / 2 * LINE);
}

// Rows of k bf16 with each two side by side, [rows / 2][k] pairs, from row `first` up to `stop`;
// zeros where no rows are. `to_stride` counts pairs, and has room for k padded to 32.
TARGET_AMX void pack_pairs(const uint16_t* from, int64_t stride, int64_t rows, int64_t first,
                           int64_t stop, int64_t k, uint32_t* to, int64_t to_stride) {
    for (int64_t row = first; row < stop; row += 2) {
        uint32_t* pairs = to + row / 2 * to_stride;
        for (int64_t at = 0; at < k; at += STEP) {
            const __m512i even = load_bf16(from + row * stride + at, row < rows ? k - at : 0);
            const __m512i odd =
                load_bf16(from + (row + 1) * stride + at, row + 1 < rows ? k - at : 0);
            interleave(even, odd, pairs + at, pairs + at + TILE);
        }
    }
}

#endif  // HAVE_AMX

}  // namespace
