// Products and tasks by vectors of the compiler, compiled once for each instruction set.
#pragma once

#include "cpu_tasks.h"

namespace {

template <int LANES>
struct Vectors {
    typedef float Floats __attribute__((vector_size(4 * LANES)));
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
};

template <int LANES>
INLINE typename Vectors<LANES>::Floats load_vector(const float* from) {
    typename Vectors<LANES>::Floats vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// Halves are added until one is left, all in registers.
template <int LANES>
INLINE float sum(typename Vectors<LANES>::Floats vector) {
    typename Vectors<LANES / 2>::Floats halves[2];
    std::memcpy(halves, &vector, sizeof vector);
    return sum<LANES / 2>(halves[0] + halves[1]);
}

template <>
__attribute__((always_inline)) inline float sum<2>(Vectors<2>::Floats vector) {
    return vector[0] + vector[1];
}

// What a load along the sum gives: one vector of floats, or the even and the odd ones of twice as
// many bf16, which costs a shift and a mask where a conversion in order would need shuffles.
template <class T, int LANES>
struct Along;

template <int LANES>
struct Along<float, LANES> {
    static constexpr int64_t SIZE = LANES;
    typename Vectors<LANES>::Floats value;
    Along() = default;
    explicit __attribute__((always_inline)) Along(const float* from)
        : value(load_vector<LANES>(from)) {}
    __attribute__((always_inline)) void add(const Along& other,
                                            typename Vectors<LANES>::Floats& total) const {
        total += value * other.value;
    }
    // to += the sum of Q rows, each times its factor
    template <int Q>
    static __attribute__((always_inline)) void add_scaled(const Along* row, const float* factors,
                                                          float* to) {
        auto total = load_vector<LANES>(to);
        for (int q = 0; q < Q; ++q) total += factors[q] * row[q].value;
        std::memcpy(to, &total, sizeof total);
    }
    static __attribute__((always_inline)) void order(const float* sums, float* to) {
        std::memcpy(to, sums, SIZE * 4);
    }
};

template <int LANES>
struct Along<uint16_t, LANES> {
    static constexpr int64_t SIZE = 2 * LANES;
    typename Vectors<LANES>::Floats even, odd;
    Along() = default;
    explicit __attribute__((always_inline)) Along(const uint16_t* from) {
        typename Vectors<LANES>::Bits bits;
        std::memcpy(&bits, from, sizeof bits);
        even = (typename Vectors<LANES>::Floats)(bits << 16);
        odd = (typename Vectors<LANES>::Floats)(bits & 0xffff0000u);
    }
    __attribute__((always_inline)) void add(const Along& other,
                                            typename Vectors<LANES>::Floats& total) const {
        total += even * other.even;
        total += odd * other.odd;
    }
    // Sums of even and of odd columns lie apart.
    template <int Q>
    static __attribute__((always_inline)) void add_scaled(const Along* row, const float* factors,
                                                          float* to) {
        auto evens = load_vector<LANES>(to), odds = load_vector<LANES>(to + LANES);
        for (int q = 0; q < Q; ++q) {
            evens += factors[q] * row[q].even;
            odds += factors[q] * row[q].odd;
        }
        std::memcpy(to, &evens, sizeof evens);
        std::memcpy(to + LANES, &odds, sizeof odds);
    }
    // Such sums, in the order of columns.
    static __attribute__((always_inline)) void order(const float* __restrict sums,
                                                     float* __restrict to) {
#pragma omp simd
        for (int i = 0; i < LANES; ++i) {
            to[2 * i] = sums[i];
            to[2 * i + 1] = sums[LANES + i];
        }
    }
};

// to (+)= sums, in the order of columns.
template <class T, int LANES>
INLINE void put_in_order(const float* __restrict sums, int64_t columns, float* __restrict to,
                         bool add) {
    using Vector = Along<T, LANES>;
    const int64_t whole = columns / Vector::SIZE * Vector::SIZE;
    alignas(64) float ordered[BLOCK];
    for (int64_t n = 0; n < whole; n += Vector::SIZE) Vector::order(sums + n, ordered + n);
    for (int64_t n = whole; n < columns; ++n) ordered[n] = sums[n];
    if (add)
        add_body(to, ordered, columns);
    else
        std::memcpy(to, ordered, columns * 4);
}

// Weights that will be used next: from here on, in each of some streams.
template <class T>
struct Soon {
    const T* from;
    int64_t streams;
};

// W rows of weights, `apart` rows from each other, with M rows of tokens; c[w * apart][m].
template <class T, int LANES, int W, int M>
INLINE void nt_block(const T* weights, int64_t apart, const T* tokens, int64_t token_stride,
                     int64_t k, float* c, int64_t c_stride, Soon<T> soon) {
    using Vector = Along<T, LANES>;
    typename Vectors<LANES>::Floats total[W][M] = {};
    int64_t at = 0;
    for (; at + Vector::SIZE <= k; at += Vector::SIZE) {
        for (int64_t i = 0; i < soon.streams; ++i)
            __builtin_prefetch(soon.from + i * apart * k + at, 0, 2);
        Vector token[M];
        for (int m = 0; m < M; ++m) token[m] = Vector(tokens + m * token_stride + at);
        for (int w = 0; w < W; ++w) {
            const Vector weight(weights + w * apart * k + at);
            for (int m = 0; m < M; ++m) weight.add(token[m], total[w][m]);
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int m = 0; m < M; ++m) {
            float tail = 0.0f;
            for (int64_t i = at; i < k; ++i)
                tail += load(weights + w * apart * k + i) * load(tokens + m * token_stride + i);
            c[w * apart * c_stride + m] = sum<LANES>(total[w][m]) + tail;
        }
    }
}

// As `nt_block` with `count` tokens, up to M.
template <class T, int LANES, int W, int M>
INLINE void nt_some(const T* weights, int64_t apart, const T* tokens, int64_t token_stride,
                    int64_t count, int64_t k, float* c, int64_t c_stride, Soon<T> soon) {
    if constexpr (M > 1) {
        if (count < M)
            return nt_some<T, LANES, W, M - 1>(weights, apart, tokens, token_stride, count, k, c,
                                               c_stride, soon);
    }
    nt_block<T, LANES, W, M>(weights, apart, tokens, token_stride, k, c, c_stride, soon);
}

// c[row][token] = weights [rows, k] times tokens [count, k], W rows and M tokens at a time. The rows
// at work are far apart, so that each goes on in the next: few long streams, which the CPU's
// prefetchers follow over the borders of rows and pages, with help where the tokens take one turn.
// If they take several, the next rows come from memory meanwhile.
template <class T, int LANES, int W, int M>
INLINE void nt_streams(const T* weights, int64_t rows, const T* tokens, int64_t token_stride,
                       int64_t count, int64_t k, float* c, int64_t c_stride) {
    const int64_t apart = rows / W, turns = pieces(count, M), share = pieces(W, most(turns, 1));
    for (int64_t row = 0; row < apart; ++row) {
        const T* here = weights + row * k;
        for (int64_t turn = 0; turn < turns; ++turn) {
            const int64_t m = turn * M, first = least(W, share * turn);
            Soon<T> soon{here + IN_FLIGHT / W * LINE / int64_t(sizeof(T)), W};
            if (turns > 1)
                soon = {here + (first * apart + 1) * k,
                        row + 1 < apart ? least(share, W - first) : 0};
            nt_some<T, LANES, W, M>(here, apart, tokens + m * token_stride, token_stride,
                                    least(M, count - m), k, c + row * c_stride + m, c_stride, soon);
        }
    }
    for (int64_t row = apart * W; row < rows; ++row)
        for (int64_t m = 0; m < count; ++m)
            nt_block<T, LANES, 1, 1>(weights + row * k, 0, tokens + m * token_stride, token_stride,
                                     k, c + row * c_stride + m, c_stride, {nullptr, 0});
}

constexpr int STREAMS = 8;  // with one token or two

// As many sums as there are registers for. A sum does not depend on who is summed beside it.
template <class T, int LANES>
INLINE void nt_body(const T* weights, int64_t rows, const T* tokens, int64_t token_stride,
                    int64_t count, int64_t k, float* c, int64_t c_stride) {
    constexpr int M = LANES >= 16 ? 4 : 2;
    if (2 * count <= M)
        nt_streams<T, LANES, STREAMS, M / 2>(weights, rows, tokens, token_stride, count, k, c,
                                             c_stride);
    else
        nt_streams<T, LANES, 4, M>(weights, rows, tokens, token_stride, count, k, c, c_stride);
}

// sums[p] += the sum over Q rows of b of factors[p][q] b[q], in the order in which Along loads.
template <class T, int LANES, int Q>
INLINE void nn_rows(const float* factors, int64_t rows, const T* b, int64_t b_stride,
                    int64_t columns, float* sums) {
    using Vector = Along<T, LANES>;
    for (int64_t n = 0; n + Vector::SIZE <= columns; n += Vector::SIZE) {
        Vector row[Q];
        for (int q = 0; q < Q; ++q) row[q] = Vector(b + q * b_stride + n);
        for (int64_t p = 0; p < rows; ++p)
            Vector::template add_scaled<Q>(row, factors + p * Q, sums + p * BLOCK + n);
    }
    for (int64_t n = columns / Vector::SIZE * Vector::SIZE; n < columns; ++n)
        for (int64_t p = 0; p < rows; ++p)
            for (int q = 0; q < Q; ++q)
                sums[p * BLOCK + n] += factors[p * Q + q] * load(b + q * b_stride + n);
}

// c[p][n] (+)= sum over q of a(p, q) b[q][n], where a(p, q) lies at a[p * a_row + q * a_step].
// b is read along its rows, some at a time, and each is converted once for up to P rows of c, whose
// sums stay in the first cache. Meanwhile as much of `then` is fetched.
template <class T, int LANES>
INLINE void nn_body(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b,
                    int64_t b_stride, int64_t depth, int64_t columns, float* c, int64_t c_stride,
                    bool add, Ahead* then) {
    constexpr int64_t P = 32, Q = 8;
    alignas(64) float factors[P * Q], sums[P * BLOCK];
    for (int64_t chunk = 0; chunk == 0 || chunk < depth; chunk += CHUNK) {
        const int64_t stop = least(depth, chunk + CHUNK);
        for (int64_t left = 0; left < columns; left += BLOCK) {
            const int64_t width = least(BLOCK, columns - left);
            for (int64_t top = 0; top < rows; top += P) {
                const int64_t count = least(P, rows - top);
                std::memset(sums, 0, count * BLOCK * 4);
                auto step = [&](auto size, int64_t q) {
                    constexpr int N = decltype(size)::value;
                    for (int64_t p = 0; p < count; ++p)
                        for (int64_t i = 0; i < N; ++i)
                            factors[p * N + i] = load(a + (top + p) * a_row + (q + i) * a_step);
                    nn_rows<T, LANES, N>(factors, count, b + q * b_stride + left, b_stride, width,
                                         sums);
                };
                int64_t q = chunk;
                for (; q + Q <= stop; q += Q) {
                    if (top == 0 && then) then->fetch(Q * width * int64_t(sizeof(T)) / LINE);
                    step(std::integral_constant<int, Q>(), q);
                }
                for (; q + 4 <= stop; q += 4) step(std::integral_constant<int, 4>(), q);
                for (; q < stop; ++q) step(std::integral_constant<int, 1>(), q);
                for (int64_t p = 0; p < count; ++p)
                    put_in_order<T, LANES>(sums + p * BLOCK, width,
                                           c + (top + p) * c_stride + left, add || chunk > 0);
            }
        }
    }
}

// What is compiled for each instruction set; all the rest calls these.
#define DEFINE_ISA(NAME, TARGET, LANES)                                                            \
    template <class T>                                                                             \
    struct NAME {                                                                                  \
        TARGET static void nt(const T* weights, int64_t rows, const T* tokens,                     \
                              int64_t token_stride, int64_t count, int64_t k, float* c,            \
                              int64_t c_stride) {                                                  \
            nt_body<T, LANES>(weights, rows, tokens, token_stride, count, k, c, c_stride);         \
        }                                                                                          \
        TARGET static void nn(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b, \
                              int64_t b_stride, int64_t depth, int64_t columns, float* c,          \
                              int64_t c_stride, bool add, Ahead* then = nullptr) {                 \
            nn_body<T, LANES>(a, a_row, a_step, rows, b, b_stride, depth, columns, c, c_stride,    \
                              add, then);                                                          \
        }                                                                                          \
        TARGET static void activate(float* h, const float* up, int64_t count) {                    \
            activate_body<T>(h, up, count);                                                        \
        }                                                                                          \
        TARGET static float activate_backward(const float* h, const float* up, const float* da,    \
                                              float weight, int64_t count, T* dh, T* dup,          \
                                              T* weighted) {                                       \
            return activate_backward_body<T>(h, up, da, weight, count, dh, dup, weighted);         \
        }                                                                                          \
        TARGET static double put(const float* from, int64_t from_stride, int64_t rows,             \
                                 int64_t columns, T* to, int64_t to_stride) {                      \
            return put_body<T>(from, from_stride, rows, columns, to, to_stride);                   \
        }                                                                                          \
        TARGET static void add(float* total, const float* more, int64_t count) {                   \
            add_body(total, more, count);                                                          \
        }                                                                                          \
    };

DEFINE_ISA(Generic, , 4)
#if HAVE_X86
DEFINE_ISA(Avx2, TARGET_AVX2, 8)
DEFINE_ISA(Avx512, TARGET_AVX512, 16)
#endif

// to[column][row] = from[row][column]
template <class P>
INLINE void transpose(const P* from, int64_t from_stride, int64_t rows, int64_t columns, P* to,
                      int64_t to_stride) {
    for (int64_t column = 0; column < columns; ++column)
        for (int64_t row = 0; row < rows; ++row)
            to[column * to_stride + row] = from[row * from_stride + column];
}

template <class T, class Isa>
void forward_task(const Job& job, const Segment& own, int phase, int64_t index, Turn& turn) {
    const int64_t rows = own.rows;
    T* a = reinterpret_cast<T*>(own.a);  // [R, H]
    const int64_t tall = phase == 1 ? job.tall_in : job.tall_out;
    const int64_t first = index * tall, count = least(tall, (phase == 1 ? job.h : job.d) - first);
    float* c = reinterpret_cast<float*>(task_scratch.take(job.gates() * tall * rows * 4));
    T* to = a + first;
    int64_t stride = job.h;
    if (phase == 1 && count > 0) {
        const T* x = rows_of<T>(job.x, job.x_stride, own);
        const T* weights = w_in<T>(own) + first * job.d;
        float* up = job.gated ? c + count * rows : nullptr;
        Isa::nt(weights, count, x, job.x_stride, rows, job.d, c, rows);
        if (up) Isa::nt(weights + job.h * job.d, count, x, job.x_stride, rows, job.d, up, rows);
        Isa::activate(c, up, count * rows);
    } else if (phase == 2) {
        Isa::nt(w_out<T>(job, own) + first * job.h, count, a, job.h, rows, job.h, c, rows);
        to = rows_of<T>(job.y, job.y_stride, own) + first;
        stride = job.y_stride;
    }
    if (!turn.may_publish()) return;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) store(to + row * stride + i, c[i * rows + row]);
}

// The arrays of one block in backward: R rows (padded) of BLOCK hidden units.
template <class T, class Isa>
struct BlockArrays {
    float *da, *h, *up, *c, *weight_shares;
    T *dh, *dup, *weighted;
    char* rest;

    static BlockArrays cut(int64_t rows, int64_t c_size, int64_t rest_bytes) {
        const int64_t size = rows * BLOCK;
        char* at = task_scratch.take(size * (12 + 3 * int64_t(sizeof(T))) + (c_size + rows) * 4 +
                                     rest_bytes + 16 * LINE);
        BlockArrays arrays;
        arrays.da = cut_array<float>(at, size);
        arrays.h = cut_array<float>(at, size);
        arrays.up = cut_array<float>(at, size);
        arrays.c = cut_array<float>(at, c_size);
        arrays.weight_shares = cut_array<float>(at, rows);
        arrays.dh = cut_array<T>(at, size);
        arrays.dup = cut_array<T>(at, size);
        arrays.weighted = cut_array<T>(at, size);
        arrays.rest = at;
        return arrays;
    }

    // From h, up and da to dh, dup, the weighted activation and the share of the routing weights.
    void activate_rows(const Job& job, const Segment& own, int64_t count) const {
        for (int64_t row = 0; row < own.rows; ++row) {
            const int64_t at = row * BLOCK;
            weight_shares[row] = Isa::activate_backward(
                h + at, job.gated ? up + at : nullptr, da + at, job.row_weight[own.start + row],
                count, dh + at, dup + at, weighted + at);
            for (int64_t i = count; i < BLOCK; ++i) dh[at + i] = weighted[at + i] = 0;  // for tiles
            if (job.gated)
                for (int64_t i = count; i < BLOCK; ++i) dup[at + i] = 0;
        }
    }

    // Gives others the shares of the routing weights and of dx, which is in c; or dh, if the
    // products with w_in come later, as they need all of it.
    void publish(const Job& job, const Segment& own, int64_t index, Turn& turn) const {
        if (!turn.may_publish()) return;
        std::memcpy(own.weight_shares + index * own.rows, weight_shares, own.rows * 4);
        if (job.shares_dx(own)) {
            const int64_t size = own.rows * padded(job.d, STEP);
            std::memcpy(own.dx_shares + index * size, c, size * 4);
            return;
        }
        const int64_t stride = padded(job.h, BLOCK), all = own.tall_rows() * stride;
        for (int64_t gate = 0; gate < job.gates(); ++gate)
            for (int64_t row = 0; row < own.rows; ++row)
                std::memcpy(reinterpret_cast<T*>(own.dh) + gate * all + row * stride + index * BLOCK,
                            (gate ? dup : dh) + row * BLOCK, BLOCK * sizeof(T));
    }
};

template <class T, class Isa>
void backward_block(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), rows = own.rows;
    constexpr int64_t TALL = 32;  // rows of a gradient at once
    const int64_t wide = padded(job.d, STEP), share = job.shares_dx(own) ? rows * wide : 0;
    const auto arrays =
        BlockArrays<T, Isa>::cut(rows, most(share, most(rows, TALL) * BLOCK), 0);
    const T* x = rows_of<T>(job.x, job.x_stride, own);
    const T* dy = rows_of<T>(job.dy, job.dy_stride, own);
    const int64_t d = job.d;
    if (rows > 0) {
        Ahead out = output_weights(job, own, unit, count);
        Isa::nn(dy, job.dy_stride, 1, rows, w_out<T>(job, own) + unit, job.h, d, count, arrays.da,
                BLOCK, false, &out);
        for (int64_t gate = 0; gate < job.gates(); ++gate) {
            Isa::nt(w_in<T>(own) + (gate * job.h + unit) * d, count, x, job.x_stride, rows, d,
                    arrays.c, rows);
            transpose(arrays.c, rows, count, rows, gate ? arrays.up : arrays.h, BLOCK);
        }
        arrays.activate_rows(job, own, count);
    }
    if (job.gradients) {
        T* gradient = static_cast<T*>(own.gradient);
        double squares = 0.0;
        for (int64_t gate = 0; gate < job.gates(); ++gate) {
            const T* dh = gate ? arrays.dup : arrays.dh;
            for (int64_t row = 0; row < count; row += TALL) {
                const int64_t tall = least(TALL, count - row);
                T* to = gradient + (gate * job.h + unit + row) * d;
                for (int64_t column = 0; column < d; column += BLOCK) {
                    const int64_t wide = least(BLOCK, d - column);
                    Isa::nn(dh + row, 1, BLOCK, tall, x + column, job.x_stride, rows,
                            wide, arrays.c, BLOCK, false);
                    squares += Isa::put(arrays.c, BLOCK, tall, wide, to + column, d);
                }
            }
        }
        T* to = gradient + job.gates() * job.h * d + unit;
        for (int64_t row = 0; row < d; row += TALL) {
            const int64_t tall = least(TALL, d - row);
            Isa::nn(dy + row, 1, job.dy_stride, tall, arrays.weighted, BLOCK, rows, count, arrays.c,
                    BLOCK, false);
            squares += Isa::put(arrays.c, BLOCK, tall, count, to + row * job.h, job.h);
        }
        own.block_squares[index] = squares;
    }
    for (int64_t gate = 0; share > 0 && gate < job.gates(); ++gate)
        Isa::nn(gate ? arrays.dup : arrays.dh, BLOCK, 1, rows,
                w_in<T>(own) + (gate * job.h + unit) * d, d, count, d, arrays.c, wide, gate > 0,
                &turn.ahead);
    arrays.publish(job, own, index, turn);
}

void add_weight_shares(const Job& job, const Segment& own) {
    for (int64_t row = 0; row < own.rows; ++row) {
        float total = 0.0f;
        for (int64_t block = 0; block < job.blocks(); ++block)
            total += own.weight_shares[block * own.rows + row];
        job.drow_weight[own.start + row] = total;
    }
}

// dx [R, BLOCK] of some columns, and with the first of them the routing weights.
template <class T, class Isa>
void publish_dx(const Job& job, const Segment& own, int64_t index, const float* c, Turn& turn) {
    if (!turn.may_publish()) return;
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    T* dx = rows_of<T>(job.dx, job.dx_stride, own) + first;
    Isa::put(c, BLOCK, own.rows, width, dx, job.dx_stride);
    if (index == 0) add_weight_shares(job, own);
}

template <class T, class Isa>
void dx_task(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    const T* dh = reinterpret_cast<const T*>(own.dh);
    float* c = reinterpret_cast<float*>(task_scratch.take(own.rows * BLOCK * 4));
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        Isa::nn(dh + gate * own.rows * stride, stride, 1, own.rows,
                w_in<T>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                gate > 0);
    publish_dx<T, Isa>(job, own, index, c, turn);
}

// dx of some columns: shares added in their order.
template <class T, class Isa>
void add_shares(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.d, STEP);
    float* c = reinterpret_cast<float*>(task_scratch.take(own.rows * BLOCK * 4));
    std::memset(c, 0, own.rows * BLOCK * 4);
    for (int64_t row = 0; row < own.rows; ++row) {
        const float* share = own.dx_shares + row * stride + first;
        for (int64_t block = 0; block < job.blocks(); ++block, share += own.rows * stride)
            Isa::add(c + row * BLOCK, share, width);
    }
    publish_dx<T, Isa>(job, own, index, c, turn);
}

template <class T, class Isa>
void vector_task(const Job& job, const Segment& own, int phase, int64_t index, Turn& turn) {
    if (!job.backward) return forward_task<T, Isa>(job, own, phase, index, turn);
    if (phase == 1) return backward_block<T, Isa>(job, own, index, turn);
    if (job.shares_dx(own)) return add_shares<T, Isa>(job, own, index, turn);
    dx_task<T, Isa>(job, own, index, turn);
}

}  // namespace
