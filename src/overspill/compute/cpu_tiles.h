// Products by the tiles of AMX.
#pragma once

#include "cpu_packing.h"
#include "cpu_vectors.h"

namespace {

// A tile instruction multiplies A, 16 rows of 32 bf16, with B, 16 rows of 16 pairs of bf16: B holds
// two neighbours along the sum side by side. In nt rows of weights are an A just as they lie, and
// tokens are packed to B; so C is [weights, tokens], from which the next B is made without
// shuffles. In nn tokens are A, and rows of weights become B by interleaving two of them.

#if HAVE_AMX

using Wide = Avx512<uint16_t>;

// All eight tiles in full size. A constant: some compilers think that its loading reads the first
// eight bytes only, and would leave the rest of a local variable unwritten.
alignas(64) constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} TILE_CONFIG;

TARGET_AMX void enter_tiles() { _tile_loadconfig(&TILE_CONFIG); }

TARGET_AMX void leave_tiles() { _tile_release(); }

// One side of a product: two tiles (or one), and how to get to the next along the sum.
struct Tiles {
    const void *first, *second;
    int64_t stride, second_stride, step;
};

// The sums: those of the first and of the second tile of `a`, two neighbouring tiles each.
struct Sums {
    float *c, *below;
    int64_t stride;
};

// What each step of a product fetches: some lines of other weights, and its own `a` so many lines
// ahead.
struct Fetch {
    Ahead* other = nullptr;
    int64_t lines = 0, near = 0;
};

// sums[2 tiles][2 tiles] (+)= a b over `steps` tiles along the sum.
template <bool TWO_A, bool TWO_B>
TARGET_AMX void multiply_tiles(const Tiles& a, const Tiles& b, int64_t steps, const Sums& sums,
                               bool add, const Fetch& fetch) {
    float *c = sums.c, *below = sums.below;
    const int64_t c_bytes = sums.stride * 4;
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if (TWO_B) _tile_loadd(1, c + TILE, c_bytes);
        if (TWO_A) _tile_loadd(2, below, c_bytes);
        if (TWO_A && TWO_B) _tile_loadd(3, below + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *a0 = static_cast<const char*>(a.first), *a1 = static_cast<const char*>(a.second);
    const char *b0 = static_cast<const char*>(b.first), *b1 = static_cast<const char*>(b.second);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, b0 + step * b.step, b.stride);
        _tile_loadd(4, a0 + step * a.step, a.stride);
        if (fetch.lines > 0) fetch.other->fetch(fetch.lines);
        if (fetch.near > 0)
            for (int64_t row = 0; row < TILE; ++row)
                __builtin_prefetch(a0 + step * a.step + row * a.stride + fetch.near * LINE, 0, 3);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_B) {
            _tile_loadd(7, b1 + step * b.step, b.second_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TWO_A) {
            _tile_loadd(5, a1 + step * a.step, a.second_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_B) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if (TWO_B) _tile_stored(1, c + TILE, c_bytes);
    if (TWO_A) _tile_stored(2, below, c_bytes);
    if (TWO_A && TWO_B) _tile_stored(3, below + TILE, c_bytes);
}

void multiply(const Tiles& a, const Tiles& b, int64_t steps, const Sums& sums, bool add,
              const Fetch& fetch = {}) {
    if (a.second && b.second)
        multiply_tiles<true, true>(a, b, steps, sums, add, fetch);
    else if (a.second)
        multiply_tiles<true, false>(a, b, steps, sums, add, fetch);
    else if (b.second)
        multiply_tiles<false, true>(a, b, steps, sums, add, fetch);
    else
        multiply_tiles<false, false>(a, b, steps, sums, add, fetch);
}

// A tile's 16 rows of weights, of which `rows` are there, as an A. They are `apart` rows from each
// other: so each goes on in the next panel, and all panels are 16 long streams, which the CPU's
// prefetchers follow over the borders of rows and pages. Where a tile would reach beyond the matrix
// it is copied to `room` and filled up with zeros.
struct Panel {
    const char *base, *tail;
    int64_t stride, tail_stride;
    int64_t row, apart;  // in c

    static int64_t room_bytes(int64_t k) { return TILE * padded(k, STEP) * 2; }

    // `count` panels of `rows` rows, whose sums begin at row `first` of c.
    static void cut(const uint16_t* weights, int64_t rows, int64_t k, int64_t first, int64_t count,
                    char* room, Panel* to) {
        for (int64_t i = 0; i < count; ++i, room += room_bytes(k)) {
            to[i] = of(weights + i * k, pieces(most(0, rows - i), count), k, count, room);
            to[i].row = first + i;
            to[i].apart = count;
        }
    }

  private:
    static Panel of(const uint16_t* weights, int64_t rows, int64_t k, int64_t apart, char* room) {
        const char* base = reinterpret_cast<const char*>(weights);
        const int64_t whole = k / STEP * STEP, stride = apart * k;
        if (rows >= TILE && whole == k) return {base, nullptr, stride * 2, 0, 0, 0};
        if (rows >= TILE) {
            std::memset(room, 0, TILE * LINE);
            for (int64_t row = 0; row < TILE; ++row)
                std::memcpy(room + row * LINE, weights + row * stride + whole, (k - whole) * 2);
            return {base, room, stride * 2, LINE, 0, 0};
        }
        const int64_t wide = padded(k, STEP) * 2;
        std::memset(room, 0, TILE * wide);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(room + row * wide, weights + row * stride, k * 2);
        return {room, room + whole * 2, wide, wide, 0, 0};
    }
};

constexpr int64_t MAX_PANELS = BLOCK / TILE;

// c[rows of all panels][tokens, padded] = panels times packed tokens. With few tokens the panels are
// fetched a little ahead, 16 streams at a time; with more the memory would idle while they compute,
// so `ahead` is fetched, by all groups together as much as one reading of the panels takes.
void nt_tiles(const Panel* panels, int64_t count, int64_t k, const char* tokens, int64_t groups,
              float* c, int64_t c_stride, Ahead& ahead) {
    const int64_t steps = k / STEP, group_bytes = pieces(k, STEP) * TILE * LINE;
    // Two groups keep their sums in the tiles. With more, the sum is cut so that the tokens of a
    // chunk stay in the second cache while the panels pass.
    const int64_t fitting = most(16, CACHED_TOKENS / (groups * TILE * LINE));
    const bool many = groups > 2;
    const int64_t chunk = many ? fitting : most(steps, 1), together = many ? 2 : 1;
    auto pass = [&](int64_t step, int64_t deep, bool tail, bool add) {
        for (int64_t panel = 0; panel < count; panel += together) {
            const Panel& one = panels[panel];
            const bool two = panel + 1 < least(count, panel + together);
            const Panel& other = two ? panels[panel + 1] : one;
            const int64_t at = step * LINE;
            const Tiles a = tail ? Tiles{one.tail, two ? other.tail : nullptr, one.tail_stride,
                                         other.tail_stride, 0}
                                 : Tiles{one.base + at, two ? other.base + at : nullptr,
                                         one.stride, other.stride, LINE};
            Fetch fetch{&ahead, 0, IN_FLIGHT / TILE};
            if (many) fetch = {&ahead, pieces((two ? 2 : 1) * TILE, pieces(groups, 2)), 0};
            for (int64_t group = 0; group < groups; group += 2) {
                const char* left = tokens + group * group_bytes + step * TILE * LINE;
                const char* right = group + 1 < groups ? left + group_bytes : nullptr;
                float* sums = c + group * TILE;
                multiply(a, {left, right, LINE, LINE, TILE * LINE}, deep,
                         {sums + one.row * c_stride, sums + other.row * c_stride,
                          one.apart * c_stride},
                         add, fetch);
            }
        }
    };
    for (int64_t step = 0; step < steps; step += chunk)
        pass(step, least(chunk, steps - step), false, step > 0);
    if (k % STEP) pass(steps, 1, true, steps > 0);
}

// c[tokens][columns] (+)= a [tokens, depth], padded, times rows of weights, of which up to BLOCK
// columns of a chunk are interleaved in `room` at a time. Meanwhile `then` is fetched, `lines`
// lines for 32 of them.
TARGET_AMX void nn_tiles(const uint16_t* a, int64_t a_stride, int64_t tiles, const uint16_t* b,
                         int64_t b_stride, int64_t depth, int64_t columns, float* c,
                         int64_t c_stride, bool add, char* room, Ahead* then = nullptr,
                         int64_t lines = 0) {
    constexpr int64_t STRIP = CHUNK * LINE;  // bytes of 32 columns
    for (int64_t q = 0; q < depth; q += CHUNK) {
        const int64_t deep = least(CHUNK, depth - q), steps = pieces(deep, STEP);
        for (int64_t first = 0; first < columns; first += BLOCK) {
            const int64_t width = least(BLOCK, columns - first);
            for (int64_t step = 0; step < steps; ++step) {
                const uint16_t* rows = b + (q + step * STEP) * b_stride + first;
                char* to = room + step * 2 * TILE * LINE;
                for (int64_t n = 0; n < width; n += STEP, to += STRIP) {
                    if (then) then->fetch(lines);
                    interleave_step(rows + n, b_stride, deep - step * STEP, width - n, to);
                }
            }
            for (int64_t n = 0; n < width; n += STEP) {
                const char* strip = room + n / STEP * STRIP;
                for (int64_t tile = 0; tile < tiles; tile += 2) {
                    const uint16_t* here = a + tile * TILE * a_stride + q;
                    const uint16_t* below = tile + 1 < tiles ? here + TILE * a_stride : nullptr;
                    float* sums = c + tile * TILE * c_stride + first + n;
                    multiply({here, below, a_stride * 2, a_stride * 2, LINE},
                             {strip, strip + TILE * LINE, LINE, LINE, 2 * TILE * LINE}, steps,
                             {sums, sums + TILE * c_stride, c_stride}, add || q > 0);
                }
            }
        }
    }
}

constexpr int64_t ROOM_NN = CHUNK * BLOCK * 2;

// As `put`, for gradients: nobody reads them soon, so whole lines go past the caches, which saves
// the reading of what they overwrite.
TARGET_AMX double put_gradient(const float* from, int64_t from_stride, int64_t rows,
                               int64_t columns, uint16_t* to, int64_t to_stride) {
    if (columns % STEP) return Wide::put(from, from_stride, rows, columns, to, to_stride);
    const bool whole_lines = to_stride % STEP == 0 && reinterpret_cast<uintptr_t>(to) % LINE == 0;
    const __m512i upper_halves = _mm512_set_epi16(                       //
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
        31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < columns; i += STEP) {
            __m512i bits[2];
            for (int half = 0; half < 2; ++half) {
                const __m512 value = _mm512_loadu_ps(from + row * from_stride + i + half * TILE);
                const __m512i raw = _mm512_castps_si512(value);
                const __m512i odd =
                    _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
                const __m512i nearest = _mm512_and_si512(
                    _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32(0x7fff)), odd),
                    _mm512_set1_epi32(int(0xffff0000u)));
                bits[half] =
                    _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                          _mm512_set1_epi32(0x7fc00000));
                const __m512 stored = _mm512_castsi512_ps(bits[half]);
                squares[half] = _mm512_fmadd_ps(stored, stored, squares[half]);
            }
            const __m512i line = _mm512_permutex2var_epi16(bits[0], upper_halves, bits[1]);
            __m512i* there = reinterpret_cast<__m512i*>(to + row * to_stride + i);
            if (whole_lines)
                _mm512_stream_si512(there, line);
            else
                _mm512_storeu_si512(there, line);
        }
    }
    return double(_mm512_reduce_add_ps(squares[0])) + double(_mm512_reduce_add_ps(squares[1]));
}

// The gradient [rows, columns] of weights, from a^T [rows, tokens] and pairs of tokens; `tokens` is
// padded to 32. Returns its sum of squares.
TARGET_AMX double tn_tiles(const uint16_t* a, const uint32_t* pairs, int64_t pairs_stride,
                           int64_t tokens, int64_t rows, int64_t columns, uint16_t* to,
                           int64_t to_stride) {
    alignas(64) float c[2 * TILE * BLOCK];
    double squares = 0.0;
    for (int64_t row = 0; row < rows; row += 2 * TILE) {
        const uint16_t* here = a + row * tokens;
        for (int64_t column = 0; column < columns; column += BLOCK) {
            const int64_t width = least(BLOCK, columns - column);
            for (int64_t i = 0; i < width; i += 2 * TILE) {
                const uint32_t* left = pairs + column + i;
                multiply({here, here + TILE * tokens, tokens * 2, tokens * 2, LINE},
                         {left, left + TILE, pairs_stride * 4, pairs_stride * 4,
                          TILE * pairs_stride * 4},
                         tokens / STEP, {c + i, c + i + TILE * BLOCK, BLOCK}, false);
            }
            squares += put_gradient(c, BLOCK, least(2 * TILE, rows - row), width,
                                    to + row * to_stride + column, to_stride);
        }
    }
    _mm_sfence();  // whoever learns that this task is done sees its lines
    return squares;
}

// Whether the CPU has the tiles, and Linux lets this process use them.
bool may_use_tiles() {
    constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & BF16_BIT) == 0 || (d & TILE_BIT) == 0) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#endif  // HAVE_AMX

}  // namespace
