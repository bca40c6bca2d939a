// bf16 products with Intel's AMX (Intel, "Architecture Instruction Set Extensions", chapter 3): a tile register holds up to
// 16 rows of 16 words, and one instruction adds the product of two tiles to a third.
//
// An element of the result depends on its row and column alone, not on the number of rows: every sum runs over the input in
// steps of 16 words, in order. Denormals count as zero.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "vectors.hpp"

namespace paceline {

constexpr unsigned DENORMALS_ARE_ZERO = 0x40;  // in the vector control register

// Intrinsics take literal register numbers: 0 to 3 hold the sums of one block each, 4 inputs and 5 weights, 6 and 7 the
// inputs and weights of the last 8 words of an odd width.
#define ADD_PRODUCT(block, inputs, block_weights)                     \
    if constexpr (BLOCKS > block) {                                   \
        _tile_loadd(block_weights, weights + block * LANES, BYTES);   \
        _tile_dpbf16ps(block, inputs, block_weights);                 \
    }

class Tiles {
   public:
    static constexpr int ROWS = 16, WORDS = 16;  // of a full tile

    // Prepares this thread's tile registers for products of `rows` rows.
    explicit Tiles(int rows) {
        constexpr int WORD_BYTES = sizeof(uint32_t), TAIL = WORDS / 2;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        auto shape = [&](int tile, int height, int words) {
            shapes.rows[tile] = (uint8_t)height;
            shapes.row_bytes[tile] = (uint16_t)(words * WORD_BYTES);
        };
        for (int block = 0; block < 4; block++) shape(block, rows, LANES);
        shape(4, rows, WORDS);
        shape(5, WORDS, LANES);
        shape(6, rows, TAIL);
        shape(7, TAIL, LANES);
        // GCC 12 declares that this reads 8 bytes, and may drop the stores of the others.
        asm volatile("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;

    // sums [rows, BLOCKS * LANES], rows `stride` bytes apart, of x [rows, words] with weights [words, BLOCKS * LANES].
    // `words`: a multiple of 8.
    template <int BLOCKS>
    void multiply(const uint32_t* x, const uint32_t* weights, int words, float* sums, size_t stride) const {
        constexpr int WIDTH = BLOCKS * LANES, BYTES = WIDTH * sizeof(float);
        const size_t row_bytes = words * sizeof(uint32_t);
        asm volatile("" : : : "memory");  // GCC does not say that loads of tiles read memory: x is written by then
        _tile_zero(0);
        if constexpr (BLOCKS > 1) _tile_zero(1);
        if constexpr (BLOCKS > 2) _tile_zero(2);
        if constexpr (BLOCKS > 3) _tile_zero(3);
        int i = 0;
        for (; i + WORDS <= words; i += WORDS, weights += WORDS * WIDTH) {
            for (int line = 0; line < WORDS * BLOCKS; line++) prefetch(weights + line * LANES);
            _tile_loadd(4, x + i, row_bytes);
            ADD_PRODUCT(0, 4, 5);
            ADD_PRODUCT(1, 4, 5);
            ADD_PRODUCT(2, 4, 5);
            ADD_PRODUCT(3, 4, 5);
        }
        if (i < words) {
            _tile_loadd(6, x + i, row_bytes);
            ADD_PRODUCT(0, 6, 7);
            ADD_PRODUCT(1, 6, 7);
            ADD_PRODUCT(2, 6, 7);
            ADD_PRODUCT(3, 6, 7);
        }
        _tile_stored(0, sums, stride);
        if constexpr (BLOCKS > 1) _tile_stored(1, sums + LANES, stride);
        if constexpr (BLOCKS > 2) _tile_stored(2, sums + 2 * LANES, stride);
        if constexpr (BLOCKS > 3) _tile_stored(3, sums + 3 * LANES, stride);
    }
};

#undef ADD_PRODUCT

// The same sums of a single row, bit for bit, with vectors, which read memory faster than tiles. Within each step of 16
// words, the low and the high numbers of words have separate sums of fused multiply-adds.
template <int BLOCKS>
inline void multiply_row(const uint32_t* x, const uint32_t* weights, int words, float* sums) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON | DENORMALS_ARE_ZERO);
    Floats totals[BLOCKS] = {};
    for (int i = 0; i < words;) {
        Floats low[BLOCKS] = {}, high[BLOCKS] = {};
        for (int end = std::min(i + Tiles::WORDS, words); i < end; i++) {
            const Uint32s input = all_words(x[i]);
            for (int b = 0; b < BLOCKS; b++, weights += LANES) {
                const Uint32s weight = load<Uint32s>(weights);
                prefetch(weights);
                low[b] = fused((Floats)(weight << 16), (Floats)(input << 16), low[b]);
                high[b] = fused((Floats)(weight & 0xffff0000u), (Floats)(input & 0xffff0000u), high[b]);
            }
        }
        for (int b = 0; b < BLOCKS; b++) totals[b] += low[b] + high[b];
    }
    for (int b = 0; b < BLOCKS; b++) store(sums + b * LANES, totals[b]);
    _mm_setcsr(control);
}

}  // namespace paceline
