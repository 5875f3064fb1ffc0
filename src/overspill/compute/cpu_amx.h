// Matrix products with AMX tiles.
//
// A tile instruction multiplies A, 16 rows of 32 bf16 values, with B, 16 rows of 16 pairs of bf16;
// a pair holds two neighbors along the sum. In nt, weight rows are A without packing and tokens are
// packed into B; C is [weights, tokens], from which the next B is made without shuffles. In nn,
// tokens are A, and pairs of weight rows are interleaved into B. All sizes but the number of tokens
// are multiples of 32; experts of other sizes are computed with vectors.
#pragma once

#include "cpu_group.h"

#if HAVE_X86 && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_AMX 1
#define TARGET_AMX __attribute__((target(AVX512_FEATURES ",amx-tile,amx-bf16" WIDE_VECTORS)))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if HAVE_AMX

// Transposes 16 rows of 16 words of 4 bytes.
TARGET_AMX INLINE void transpose_words(__m512i (&row)[16]) {
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

// to[column][row] = from[row][column] for 16 x 16 floats.
TARGET_AMX void transpose_tile(const float* from, int64_t from_stride, float* to,
                               int64_t to_stride) {
    __m512i row[16];
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose_words(row);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, row[i]);
}

// Packs up to 16 rows of k values into B tiles, [k / 32][16 pairs][16 rows], padded with zeros.
TARGET_AMX void pack_tiles(const uint16_t* from, int64_t stride, int64_t rows, int64_t k,
                           char* to) {
    for (int64_t at = 0; at < k; at += STEP, to += TILE * LINE) {
        __m512i row[16];
        for (int64_t i = 0; i < 16; ++i)
            row[i] = i < rows ? _mm512_loadu_si512(from + i * stride + at) : _mm512_setzero_si512();
        transpose_words(row);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * LINE, row[i]);
    }
}

// Packs 32 rows of 32 values into two B tiles: interleaves two rows into 2 x 16 pairs.
TARGET_AMX void interleave_step(const uint16_t* from, int64_t stride, char* to) {
    const __m512i left = _mm512_set_epi16(                             //
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < TILE; ++i) {
        const __m512i even = _mm512_loadu_si512(from + 2 * i * stride);
        const __m512i odd = _mm512_loadu_si512(from + (2 * i + 1) * stride);
        _mm512_storeu_si512(to + i * LINE, _mm512_permutex2var_epi16(even, left, odd));
        _mm512_storeu_si512(to + (TILE + i) * LINE, _mm512_permutex2var_epi16(even, right, odd));
    }
}

constexpr int64_t CACHED_TOKENS = 512 << 10;  // bytes of packed tokens that stay in the L2 cache

// All eight tiles in full size. A constant, because some compilers assume that loading it reads
// eight bytes only and leave the rest of a local variable unwritten.
alignas(64) constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} TILE_CONFIG;

// While it exists, this thread can use tiles.
class TileScope {
  public:
    TARGET_AMX TileScope() { _tile_loadconfig(&TILE_CONFIG); }
    TARGET_AMX ~TileScope() { _tile_release(); }
};

// One operand of a product: two tiles (or one), and the bytes to the next ones along the sum.
struct Tiles {
    const void *first, *second;
    int64_t stride, step;
};

// Prefetches of each step of a product: `lines` lines of other weights, and `a` at a distance of
// `near` lines.
struct StepPrefetch {
    Prefetch* other = nullptr;
    int64_t lines = 0, near = 0;
};

// c (+)= a b, over `steps` tiles along the sum. The sums of the first tile of `a` are at `c`, those
// of the second one at `below`: two neighboring tiles each.
TARGET_AMX void multiply(const Tiles& a, const Tiles& b, int64_t steps, float* c, float* below,
                         int64_t c_stride, bool add, const StepPrefetch& prefetch = {}) {
    const bool two_a = a.second, two_b = b.second;
    const int64_t c_bytes = c_stride * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if (two_b) _tile_loadd(1, c + TILE, c_bytes);
        if (two_a) _tile_loadd(2, below, c_bytes);
        if (two_a && two_b) _tile_loadd(3, below + TILE, c_bytes);
    }
    const char *a0 = static_cast<const char*>(a.first), *a1 = static_cast<const char*>(a.second);
    const char *b0 = static_cast<const char*>(b.first), *b1 = static_cast<const char*>(b.second);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, b0 + step * b.step, b.stride);
        _tile_loadd(4, a0 + step * a.step, a.stride);
        if (prefetch.lines > 0) prefetch.other->fetch(prefetch.lines);
        const char* ahead = a0 + step * a.step + prefetch.near * LINE;
        if (prefetch.near > 0)
            for (int64_t row = 0; row < TILE; ++row)
                __builtin_prefetch(ahead + row * a.stride, 0, 3);
        _tile_dpbf16ps(0, 4, 6);
        if (two_b) {
            _tile_loadd(7, b1 + step * b.step, b.stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_a) {
            _tile_loadd(5, a1 + step * a.step, a.stride);
            _tile_dpbf16ps(2, 5, 6);
            if (two_b) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if (two_b) _tile_stored(1, c + TILE, c_bytes);
    if (two_a) _tile_stored(2, below, c_bytes);
    if (two_a && two_b) _tile_stored(3, below + TILE, c_bytes);
}

// c[rows][tokens] = weights [rows, k] times packed tokens, in `groups` groups of 16. A panel is 16
// weight rows, `panels` rows from each other, so that each continues in the next panel: 16
// long streams, which the hardware prefetchers follow across rows and pages. With few tokens the
// panels are prefetched a short distance ahead. With more the memory would be idle during the
// arithmetic, so `next` is prefetched, as many lines as the weights have.
void nt_tiles(const uint16_t* weights, int64_t rows, int64_t k, const char* tokens, int64_t groups,
              float* c, int64_t c_stride, Prefetch& next) {
    const int64_t panels = rows / TILE, steps = k / STEP, group_bytes = steps * TILE * LINE;
    // The sums of two groups stay in the tiles. With more groups, the sum is divided so that the
    // tokens of a chunk stay in the L2 cache for all panels.
    const bool many = groups > 2;
    const int64_t chunk = many ? most(16, CACHED_TOKENS / (groups * TILE * LINE)) : steps;
    for (int64_t step = 0; step < steps; step += chunk) {
        for (int64_t panel = 0; panel < panels; panel += many ? 2 : 1) {
            const bool two = many && panel + 1 < panels;
            const uint16_t* here = weights + panel * k + step * STEP;
            const Tiles a{here, two ? here + k : nullptr, panels * k * 2, LINE};
            StepPrefetch prefetch{&next, 0, IN_FLIGHT / TILE};
            if (many) prefetch = {&next, pieces((two ? 2 : 1) * TILE, pieces(groups, 2)), 0};
            for (int64_t group = 0; group < groups; group += 2) {
                const char* left = tokens + group * group_bytes + step * TILE * LINE;
                const char* right = group + 1 < groups ? left + group_bytes : nullptr;
                float* sums = c + panel * c_stride + group * TILE;
                multiply(a, {left, right, LINE, TILE * LINE}, least(chunk, steps - step),
                         sums, sums + c_stride, panels * c_stride, step > 0, prefetch);
            }
        }
    }
}

constexpr int64_t NN_ROOM_BYTES = CHUNK * BLOCK * 2;

// c[tokens][columns] (+)= a [tokens, depth] times weight rows. Up to BLOCK columns of a chunk are
// interleaved in `room` at a time; meanwhile `next` is prefetched if it is not null, `lines` lines
// for each 32 x 32 weights.
TARGET_AMX void nn_tiles(const uint16_t* a, int64_t a_stride, int64_t tiles, const uint16_t* b,
                         int64_t b_stride, int64_t depth, int64_t columns, float* c,
                         int64_t c_stride, bool add, char* room, Prefetch* next, int64_t lines) {
    constexpr int64_t STRIP = CHUNK * LINE;  // bytes of 32 columns
    for (int64_t q = 0; q < depth; q += CHUNK) {
        const int64_t steps = least(CHUNK, depth - q) / STEP;
        for (int64_t first = 0; first < columns; first += BLOCK) {
            const int64_t width = least(BLOCK, columns - first);
            for (int64_t step = 0; step < steps; ++step) {
                const uint16_t* rows = b + (q + step * STEP) * b_stride + first;
                char* to = room + step * 2 * TILE * LINE;
                for (int64_t n = 0; n < width; n += STEP, to += STRIP) {
                    if (next) next->fetch(lines);
                    interleave_step(rows + n, b_stride, to);
                }
            }
            for (int64_t n = 0; n < width; n += STEP) {
                const char* strip = room + n / STEP * STRIP;
                for (int64_t tile = 0; tile < tiles; tile += 2) {
                    const uint16_t* here = a + tile * TILE * a_stride + q;
                    const uint16_t* below = tile + 1 < tiles ? here + TILE * a_stride : nullptr;
                    float* sums = c + tile * TILE * c_stride + first + n;
                    multiply({here, below, a_stride * 2, LINE},
                             {strip, strip + TILE * LINE, LINE, 2 * TILE * LINE}, steps,
                             sums, sums + TILE * c_stride, c_stride, add || q > 0);
                }
            }
        }
    }
}

// Whether the CPU has AMX tiles and Linux permits their use.
bool has_tiles() {
    constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & BF16_BIT) == 0 || (d & TILE_BIT) == 0) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#endif  // HAVE_AMX

}  // namespace
