// Products by vectors of the compiler, compiled once for each instruction set.
#pragma once

#include "cpu_numbers.h"

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

}  // namespace
