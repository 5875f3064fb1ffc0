// Takes blocks of GGUF apart, and unpacks K-quants: the loops of gguf_blocks.py, with the same bits.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "cpu_isa.h"

namespace {

// As in gguf_blocks.py.
enum Type : int { Q8_0, Q4_0, IQ4_NL, MXFP4, Q4_K, Q5_K, Q6_K };
constexpr int64_t SIZES[] = {34, 18, 18, 17, 144, 176, 210};
constexpr int WEIGHTS = 256;  // of a block of K-quants

// Addresses of the parts. Parts that a type does not have are not read.
struct Planes {
    uint8_t *codes, *high, *scales, *zeros, *factors;
};

// N bytes have first N codes in their low four bits, then N in the high ones.
template <int N>
INLINE void pair_halves(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < N / 2; ++i) {
        const uint8_t first = from[2 * i], second = from[2 * i + 1];
        to[i] = uint8_t((first & 15) | second << 4);
        to[N / 2 + i] = uint8_t(first >> 4 | (second & 0xf0));
    }
}

template <class N>
INLINE N read(const uint8_t* from) {
    N value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Eight scales and minimums of six bits each.
INLINE void k_scales(const uint8_t* from, uint8_t* scales, uint8_t* minimums) {
    for (int i = 0; i < 4; ++i) {
        scales[i] = from[i] & 63;
        minimums[i] = from[4 + i] & 63;
        scales[4 + i] = uint8_t((from[8 + i] & 15) | from[i] >> 6 << 4);
        minimums[4 + i] = uint8_t(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
    }
}

// Bit s of byte j belongs to weight 32 s + j.
INLINE void fifth_bits(const uint8_t* from, uint8_t* to) {
    for (int shift = 0; shift < 8; ++shift)
        for (int i = 0; i < 4; ++i) {
            const uint64_t eight = read<uint64_t>(from + 8 * i) >> shift & 0x0101010101010101u;
            to[4 * shift + i] = uint8_t(eight * 0x0102040810204080u >> 56);  // bit j is that of byte j
        }
}

// Bits 2 t and 2 t + 1 of byte j in each half belong to its weight 32 t + j.
INLINE void upper_bits(const uint8_t* from, uint8_t* to) {
    for (int half = 0; half < 2; ++half)
        for (int quarter = 0; quarter < 4; ++quarter)
            for (int i = 0; i < 8; ++i) {
                const uint32_t four = read<uint32_t>(from + 32 * half + 4 * i) >> 2 * quarter;
                const uint32_t bits = four & 0x03030303u;
                to[32 * half + 8 * quarter + i] =
                    uint8_t(bits | bits >> 6 | bits >> 12 | bits >> 18);
            }
}

template <Type TYPE>
INLINE void take_apart(const uint8_t* from, int64_t i, const Planes& to) {
    if constexpr (TYPE == Q8_0) {
        std::memcpy(to.scales + 2 * i, from, 2);
        std::memcpy(to.codes + 32 * i, from + 2, 32);
    } else if constexpr (TYPE == Q4_0 || TYPE == IQ4_NL) {
        std::memcpy(to.scales + 2 * i, from, 2);
        pair_halves<16>(from + 2, to.codes + 16 * i);
    } else if constexpr (TYPE == MXFP4) {
        to.scales[i] = from[0];
        pair_halves<16>(from + 1, to.codes + 16 * i);
    } else if constexpr (TYPE == Q6_K) {
        for (int half = 0; half < 2; ++half)
            pair_halves<64>(from + 64 * half, to.codes + 128 * i + 64 * half);
        upper_bits(from + 128, to.high + 64 * i);
        std::memcpy(to.scales + 16 * i, from + 192, 16);
        std::memcpy(to.factors + 2 * i, from + 208, 2);
    } else {
        std::memcpy(to.factors + 4 * i, from, 4);
        k_scales(from + 4, to.scales + 8 * i, to.zeros + 8 * i);
        if constexpr (TYPE == Q5_K) fifth_bits(from + 16, to.high + 32 * i);
        const uint8_t* codes = from + (TYPE == Q5_K ? 48 : 16);
        for (int quarter = 0; quarter < 4; ++quarter)
            pair_halves<32>(codes + 32 * quarter, to.codes + 128 * i + 32 * quarter);
    }
}

INLINE float half_value(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000u | rest << 13);
    const float value = rest < 0x400 ? float(rest) * 0x1p-24f : from_bits((rest << 13) + 0x38000000u);
    return from_bits(sign | to_bits(value));
}

// Sets bits of some bytes.
template <class N>
INLINE void add(uint8_t* to, N bits) {
    const N sum = read<N>(to) | bits;
    std::memcpy(to, &sum, sizeof sum);
}

// Values of block i: the product of code and scale, less a minimum, each rounded.
template <int BITS, class T>
INLINE void unpack_block(const Planes& from, int64_t i, T* to) {
    constexpr int GROUP = BITS == 6 ? 16 : 32, ZERO = BITS == 6 ? 32 : 0;
    uint8_t codes[WEIGHTS];
    for (int j = 0; j < WEIGHTS / 2; ++j) {
        codes[2 * j] = from.codes[128 * i + j] & 15;
        codes[2 * j + 1] = from.codes[128 * i + j] >> 4;
    }
    if constexpr (BITS == 5)
        for (int j = 0; j < 32; ++j) {  // bit k, at first in byte k, to bit 4 of that byte
            const uint64_t each = from.high[32 * i + j] * 0x0101010101010101u & 0x8040201008040201u;
            const uint64_t bits = ((each + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
            add(codes + 8 * j, bits);
        }
    if constexpr (BITS == 6)
        for (int j = 0; j < 64; ++j) {  // two bits for each byte, to bits 4 and 5
            const uint32_t each = from.high[64 * i + j] * 0x01010101u;
            add(codes + 4 * j, (each & 0x03u) << 4 | (each & 0x0c00u) << 2 | (each & 0x300000u) |
                                   (each & 0xc0000000u) >> 2);
        }
    float values[WEIGHTS], scales[WEIGHTS], minimums[WEIGHTS];
    const float factor = half_value(from.factors + (BITS == 6 ? 2 : 4) * i);
    const float second = BITS == 6 ? 0.0f : half_value(from.factors + 4 * i + 2);
    for (int group = 0; group < WEIGHTS / GROUP; ++group) {
        const int64_t at = WEIGHTS / GROUP * i + group;
        const int stored = BITS == 6 ? int8_t(from.scales[at]) : from.scales[at];
        const float scale = factor * float(stored);
        const float minimum = BITS == 6 ? 0.0f : second * float(from.zeros[at]);
        for (int j = GROUP * group; j < GROUP * (group + 1); ++j) {
            scales[j] = scale;
            minimums[j] = minimum;
        }
    }
    for (int j = 0; j < WEIGHTS; ++j) values[j] = float(codes[j] - ZERO) * scales[j];
    if constexpr (BITS != 6)
        for (int j = 0; j < WEIGHTS; ++j) values[j] = values[j] - minimums[j];
    for (int j = 0; j < WEIGHTS; ++j) store(to + j, values[j]);
}

template <Type TYPE>
INLINE void take_all(const uint8_t* from, int64_t count, const Planes& to) {
    for (int64_t i = 0; i < count; ++i) take_apart<TYPE>(from + i * SIZES[TYPE], i, to);
}

INLINE void take_any(int type, const uint8_t* from, int64_t count, const Planes& to) {
    switch (type) {
        case Q8_0: return take_all<Q8_0>(from, count, to);
        case Q4_0: return take_all<Q4_0>(from, count, to);
        case IQ4_NL: return take_all<IQ4_NL>(from, count, to);
        case MXFP4: return take_all<MXFP4>(from, count, to);
        case Q4_K: return take_all<Q4_K>(from, count, to);
        case Q5_K: return take_all<Q5_K>(from, count, to);
        case Q6_K: return take_all<Q6_K>(from, count, to);
    }
}

// Blocks first to last - 1 of a matrix without gaps.
template <class T>
INLINE void unpack_any(int bits, const Planes& from, int64_t first, int64_t last, T* to) {
    for (int64_t i = first; i < last; ++i) {
        T* const here = to + i * WEIGHTS;
        if (bits == 4) unpack_block<4>(from, i, here);
        else if (bits == 5) unpack_block<5>(from, i, here);
        else unpack_block<6>(from, i, here);
    }
}

INLINE void unpack_to(int bits, const Planes& from, int64_t first, int64_t last, void* to, int bf16) {
    if (bf16) unpack_any(bits, from, first, last, static_cast<uint16_t*>(to));
    else unpack_any(bits, from, first, last, static_cast<float*>(to));
}

#if HAVE_X86
#define AVX2_ONLY __attribute__((target("avx2")))  // without fused products

AVX2_ONLY void take_avx2(int type, const uint8_t* from, int64_t count, const Planes& to) {
    take_any(type, from, count, to);
}
AVX2_ONLY void unpack_avx2(int bits, const Planes& from, int64_t first, int64_t last, void* to,
                           int bf16) {
    unpack_to(bits, from, first, last, to, bf16);
}
#endif

void take_generic(int type, const uint8_t* from, int64_t count, const Planes& to) {
    take_any(type, from, count, to);
}
void unpack_generic(int bits, const Planes& from, int64_t first, int64_t last, void* to, int bf16) {
    unpack_to(bits, from, first, last, to, bf16);
}

bool has_avx2(int isa) {
#if HAVE_X86
    return (isa < 0 ? best_vector_isa() : isa) >= AVX2;
#else
    return false;
#endif
}

}  // namespace

extern "C" {

// `isa`: -1 for the best, else an Isa of this CPU.
void overspill_take_apart(int type, const uint8_t* blocks, int64_t count, const Planes* to, int isa) {
#if HAVE_X86
    if (has_avx2(isa)) return take_avx2(type, blocks, count, *to);
#endif
    take_generic(type, blocks, count, *to);
}

// Writes `count` blocks of 256 weights as bf16 or float32.
void overspill_unpack_k(int bits, const Planes* from, int64_t count, void* out, int bf16, int threads,
                        int isa) {
    constexpr int64_t EACH = 64;  // blocks that a thread takes at once
    const int64_t pieces = (count + EACH - 1) / EACH;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t first = piece * EACH, last = first + EACH < count ? first + EACH : count;
#if HAVE_X86
        if (has_avx2(isa)) {
            unpack_avx2(bits, *from, first, last, out, bf16);
            continue;
        }
#endif
        unpack_generic(bits, *from, first, last, out, bf16);
    }
}
}
