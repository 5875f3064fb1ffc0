// Tasks by the tiles of AMX.
#pragma once

#include "cpu_tiles.h"
#include "cpu_vector_tasks.h"

namespace {

#if HAVE_AMX

using AmxArrays = BlockArrays<uint16_t, Wide>;

// One group of 16 rows: x for nt; in backward dy for nn, and both for tn. Published as it is made,
// since it is short.
TARGET_AMX void pack_amx(const Job& job, const Segment& own, int64_t group, Turn& turn) {
    if (!turn.may_publish()) return;
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
TARGET_AMX void hidden_task_amx(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.d;
    const int64_t tall = job.tall_in, unit = index * tall;
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(job.gates() * tall * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, job.gates() * tall * tokens);
    Panel panels[MAX_PANELS];
    // Units beyond the last are zeros that fill up the packed activation.
    const int64_t there = most(0, least(tall, job.h - unit)), count = tall / TILE;
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        Panel::cut(w_in<uint16_t>(own) + (gate * job.h + unit) * k, there, k, gate * tall, count,
                   at + gate * count * Panel::room_bytes(k), panels + gate * count);
    nt_tiles(panels, job.gates() * count, k, own.x_tiles, groups, c, tokens, turn.ahead);
    Wide::activate(c, job.gated ? c + tall * tokens : nullptr, tall * tokens);
    if (!turn.may_publish()) return;
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

TARGET_AMX void output_task_amx(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.h;
    const int64_t row = index * job.tall_out, count = least(job.tall_out, job.d - row);
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(padded(count, TILE) * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, padded(count, TILE) * tokens);
    Panel panels[MAX_PANELS];
    const int64_t n = pieces(count, TILE);
    Panel::cut(w_out<uint16_t>(job, own) + row * k, count, k, 0, n, at, panels);
    nt_tiles(panels, n, k, own.a, groups, c, tokens, turn.ahead);
    if (!turn.may_publish()) return;
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
    const int64_t n = pieces(count, TILE);
    Panel panels[MAX_PANELS];
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        float* h = gate ? arrays.up : arrays.h;
        const uint16_t* weights = w_in<uint16_t>(own) + (gate * job.h + unit) * d;
        Panel::cut(weights, count, d, 0, n, arrays.rest, panels);
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
        transpose(gate ? arrays.dup : arrays.dh, BLOCK, own.rows, count, turned, tokens);
        squares += tn_tiles(turned, own.x_pairs, wide, tokens, count, job.d,
                            gradient + (gate * job.h + unit) * job.d, job.d);
    }
    pack_pairs(arrays.weighted, BLOCK, own.rows, 0, tokens, BLOCK, pairs, BLOCK);
    return squares + tn_tiles(own.dy_turned, pairs, BLOCK, tokens, job.d, count,
                              gradient + job.gates() * job.h * job.d + unit, job.h);
}

TARGET_AMX void backward_block_amx(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), d = job.d;
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE, wide = padded(d, STEP);
    const int64_t room_bytes = most(most(ROOM_NN, MAX_PANELS * Panel::room_bytes(d)),
                                    BLOCK * padded(own.rows, STEP) * 4 + 2 * LINE);
    const auto arrays = AmxArrays::cut(rows, rows * most(BLOCK, wide), room_bytes);
    if (rows > 0) {
        Ahead out = output_weights(job, own, unit, count);
        nn_tiles(own.dy, wide, groups, w_out<uint16_t>(job, own) + unit, job.h, d, count, arrays.da,
                 BLOCK, false, arrays.rest, &out, STEP);
        hidden_amx(job, own, unit, groups, arrays, turn.ahead);
        arrays.activate_rows(job, own, count);
    }
    if (job.gradients)
        own.block_squares[index] = gradients_amx(job, own, unit, count, arrays, arrays.rest);
    for (int64_t gate = 0; rows > 0 && job.shares_dx(own) && gate < job.gates(); ++gate)
        nn_tiles(gate ? arrays.dup : arrays.dh, BLOCK, groups,
                 w_in<uint16_t>(own) + (gate * job.h + unit) * d, d, count, d, arrays.c, wide,
                 gate > 0, arrays.rest, &turn.ahead, TILE / 2);
    arrays.publish(job, own, index, turn);
}

TARGET_AMX void dx_amx(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE;
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    char* at = task_scratch.take(rows * BLOCK * 4 + ROOM_NN);
    float* c = cut_array<float>(at, rows * BLOCK);
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        nn_tiles(reinterpret_cast<uint16_t*>(own.dh) + gate * rows * stride, stride, groups,
                 w_in<uint16_t>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                 gate > 0, at);
    publish_dx<uint16_t, Wide>(job, own, index, c, turn);
}

TARGET_AMX void task_amx(const Job& job, const Segment& own, int phase, int64_t index,
                         Turn& turn) {
    if (!own.packed || (job.backward && phase == 2 && job.shares_dx(own)))
        return vector_task<uint16_t, Wide>(job, own, phase, index, turn);
    if (phase == 0) return pack_amx(job, own, index, turn);
    if (job.backward)
        return phase == 1 ? backward_block_amx(job, own, index, turn)
                          : dx_amx(job, own, index, turn);
    phase == 1 ? hidden_task_amx(job, own, index, turn) : output_task_amx(job, own, index, turn);
}

#endif  // HAVE_AMX

}  // namespace
