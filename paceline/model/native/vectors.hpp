// Vectors of sixteen 32-bit lanes, by the vector extensions of GCC and Clang: one source for AVX-512, AVX2 and NEON.
//
// A *word* is one lane of a weight, an activation, a key or a value: a float, or two neighbouring bf16 numbers. Products
// combine words lane by lane, so the same code multiplies both types.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace paceline {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Uint32s __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(64)));

// Products work on parts of `Floats`: GCC keeps a vector that takes several registers in memory.
#if defined(__AVX512F__)
constexpr int PART = 16;  // lanes of a register
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif
constexpr int PARTS = LANES / PART;
typedef float PartFloats __attribute__((vector_size(4 * PART)));
typedef int32_t PartInts __attribute__((vector_size(4 * PART)));
typedef uint32_t PartWords __attribute__((vector_size(4 * PART)));
inline PartFloats all_of_part(float x) { return x - PartFloats{}; }

struct bf16 {
    uint16_t bits;
};

template <class V>
inline V load(const void* from) {
    V vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}
template <class V>
inline void store(void* to, V vector) {
    memcpy(to, &vector, sizeof vector);
}
inline Floats all(float x) { return x - Floats{}; }
inline Uint32s all_words(uint32_t x) { return x - Uint32s{}; }
// Prefetches the vector `AHEAD` bytes after this one: products read weights in the order of memory.
constexpr int AHEAD = 2048;
inline void prefetch(const uint32_t* vector) { __builtin_prefetch((const char*)vector + AHEAD); }
constexpr int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Selects lanes of two vectors: 0 to 15 are the first vector's.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define PART_SHUFFLE SHUFFLE
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#define PART_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, PartInts{__VA_ARGS__})
#endif

// a * b + c, rounded once on every instruction set. `a * b + c` is rounded once only where the compiler chooses so.
template <class V>
inline V fused(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
#if defined(__AVX2__)
    typedef __m256 Register;
    auto one = [](Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); };
#elif defined(__ARM_NEON)
    typedef float32x4_t Register;
    auto one = [](Register x, Register y, Register z) { return vfmaq_f32(z, x, y); };
#else
    typedef float Register;
    auto one = [](Register x, Register y, Register z) { return __builtin_fmaf(x, y, z); };
#endif
    constexpr int COUNT = sizeof(V) / sizeof(Register);
    Register x[COUNT], y[COUNT], z[COUNT];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
    for (int i = 0; i < COUNT; i++) z[i] = one(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#endif
}

// Operations on the type of weights, activations, keys and values; everything else is float.
template <class T>
struct Element;

// Sums of products of words, by lane.
template <class T>
struct PartSums {
    PartFloats parts[PARTS] = {};
    void add(const uint32_t* words, uint32_t other) {
        for (int p = 0; p < PARTS; p++)
            parts[p] = Element<T>::multiply_add(parts[p], load<PartWords>(words + PART * p), other - PartWords{});
    }
    Floats floats() const { return load<Floats>(parts); }
};

template <>
struct Element<float> {
    using Sums = PartSums<float>;
    static constexpr int PER_WORD = 1;
    template <class V, class W>
    static V multiply_add(V sum, W a, W b) {
        return fused((V)a, (V)b, sum);
    }
    static Floats widen(const float* from) { return load<Floats>(from); }
    static void narrow(float* to, Floats x) { store(to, x); }
    static float widen_one(float x) { return x; }
};

template <>
struct Element<bf16> {
    using Sums = PartSums<bf16>;
    static constexpr int PER_WORD = 2;
    template <class V, class W>
    static V multiply_add(V sum, W a, W b) {
#ifdef __AVX512BF16__
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum += (V)(a & 0xffff0000u) * (V)(b & 0xffff0000u);
        return sum + (V)(a << 16) * (V)(b << 16);
#endif
    }
    static Floats widen(const bf16* from) {
        return (Floats)(__builtin_convertvector(load<Halves>(from), Uint32s) << 16);
    }
    static void narrow(bf16* to, Floats x) {
#ifdef __AVX512BF16__
        store(to, _mm512_cvtneps_pbh((__m512)x));
#else
        uint32_t words[LANES];
        store(words, x);
        for (int i = 0; i < LANES; i++) {
            const uint32_t bits = words[i], rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
            to[i].bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);  // a NaN stays one
        }
#endif
    }
    static float widen_one(bf16 x) {
        uint32_t bits = (uint32_t)x.bits << 16;
        return load<float>(&bits);
    }
};

template <>
struct Element<int8_t> {
    static constexpr int PER_WORD = 2;  // widened to 16 bits
    // Sums of products, by lane: exact, so equal on every instruction set.
    struct Sums {
#if defined(__AVX2__) && !defined(__AVX512BW__)  // GCC 12 would keep Ints in memory
        __m256i halves[2] = {};
        void add(const uint32_t* words, uint32_t other) {
            const __m256i pair = _mm256_set1_epi32((int)other);
            for (int h = 0; h < 2; h++)
                halves[h] = _mm256_add_epi32(halves[h], _mm256_madd_epi16(load<__m256i>(words + 8 * h), pair));
        }
        Floats floats() const { return __builtin_convertvector(load<Ints>(halves), Floats); }
#else
        Ints sums = {};
        void add(const uint32_t* words, uint32_t other) {
            const Uint32s a = load<Uint32s>(words), b = all_words(other);
#if defined(__AVX512VNNI__)
            sums = (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
            sums += (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
            sums += ((Ints)a >> 16) * ((Ints)b >> 16) + ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16);
#endif
        }
        Floats floats() const { return __builtin_convertvector(sums, Floats); }
#endif
    };
};

// `fused` in the register of the sum. Where sums take most registers, GCC would put it into a's or b's, and spill.
inline PartFloats added_product(PartFloats a, PartFloats b, PartFloats sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return fused(a, b, sum);
#endif
}
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// A number of 16 bits: IEEE 754 binary16.
inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits = magnitude << 13;
    float number;
    if (magnitude >= 0x7c00) {  // infinity or NaN
        bits |= 0x7f800000u;
    } else {
        const float scale = 0x1p112f;  // the exponents' difference; exact for denormals, too
        memcpy(&number, &bits, sizeof number);
        number *= scale;
        memcpy(&bits, &number, sizeof bits);
    }
    bits |= sign;
    memcpy(&number, &bits, sizeof number);
    return number;
}
inline PartFloats load_halves(const void* from) {
#if defined(__AVX512F__)
    return (PartFloats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__)
    return (PartFloats)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__ARM_NEON)
    return (PartFloats)vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from)));
#else
    const uint16_t* halves = (const uint16_t*)from;
    PartFloats numbers;
    for (int i = 0; i < PART; i++) numbers[i] = from_half(halves[i]);
    return numbers;
#endif
}

// Sums and maxima over lanes, always in the same order.
inline float sum_of(Floats x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
template <class V>
inline V larger(V a, V b) { return a > b ? a : b; }
inline float max_of(Floats x) {
    float lanes[LANES], most;
    store(lanes, x);
    most = lanes[0];
    for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// Symmetric integers of x [count], a multiple of 16, and their scale: largest magnitude / largest integer.
template <class Integer>
inline float quantise(const float* x, int count, Integer* to) {
    constexpr float LARGEST = sizeof(Integer) == 1 ? 127 : 32767, to_integer = 12582912.0f;  // see `exp_of`
    Ints most = {};  // bits of magnitudes are in the order of magnitudes, and NaN's are the largest
    for (int i = 0; i < count; i += LANES) most = larger(load<Ints>(x + i) & 0x7fffffff, most);
    most = larger(most, SHUFFLE(most, most, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    most = larger(most, SHUFFLE(most, most, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    most = larger(most, SHUFFLE(most, most, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    most = larger(most, SHUFFLE(most, most, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    const float top = load<float>(&most), inverse = top > 1e-30f ? LARGEST / top : 0.0f;
    typedef Integer Integers __attribute__((vector_size(LANES * sizeof(Integer))));
    for (int i = 0; i < count; i += LANES) {
        const Ints rounded = (Ints)fused(load<Floats>(x + i), all(inverse), all(to_integer)) - 0x4b400000;
        store(to + i, __builtin_convertvector(rounded, Integers));
    }
    return top / LARGEST;
}

// e^x to 2 units in the last place: x = n ln 2 + r, a polynomial of degree 6 for e^r, and n added to the exponent.
inline PartFloats exp_of_part(PartFloats x) {
    const PartFloats least = all_of_part(-87.0f), most = all_of_part(88.0f);
    x = x < least ? least : x;
    x = x > most ? most : x;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    PartFloats n = x * 1.44269504f + to_integer;
    PartInts exponent = (PartInts)n;
    n -= to_integer;
    PartFloats r = x - n * 0.693359375f;  // ln 2 in two parts, so that the product is exact
    r -= n * -2.12194440e-4f;
    PartFloats p = all_of_part(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (PartFloats)((exponent << 23) + 0x3f800000);
}
inline Floats exp_of(Floats x) {
    PartFloats parts[PARTS];
    memcpy(parts, &x, sizeof x);
    for (PartFloats& part : parts) part = exp_of_part(part);
    return load<Floats>(parts);
}
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp_of(-x)); }
inline Floats silu(Floats x) { return x / (1.0f + exp_of(-x)); }
// GELU's approximation by tanh (Hendrycks and Gimpel 2016): 1 + tanh(u) is 2 / (1 + e^-2u).
inline Floats gelu(Floats x) { return x / (1.0f + exp_of(-1.5957691216f * (x + 0.044715f * x * x * x))); }
inline Floats tanh_of(Floats x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

// Of two rows of a square: the lower or the upper half of each pair of D lanes.
template <int D, bool UPPER, size_t... I>
inline PartWords half_of_pairs(PartWords a, PartWords b, std::index_sequence<I...>) {
    return PART_SHUFFLE(a, b, (int)(UPPER ? (I & D ? PART + I : I + D) : (I & D ? PART + I - D : I))...);
}
template <int D = PART / 2>
inline void transpose_part(PartWords (&square)[PART]) {
    constexpr auto lanes = std::make_index_sequence<PART>();
#pragma GCC unroll 16
    for (int i = 0; i < PART; i++)
        if (!(i & D)) {
            const PartWords a = square[i], b = square[i + D];
            square[i] = half_of_pairs<D, false>(a, b, lanes), square[i + D] = half_of_pairs<D, true>(a, b, lanes);
        }
    if constexpr (D > 1) transpose_part<D / 2>(square);
}
// to [16, 16] = the rows from(0) to from(15), of 16 words each, transposed.
template <class From>
inline void transpose(From from, uint32_t* to) {
    for (int p = 0; p < LANES; p += PART)
        for (int q = 0; q < LANES; q += PART) {
            PartWords square[PART];
            for (int i = 0; i < PART; i++) square[i] = load<PartWords>(from(p + i) + q);
            transpose_part(square);
            for (int i = 0; i < PART; i++) store(to + (q + i) * LANES + p, square[i]);
        }
}

}  // namespace paceline
