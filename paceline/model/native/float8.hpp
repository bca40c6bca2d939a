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

#if defined(__AVX512F__)
constexpr int FLOAT8_ROWS = 8;
#else
constexpr int FLOAT8_ROWS = 2;
#endif
// Numbers of e4m3, divided by 256.
inline PartFloats load_float8(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(p)), 7);
    return (PartFloats)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbf80)));
#elif defined(__AVX2__)
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return (PartFloats)_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16((short)0xbf80)));
#else
    typedef uint8_t Small __attribute__((vector_size(PART)));
    const PartWords bits = __builtin_convertvector(load<Small>(p), PartWords);
    return (PartFloats)((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * 0x1p112f;  // the exponents' difference, less 8
#endif
}
// Two neighbouring inputs, each in all lanes.
inline void load_two(const float* x, PartFloats (&in)[2]) {
    for (int j = 0; j < 2; j++) in[j] = x[j] - PartFloats{};
}
inline void load_two(const bf16* x, PartFloats (&in)[2]) {
    const PartWords two = load<uint32_t>(x) - PartWords{};
    in[0] = (PartFloats)(two << 16), in[1] = (PartFloats)(two & 0xffff0000u);
}

// Adds a unit of `n` inputs to the totals [ROWS, 16] of rows x [ROWS, width]. W: uint8_t, or float for decoded weights.
template <int ROWS, class T, class W>
inline void add_float8_unit(const W* weights, const PartFloats* scales, int n, const T* x, size_t width, float* totals) {
    PartFloats sums[2][ROWS][PARTS] = {};
    for (int i = 0; i < n; i += 2) {
        PartFloats w[2][PARTS];
        for (int j = 0; j < 2; j++)
            for (int p = 0; p < PARTS; p++) {
                const W* from = weights + LANES * (i + j) + PART * p;
                if constexpr (sizeof(W) == 1) w[j][p] = load_float8(from);
                else w[j][p] = load<PartFloats>(from);
            }
        if constexpr (sizeof(W) == 1) __builtin_prefetch(weights + LANES * i + PACKED_AHEAD);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            PartFloats in[2];
            load_two(x + r * width + i, in);
            for (int j = 0; j < 2; j++)
                for (int p = 0; p < PARTS; p++) sums[j][r][p] = fused(w[j][p], in[j], sums[j][r][p]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) {
            float* to = totals + LANES * r + PART * p;
            store(to, fused(sums[0][r][p] + sums[1][r][p], scales[p], load<PartFloats>(to)));
        }
}
// The same for any number of rows.
template <int ROWS = FLOAT8_ROWS, class T, class W>
inline void add_float8_rows(const W* weights, const PartFloats* scales, int n, const T* x, size_t width, int rows,
                            float* totals) {
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
        PartFloats scales[PARTS];
        for (int p = 0; p < PARTS; p++) scales[p] = load<PartFloats>(panel + 4 * PART * p) * 256.0f;
        if (rows <= FLOAT8_ROWS) {
            add_float8_rows(codes, scales, n, x + first, width, rows, totals.data());
        } else {
            for (int i = 0; i < n * LANES; i += LANES) {
                __builtin_prefetch(codes + i + PACKED_AHEAD);
                for (int p = i; p < i + LANES; p += PART) store(decoded + p, load_float8(codes + p));
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
