// Tasks with AMX tiles.
#pragma once

#include "cpu_amx.h"
#include "cpu_vector_tasks.h"

namespace {

#if HAVE_AMX

using Avx512Bf16 = Avx512WithBf16<uint16_t>;

// The weights of some outputs, which are unpacked if they are packed.
const uint16_t* rows_of_weights(const Group& group, const ExpertRows& own, int tensor,
                                int64_t first, int64_t count) {
    if (group.format) return unpacked_rows<uint16_t, Avx512Bf16>(group, own, tensor, first, count);
    return tensor == W_IN ? w_in<uint16_t>(own) + first * group.d
                          : w_out<uint16_t>(group, own) + first * group.h;
}

struct TileProducts : Avx512<uint16_t> {
    using Weight = uint16_t;

    static int64_t room_bytes() { return NN_ROOM_BYTES; }

    static void nn(const uint16_t* a, int64_t a_stride, int64_t rows, const uint16_t* b,
                   int64_t b_stride, int64_t depth, int64_t columns, float* c, int64_t c_stride,
                   bool add, char* room, Prefetch* next, int64_t lines) {
        nn_tiles(a, a_stride, rows / TILE, b, b_stride, depth, columns, c, c_stride, add, room,
                 next, lines);
    }

    // These are as in VectorProducts.
    static void activation_grads(const Group& group, const ExpertRows& own, int64_t unit,
                                 int64_t count, const BlockArrays<uint16_t>& arrays) {
        Prefetch out = output_weights(group, own, unit, count);
        nn_tiles(own.dy, group.d, own.padded_rows() / TILE, w_out<uint16_t>(group, own) + unit,
                 group.h, group.d, count, arrays.da, BLOCK, false, arrays.room, &out, STEP);
    }

    static void hidden(const Group& group, const ExpertRows& own, int64_t first, int64_t count,
                       float* to, int64_t stride, const BlockArrays<uint16_t>& arrays,
                       Prefetch& next) {
        const int64_t rows = own.padded_rows();
        nt_tiles(w_in<uint16_t>(own) + first * group.d, count, group.d, own.x_tiles, rows / TILE,
                 arrays.c, rows, next);
        for (int64_t row = 0; row < rows; row += TILE)
            for (int64_t i = 0; i < count; i += TILE)
                transpose_tile(arrays.c + i * rows + row, rows, to + row * stride + i, stride);
    }

    static void input_grads(const Group& group, const ExpertRows& own, int64_t first,
                            int64_t width, float* to, char* room) {
        const int64_t in = group.gates() * group.h;
        nn_tiles(reinterpret_cast<const uint16_t*>(own.dh), in, own.padded_rows() / TILE,
                 w_in<uint16_t>(own) + first, group.d, in, width, to, BLOCK, false, room, nullptr,
                 0);
    }
};

// Packs 16 token rows: x for nt, and in backward dy for nn.
TARGET_AMX void pack_task(const Group& group, const ExpertRows& own, int64_t index) {
    const int64_t first = index * TILE, rows = least(TILE, own.rows - first), d = group.d;
    const uint16_t* x = rows_of<uint16_t>(group.x, group.x_stride, own) + first * group.x_stride;
    pack_tiles(x, group.x_stride, rows, d, own.x_tiles + first * d * 2);
    if (!group.backward) return;
    const uint16_t* dy = rows_of<uint16_t>(group.dy, group.dy_stride, own);
    for (int64_t row = first; row < first + rows; ++row)
        std::memcpy(own.dy + row * d, dy + row * group.dy_stride, d * 2);
    std::memset(own.dy + (first + rows) * d, 0, (TILE - rows) * d * 2);
}

// Adds the biases of `count` outputs, if there are any, to c[output][row].
TARGET_AMX void add_biases(const Group& group, const ExpertRows& own, int tensor, int64_t first,
                           int64_t count, int64_t rows, float* c) {
    for (int64_t i = 0; group.bias && i < count; ++i) {
        const int64_t at = first + i;
        const float bias = group.format     ? packed_bias(group, own, tensor, at)
                           : tensor == B_IN ? load(b_in<uint16_t>(group, own) + at)
                                            : load(b_out<uint16_t>(group, own) + at);
        for (int64_t row = 0; row < rows; ++row) c[i * rows + row] += bias;
    }
}

// The activation of some hidden units, packed for the second nt.
TARGET_AMX void hidden_task_amx(const Group& group, const ExpertRows& own, int64_t index,
                                Prefetch& next) {
    const int64_t rows = own.padded_rows(), k = group.d, unit = index * group.hidden_per_task;
    const int64_t count = least(group.hidden_per_task, group.h - unit), size = count * rows;
    float* c = reinterpret_cast<float*>(task_scratch.take(group.gates() * size * 4));
    for (int64_t gate = 0; gate < group.gates(); ++gate) {
        const int64_t first = gate * group.h + unit;
        nt_tiles(rows_of_weights(group, own, W_IN, first, count), count, k, own.x_tiles,
                 rows / TILE, c + gate * size, rows, next);
        add_biases(group, own, B_IN, first, count, rows, c + gate * size);
    }
    Avx512Bf16::activate(c, group.gated ? c + size : nullptr, size, group.function);
    for (int64_t row = 0; row < rows; row += TILE) {
        char* to = own.a + row * group.h * 2 + unit / 2 * LINE;
        for (int64_t i = 0; i < count; i += 2, to += LINE) {
            const float* even = c + i * rows + row;
            const __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(even), 16);
            const __m512i high = _mm512_loadu_si512(even + rows);
            _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
        }
    }
}

// Some columns of y.
TARGET_AMX void output_task_amx(const Group& group, const ExpertRows& own, int64_t index,
                                Prefetch& next) {
    const int64_t rows = own.padded_rows(), k = group.h, first = index * group.output_per_task;
    const int64_t count = least(group.output_per_task, group.d - first);
    float* c = reinterpret_cast<float*>(task_scratch.take(count * rows * 4));
    nt_tiles(rows_of_weights(group, own, W_OUT, first, count), count, k, own.a, rows / TILE, c,
             rows, next);
    add_biases(group, own, B_OUT, first, count, rows, c);
    uint16_t* y = out_rows<uint16_t>(group, own) + first;
    for (int64_t row = 0; row < rows; row += TILE) {
        for (int64_t i = 0; i < count; i += TILE) {
            alignas(64) float tile[TILE * TILE];
            transpose_tile(c + i * rows + row, rows, tile, TILE);
            Avx512Bf16::store_rows(tile, TILE, least(TILE, own.rows - row), TILE,
                                   y + row * group.out_stride + i, group.out_stride);
        }
    }
}

void amx_task(const Group& group, const ExpertRows& own, int phase, int64_t index,
              Prefetch& next) {
    if (!own.tiled && group.format)
        return packed_task<uint16_t, Avx512Bf16>(group, own, phase, index, next);
    if (!own.tiled) return vector_task<uint16_t, Avx512<uint16_t>>(group, own, phase, index, next);
    const TileScope tiles;
    if (phase == PACK)
        pack_task(group, own, index);
    else if (!group.backward)
        phase == HIDDEN ? hidden_task_amx(group, own, index, next)
                        : output_task_amx(group, own, index, next);
    else
        phase == HIDDEN ? backward_block<TileProducts>(group, own, index, next)
                        : dx_task<TileProducts>(group, own, index);
}

#endif  // HAVE_AMX

}  // namespace
