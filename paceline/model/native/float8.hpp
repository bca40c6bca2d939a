// Products with weights in e4m3, which stay packed: y[r, column] = sum over units of 128 inputs of
// (sum of weight * input) * (the column's scale).
//
// Rows are of type T, and weights become floats, which is exact. A unit has one sum of the even inputs and one of the odd;
// every step is one fused multiply-add. So a row's bits depend neither on the other rows, nor on threads, nor on the
// instruction set. A unit that many rows share is decoded once.
#pragma once
#include <vector>

#include "packed.hpp"

namespace paceline {

// A register of floats: GCC keeps longer vectors in memory.
#if defined(__AVX512F__)
constexpr int REGISTER = 16, FLOAT8_ROWS = 8;
#elif defined(__AVX2__)
constexpr int REGISTER = 8, FLOAT8_ROWS = 2;
#else
constexpr int REGISTER = 4, FLOAT8_ROWS = 2;
#endif
typedef float Register __attribute__((vector_size(4 * REGISTER)));
typedef uint32_t Words __attribute__((vector_size(4 * REGISTER)));

inline Register fused_register(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < REGISTER; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}
// Numbers of e4m3, divided by 256.
inline Register load_float8(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(p)), 7);
    return (Register)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbf80)));
#elif defined(__AVX2__)
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return (Register)_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16((short)0xbf80)));
#else
    typedef uint8_t Small __attribute__((vector_size(REGISTER)));
    const Words bits = __builtin_convertvector(load<Small>(p), Words);
    return (Register)((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * 0x1p112f;  // the exponents' difference, less 8
#endif
}
// Two neighbouring inputs, each in all lanes.
inline void load_two(const float* x, Register (&in)[2]) {
    for (int j = 0; j < 2; j++) in[j] = x[j] - Register{};
}
inline void load_two(const bf16* x, Register (&in)[2]) {
    const Words two = load<uint32_t>(x) - Words{};
    in[0] = (Register)(two << 16), in[1] = (Register)(two & 0xffff0000u);
}

// Adds a unit of `n` inputs to the totals [ROWS, 16] of rows x [ROWS, width]. W: uint8_t, or float for decoded weights.
template <int ROWS, class T, class W>
inline void add_float8_unit(const W* weights, const Register* scales, int n, const T* x, size_t width, float* totals) {
    constexpr int PARTS = LANES / REGISTER;
    Register sums[2][ROWS][PARTS] = {};
    for (int i = 0; i < n; i += 2) {
        Register w[2][PARTS];
        for (int j = 0; j < 2; j++)
            for (int p = 0; p < PARTS; p++) {
                const W* from = weights + LANES * (i + j) + REGISTER * p;
                if constexpr (sizeof(W) == 1) w[j][p] = load_float8(from);
                else w[j][p] = load<Register>(from);
            }
        if constexpr (sizeof(W) == 1) __builtin_prefetch(weights + LANES * i + PACKED_AHEAD);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Register in[2];
            load_two(x + r * width + i, in);
            for (int j = 0; j < 2; j++)
                for (int p = 0; p < PARTS; p++) sums[j][r][p] = fused_register(w[j][p], in[j], sums[j][r][p]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) {
            float* to = totals + LANES * r + REGISTER * p;
            store(to, fused_register(sums[0][r][p] + sums[1][r][p], scales[p], load<Register>(to)));
        }
}
// The same for any number of rows.
template <int ROWS = FLOAT8_ROWS, class T, class W>
inline void add_float8_rows(const W* weights, const Register* scales, int n, const T* x, size_t width, int rows, float* totals) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * width, totals += ROWS * LANES)
        add_float8_unit<ROWS>(weights, scales, n, x, width, totals);
    if constexpr (ROWS > 1) add_float8_rows<ROWS / 2>(weights, scales, n, x, width, rows, totals);
}

// One panel. x [rows, width] of `in` inputs; bias [16]; y: of the panel's columns and the first row.
template <class T>
inline void float8_product(const uint8_t* panel, int in, const T* x, size_t width, int rows, const float* bias, float* y,
                           size_t stride, bool add) {
    using L = Float8Layout;
    thread_local std::vector<float> totals;
    totals.assign((size_t)rows * LANES, 0.0f);
    alignas(64) float decoded[L::UNIT_INPUTS * LANES];
    for (int first = 0; first < in; first += L::UNIT_INPUTS, panel += L::UNIT_BYTES) {
        const int n = std::min(L::UNIT_INPUTS, in - first);
        const uint8_t* codes = panel + L::SCALE_BYTES;
        Register scales[LANES / REGISTER];
        for (int p = 0; p < LANES / REGISTER; p++) scales[p] = load<Register>(panel + 4 * REGISTER * p) * 256.0f;
        if (rows <= FLOAT8_ROWS) {
            add_float8_rows(codes, scales, n, x + first, width, rows, totals.data());
        } else {
            for (int i = 0; i < n * LANES; i += LANES) {
                __builtin_prefetch(codes + i + PACKED_AHEAD);
                for (int p = i; p < i + LANES; p += REGISTER) store(decoded + p, load_float8(codes + p));
            }
            add_float8_rows(decoded, scales, n, x + first, width, rows, totals.data());
        }
    }
    for (int r = 0; r < rows; r++) {
        float* to = y + r * stride;
        const Floats sum = load<Floats>(&totals[LANES * r]) + load<Floats>(bias);
        store(to, add ? load<Floats>(to) + sum : sum);
    }
}

}  // namespace paceline
