// Products and tasks by the tiles of AMX.
#pragma once

#include "cpu_vectors.h"

namespace {

// A tile instruction multiplies A, 16 rows of 32 bf16, with B, 16 rows of 16 pairs of bf16: B holds
// two neighbours along the sum side by side. In nt rows of weights are an A just as they lie, and
// tokens are packed to B; so C is [weights, tokens], from which the next B is made without
// shuffles. In nn tokens are A, and rows of weights become B by interleaving two of them.

#if HAVE_AMX

using Wide = Avx512<uint16_t>;
using AmxArrays = BlockArrays<uint16_t, Wide>;

// All eight tiles in full size. A constant: some compilers think that its loading reads the first
// eight bytes only, and would leave the rest of a local variable unwritten.
alignas(64) constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} TILE_CONFIG;

TARGET_AMX void enter_tiles() { _tile_loadconfig(&TILE_CONFIG); }

TARGET_AMX void leave_tiles() { _tile_release(); }

// One side of a product: two neighbouring tiles (or one), and how to get to the next along the sum.
struct Tiles {
    const void *first, *second;
    int64_t stride, second_stride, step;
};

// c[2 tiles][2 tiles] (+)= a b over `steps` tiles along the sum; each step fetches `lines` lines.
template <bool TWO_A, bool TWO_B>
TARGET_AMX void multiply_tiles(const Tiles& a, const Tiles& b, int64_t steps, float* c,
                               int64_t c_stride, bool add, Ahead* ahead, int64_t lines) {
    float* below = c + TILE * c_stride;
    const int64_t c_bytes = c_stride * 4;
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
        if (lines > 0) ahead->fetch(lines);
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

void multiply(const Tiles& a, const Tiles& b, int64_t steps, float* c, int64_t c_stride, bool add,
              Ahead* ahead = nullptr, int64_t lines = 0) {
    if (a.second && b.second)
        multiply_tiles<true, true>(a, b, steps, c, c_stride, add, ahead, lines);
    else if (a.second)
        multiply_tiles<true, false>(a, b, steps, c, c_stride, add, ahead, lines);
    else if (b.second)
        multiply_tiles<false, true>(a, b, steps, c, c_stride, add, ahead, lines);
    else
        multiply_tiles<false, false>(a, b, steps, c, c_stride, add, ahead, lines);
}

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

// A tile's 16 rows of weights, of which `rows` are there, as an A. Where a tile would reach beyond
// the matrix it is copied to `room` and filled up with zeros.
struct Panel {
    const char *base, *tail;
    int64_t stride, tail_stride;

    static int64_t room_bytes(int64_t k) { return TILE * padded(k, STEP) * 2; }

    static Panel of(const uint16_t* weights, int64_t rows, int64_t k, char* room) {
        const char* base = reinterpret_cast<const char*>(weights);
        const int64_t whole = k / STEP * STEP;
        if (rows >= TILE && whole == k) return {base, nullptr, k * 2, 0};
        if (rows >= TILE) {
            std::memset(room, 0, TILE * LINE);
            for (int64_t row = 0; row < TILE; ++row)
                std::memcpy(room + row * LINE, weights + row * k + whole, (k - whole) * 2);
            return {base, room, k * 2, LINE};
        }
        const int64_t stride = padded(k, STEP) * 2;
        std::memset(room, 0, TILE * stride);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(room + row * stride, weights + row * k, k * 2);
        return {room, room + whole * 2, stride, stride};
    }

    // Neighbouring panels, as many as `rows` rows fill.
    static int64_t cut(const uint16_t* weights, int64_t rows, int64_t k, char* room, Panel* to) {
        const int64_t count = pieces(rows, TILE);
        for (int64_t i = 0; i < count; ++i)
            to[i] = of(weights + i * TILE * k, rows - i * TILE, k, room + i * room_bytes(k));
        return count;
    }
};

constexpr int64_t MAX_PANELS = BLOCK / TILE;

// c[rows of all panels][tokens, padded] = panels times packed tokens. With few tokens the CPU's own
// prefetchers do best; with more the memory would idle while they compute, so `ahead` is fetched,
// by all groups together as much as one reading of the panels takes.
void nt_tiles(const Panel* panels, int64_t count, int64_t k, const char* tokens, int64_t groups,
              float* c, int64_t c_stride, Ahead& ahead) {
    const int64_t steps = k / STEP, group_bytes = pieces(k, STEP) * TILE * LINE;
    // Two groups keep their sums in the tiles. With more, the sum is cut so that the tokens of a
    // chunk stay in the second cache while the panels pass.
    const int64_t fitting = most(16, CACHED_TOKENS / (groups * TILE * LINE));
    const bool many = groups > 2;
    const int64_t chunk = many ? fitting : most(steps, 1);
    auto pass = [&](int64_t step, int64_t deep, bool tail, bool add) {
        for (int64_t panel = 0; panel < count; panel += 2) {
            const Panel& one = panels[panel];
            const Panel* other = panel + 1 < count ? &panels[panel + 1] : nullptr;
            const int64_t at = step * LINE;
            const Tiles a = tail ? Tiles{one.tail, other ? other->tail : nullptr, one.tail_stride,
                                         other ? other->tail_stride : 0, 0}
                                 : Tiles{one.base + at, other ? other->base + at : nullptr,
                                         one.stride, other ? other->stride : 0, LINE};
            const int64_t lines = many ? pieces((other ? 2 : 1) * TILE, pieces(groups, 2)) : 0;
            for (int64_t group = 0; group < groups; group += 2) {
                const char* left = tokens + group * group_bytes + step * TILE * LINE;
                const char* right = group + 1 < groups ? left + group_bytes : nullptr;
                multiply(a, {left, right, LINE, LINE, TILE * LINE}, deep,
                         c + panel * TILE * c_stride + group * TILE, c_stride, add, &ahead, lines);
            }
        }
    };
    for (int64_t step = 0; step < steps; step += chunk)
        pass(step, least(chunk, steps - step), false, step > 0);
    if (k % STEP) pass(steps, 1, true, steps > 0);
}

// c[tokens][columns] (+)= a [tokens, depth], padded, times rows of weights; fetches as the other
// nn. `room` holds one strip of 32 columns of a chunk.
TARGET_AMX void nn_tiles(const uint16_t* a, int64_t a_stride, int64_t tiles, const uint16_t* b,
                         int64_t b_stride, int64_t depth, int64_t columns, float* c,
                         int64_t c_stride, bool add, char* room, Ahead* then = nullptr) {
    for (int64_t q = 0; q < depth; q += CHUNK) {
        const int64_t deep = least(CHUNK, depth - q), after = least(CHUNK, depth - q - deep);
        const int64_t steps = pieces(deep, STEP);
        Ahead rest;
        if (after > 0) rest = Ahead(b + (q + deep) * b_stride, b_stride * 2, columns * 2, after);
        Ahead* soon = after > 0 ? &rest : then;
        for (int64_t n = 0; n < columns; n += STEP) {
            const uint16_t* strip = b + q * b_stride + n;
            const int64_t width = columns - n;
            for (int64_t step = 0; step < steps; ++step) {
                if (soon) soon->fetch(STEP);
                interleave_step(strip + step * STEP * b_stride, b_stride, deep - step * STEP, width,
                                room + step * 2 * TILE * LINE);
            }
            const Tiles strip_tiles{room, room + TILE * LINE, LINE, LINE, 2 * TILE * LINE};
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                const uint16_t* here = a + tile * TILE * a_stride + q;
                const uint16_t* below = tile + 1 < tiles ? here + TILE * a_stride : nullptr;
                multiply({here, below, a_stride * 2, a_stride * 2, LINE}, strip_tiles, steps,
                         c + tile * TILE * c_stride + n, c_stride, add || q > 0);
            }
        }
    }
}

constexpr int64_t ROOM_NN = CHUNK * 2 * LINE;

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
                         tokens / STEP, c + i, BLOCK, false);
            }
            squares += put_gradient(c, BLOCK, least(2 * TILE, rows - row), width,
                                    to + row * to_stride + column, to_stride);
        }
    }
    _mm_sfence();  // whoever learns that this task is done sees its lines
    return squares;
}

// One group of 16 rows: x for nt; in backward dy for nn, and both for tn.
TARGET_AMX void pack_amx(const Job& job, const Segment& own, int64_t group) {
    const int64_t first = group * TILE, rows = least(TILE, own.rows - first);
    const int64_t wide = padded(job.d, STEP);
    const uint16_t* x = rows_of<uint16_t>(job.x, job.x_stride, own);
    pack_tiles(x + first * job.x_stride, job.x_stride, rows, job.d,
               own.x_tiles + group * wide * LINE / 2);
    if (!job.backward) return;
    const uint16_t* dy = rows_of<uint16_t>(job.dy, job.dy_stride, own) + first * job.dy_stride;
    for (int64_t row = 0; row < TILE; ++row) {
        uint16_t* to = own.dy + (first + row) * wide;
        const int64_t count = row < rows ? job.d : 0;
        std::memcpy(to, dy + row * job.dy_stride, count * 2);
        std::memset(to + count, 0, (wide - count) * 2);
    }
    if (!job.gradients) return;
    const int64_t tokens = padded(own.rows, STEP);
    // The last group also writes the zeros up to a whole number of steps.
    const int64_t stop = first + TILE >= own.rows ? tokens : first + TILE;
    pack_pairs(x, job.x_stride, own.rows, first, stop, job.d, own.x_pairs, wide);
    for (int64_t i = 0; i < job.d; ++i)
        for (int64_t row = first; row < stop; ++row)
            own.dy_turned[i * tokens + row] =
                row < own.rows ? dy[(row - first) * job.dy_stride + i] : 0;
}

// The activation of some hidden units, packed for the second nt.
TARGET_AMX void hidden_task_amx(const Job& job, const Segment& own, int64_t index, Ahead& ahead) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.d;
    const int64_t tall = job.tall_in, unit = index * tall;
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(job.gates() * tall * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, job.gates() * tall * tokens);
    Panel panels[MAX_PANELS];
    // Units beyond the last are zeros that fill up the packed activation.
    const int64_t there = most(0, least(tall, job.h - unit));
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        Panel* own_panels = panels + gate * tall / TILE;
        char* room = at + gate * tall / TILE * Panel::room_bytes(k);
        const uint16_t* weights = w_in<uint16_t>(own) + (gate * job.h + unit) * k;
        for (int64_t i = Panel::cut(weights, there, k, room, own_panels); i < tall / TILE; ++i)
            own_panels[i] = Panel::of(nullptr, 0, k, room + i * Panel::room_bytes(k));
    }
    nt_tiles(panels, job.gates() * tall / TILE, k, own.x_tiles, groups, c, tokens, ahead);
    Wide::activate(c, job.gated ? c + tall * tokens : nullptr, tall * tokens);
    const int64_t group_bytes = padded(job.h, STEP) * LINE / 2;
    const int64_t stop = least(tall, padded(job.h, STEP) - unit);
    for (int64_t group = 0; group < groups; ++group) {
        for (int64_t i = 0; i < stop; i += 2) {
            const float* even = c + i * tokens + group * TILE;
            const __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(even), 16);
            const __m512i high = _mm512_loadu_si512(even + tokens);
            char* pairs = own.a + group * group_bytes + (unit + i) / 2 * LINE;
            _mm512_storeu_si512(pairs, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
        }
    }
}

TARGET_AMX void output_task_amx(const Job& job, const Segment& own, int64_t index, Ahead& ahead) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.h;
    const int64_t row = index * job.tall_out, count = least(job.tall_out, job.d - row);
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(padded(count, TILE) * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, padded(count, TILE) * tokens);
    Panel panels[MAX_PANELS];
    const int64_t n = Panel::cut(w_out<uint16_t>(job, own) + row * k, count, k, at, panels);
    nt_tiles(panels, n, k, own.a, groups, c, tokens, ahead);
    uint16_t* y = rows_of<uint16_t>(job.y, job.y_stride, own) + row;
    for (int64_t group = 0; group < groups; ++group) {
        for (int64_t part = 0; part < count; part += TILE) {
            alignas(64) float turned[TILE * TILE];
            turn_tile(c + part * tokens + group * TILE, tokens, turned, TILE);
            Wide::put(turned, TILE, least(TILE, own.rows - group * TILE), least(TILE, count - part),
                      y + group * TILE * job.y_stride + part, job.y_stride);
        }
    }
}

// h of one block, [tokens, BLOCK] for the gate and for the other rows.
TARGET_AMX void hidden_amx(const Job& job, const Segment& own, int64_t unit, int64_t groups,
                           const AmxArrays& arrays, Ahead& ahead) {
    const int64_t d = job.d, tokens = groups * TILE, count = least(BLOCK, job.h - unit);
    Panel panels[MAX_PANELS];
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        float* h = gate ? arrays.up : arrays.h;
        const uint16_t* weights = w_in<uint16_t>(own) + (gate * job.h + unit) * d;
        const int64_t n = Panel::cut(weights, count, d, arrays.rest, panels);
        nt_tiles(panels, n, d, own.x_tiles, groups, arrays.c, tokens, ahead);
        for (int64_t group = 0; group < groups; ++group)
            for (int64_t i = 0; i < n; ++i)
                turn_tile(arrays.c + i * TILE * tokens + group * TILE, tokens,
                          h + group * TILE * BLOCK + i * TILE, BLOCK);
    }
}

TARGET_AMX double gradients_amx(const Job& job, const Segment& own, int64_t unit, int64_t count,
                                const AmxArrays& arrays, char* room) {
    const int64_t tokens = padded(own.rows, STEP), wide = padded(job.d, STEP);
    uint16_t* turned = cut_array<uint16_t>(room, BLOCK * tokens);
    uint32_t* pairs = cut_array<uint32_t>(room, BLOCK * tokens / 2);
    uint16_t* gradient = static_cast<uint16_t*>(own.gradient);
    double squares = 0.0;
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        std::memset(turned, 0, BLOCK * tokens * 2);
        turn(gate ? arrays.dup : arrays.dh, arrays.dh_stride, own.rows, count, turned, tokens);
        squares += tn_tiles(turned, own.x_pairs, wide, tokens, count, job.d,
                            gradient + (gate * job.h + unit) * job.d, job.d);
    }
    pack_pairs(arrays.weighted, BLOCK, own.rows, 0, tokens, BLOCK, pairs, BLOCK);
    return squares + tn_tiles(own.dy_turned, pairs, BLOCK, tokens, job.d, count,
                              gradient + job.gates() * job.h * job.d + unit, job.h);
}

TARGET_AMX void backward_block_amx(const Job& job, const Segment& own, int64_t index,
                                   Ahead& ahead) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), d = job.d;
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE, wide = padded(d, STEP);
    const int64_t room_bytes = most(most(ROOM_NN, MAX_PANELS * Panel::room_bytes(d)),
                                    BLOCK * padded(own.rows, STEP) * 4 + 2 * LINE);
    const auto arrays = AmxArrays::cut(job, own, unit, rows, rows * most(BLOCK, wide), room_bytes);
    if (rows > 0) {
        Ahead in(w_in<uint16_t>(own) + unit * d, job.h * d * 2, count * d * 2, job.gates());
        nn_tiles(own.dy, wide, groups, w_out<uint16_t>(job, own) + unit, job.h, d, count, arrays.da,
                 BLOCK, false, arrays.rest, &in);
        hidden_amx(job, own, unit, groups, arrays, in);
        AmxArrays::activate_rows(arrays, job, own, unit, count);
    }
    if (job.gradients)
        own.block_squares[index] = gradients_amx(job, own, unit, count, arrays, arrays.rest);
    if (rows > 0 && job.shares_dx(own)) {
        // Whole tiles in the cache first, then those rows of them that are there.
        float* share = own.dx_shares + index * own.rows * wide;
        for (int64_t gate = 0; gate < job.gates(); ++gate)
            nn_tiles(gate ? arrays.dup : arrays.dh, BLOCK, groups,
                     w_in<uint16_t>(own) + (gate * job.h + unit) * d, d, count, d, arrays.c, wide,
                     gate > 0, arrays.rest, &ahead);
        std::memcpy(share, arrays.c, own.rows * wide * 4);
    }
}

TARGET_AMX void dx_amx(const Job& job, const Segment& own, int64_t index) {
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE;
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    char* at = task_scratch.take(rows * BLOCK * 4 + ROOM_NN);
    float* c = cut_array<float>(at, rows * BLOCK);
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        nn_tiles(reinterpret_cast<uint16_t*>(own.dh) + gate * rows * stride, stride, groups,
                 w_in<uint16_t>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                 gate > 0, at);
    Wide::put(c, BLOCK, own.rows, width, rows_of<uint16_t>(job.dx, job.dx_stride, own) + first,
              job.dx_stride);
}

TARGET_AMX void task_amx(const Job& job, const Segment& own, int phase, int64_t index,
                         Ahead& ahead) {
    if (phase == 0) return pack_amx(job, own, index);
    if (!job.backward && phase == 1) return hidden_task_amx(job, own, index, ahead);
    if (!job.backward) return output_task_amx(job, own, index, ahead);
    if (phase == 1) return backward_block_amx(job, own, index, ahead);
    if (index == 0) add_weight_shares(job, own);
    if (!job.shares_dx(own)) return dx_amx(job, own, index);
    add_shares<uint16_t, Wide>(job, own, index);
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
