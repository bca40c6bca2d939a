// Blocks of quantised weights as GGUF files store them: a column's codes and what they are worth. And blocks of our own for
// integers, and numbers of e4m3, with float32 scales by group, which hold the numbers of AWQ, GPTQ, FP8 and
// compressed-tensors.
//
// A *unit* is 256 inputs of formats with two levels of scales, else two blocks of 32. A weight is
// (code - offset) * scale + minimum, or (value of the code) * scale. Bits follow the format's description in llama.cpp
// (ggml/src/ggml-common.h); tests compare every number with the package `gguf`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.hpp"

namespace paceline {

enum BlockType : int32_t {  // part of the C interface: GGUF's numbers of the types; from 1000 on our own; DENSE is T
    DENSE = -1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39, INT4 = 1000, INT4_ZEROS = 1001, INT8 = 1002, INT4_SMALL = 1003, INT8_SMALL = 1004,
    E4M3 = 1005
};

constexpr int BLOCK = 32;  // inputs with a scale of their own; a half of a block may have one

// A column of a unit. Of a format with two levels of scales: `factor` and `minimum_factor` of the unit, with small integers
// by block or by half; of others `scale` and `minimum` by block. 16-bit numbers as the file has them. Of integers by group,
// whose units lie in one group: `group_scale` and `zero`, the code that is worth 0.
struct UnitColumn {
    uint8_t codes[8 * BLOCK];
    uint16_t factor, minimum_factor;
    uint16_t scale[2], minimum[2];
    uint8_t small_scale[16], small_minimum[16];
    float group_scale;
    uint8_t zero;
};

inline uint16_t load_16(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}
// Codes of half a byte: the lower halves of `COUNT` bytes, then the upper halves.
template <int COUNT>
inline void read_nibbles(const uint8_t* __restrict from, uint8_t* __restrict codes) {
    for (int i = 0; i < COUNT; i++) codes[i] = from[i] & 15, codes[i + COUNT] = from[i] >> 4;
}
inline void add_fifth_bits(const uint8_t* from, uint8_t* __restrict codes) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < BLOCK; i++) codes[i] |= (bits >> i & 1) << 4;
}
// Eight scales and eight minima of 6 bits each.
inline void read_six_bits(const uint8_t* from, UnitColumn& to) {
    for (int i = 0; i < 4; i++) {
        to.small_scale[i] = from[i] & 63, to.small_minimum[i] = from[i + 4] & 63;
        to.small_scale[i + 4] = (from[i + 8] & 15) | (from[i] >> 6 << 4);
        to.small_minimum[i + 4] = from[i + 8] >> 4 | (from[i + 4] >> 6 << 4);
    }
}

// Each format has the bytes of a block or a unit in the file, the number of blocks there, and what reads it.
template <BlockType TYPE>
struct FileBlock;

template <bool HAS_MINIMUM, bool HAS_FIFTH_BITS>
struct NibbleBlock {
    static constexpr int FIFTH = HAS_MINIMUM ? 4 : 2, NIBBLES = FIFTH + (HAS_FIFTH_BITS ? 4 : 0);  // where they begin
    static constexpr int BYTES = NIBBLES + BLOCK / 2, BLOCKS = 1;
    static void read(const uint8_t* from, UnitColumn& to, int b) {
        to.scale[b] = load_16(from);
        if constexpr (HAS_MINIMUM) to.minimum[b] = load_16(from + 2);
        read_nibbles<BLOCK / 2>(from + NIBBLES, to.codes + BLOCK * b);
        if constexpr (HAS_FIFTH_BITS) add_fifth_bits(from + FIFTH, to.codes + BLOCK * b);
    }
};
template <>
struct FileBlock<Q4_0> : NibbleBlock<false, false> {};
template <>
struct FileBlock<IQ4_NL> : NibbleBlock<false, false> {};
template <>
struct FileBlock<Q4_1> : NibbleBlock<true, false> {};
template <>
struct FileBlock<Q5_0> : NibbleBlock<false, true> {};
template <>
struct FileBlock<Q5_1> : NibbleBlock<true, true> {};
template <>
struct FileBlock<Q8_0> {
    static constexpr int BYTES = 34, BLOCKS = 1;
    static void read(const uint8_t* from, UnitColumn& to, int b) {
        to.scale[b] = load_16(from);
        for (int i = 0; i < BLOCK; i++) to.codes[BLOCK * b + i] = from[2 + i] ^ 0x80;
    }
};
template <>
struct FileBlock<MXFP4> {  // OCP Microscaling Formats 1.0: a scale is a power of two, here that of doubled values
    static constexpr int BYTES = 17, BLOCKS = 1;
    static void read(const uint8_t* from, UnitColumn& to, int b) {
        const int exponent = from[0];  // of 2^(exponent - 128), as the upper half of a float: below 2^-126 a denormal
        to.scale[b] = (uint16_t)(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
        read_nibbles<16>(from + 1, to.codes + BLOCK * b);
    }
};
template <>
struct FileBlock<Q4_K> {
    static constexpr int BYTES = 144, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        to.factor = load_16(from), to.minimum_factor = load_16(from + 2);
        read_six_bits(from + 4, to);
        for (int i = 0; i < 4; i++) read_nibbles<BLOCK>(from + 16 + BLOCK * i, to.codes + 2 * BLOCK * i);
    }
};
template <>
struct FileBlock<Q5_K> {
    static constexpr int BYTES = 176, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        to.factor = load_16(from), to.minimum_factor = load_16(from + 2);
        read_six_bits(from + 4, to);
        for (int i = 0; i < 4; i++) read_nibbles<BLOCK>(from + 48 + BLOCK * i, to.codes + 2 * BLOCK * i);
        for (int b = 0; b < 8; b++)
            for (int i = 0; i < BLOCK; i++) to.codes[BLOCK * b + i] |= (from[16 + i] >> b & 1) << 4;
    }
};
template <>
struct FileBlock<Q6_K> {
    static constexpr int BYTES = 210, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        const uint8_t *low = from, *high = from + 128;
        for (int n = 0; n < 2; n++) {
            uint8_t* codes = to.codes + 4 * BLOCK * n;
            read_nibbles<2 * BLOCK>(low + 2 * BLOCK * n, codes);
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < BLOCK; i++) codes[BLOCK * j + i] |= (high[BLOCK * n + i] >> 2 * j & 3) << 4;
        }
        memcpy(to.small_scale, from + 192, sizeof to.small_scale);
        to.factor = load_16(from + 208);
    }
};
// Two bits of each of 256 codes.
inline void read_two_bits(const uint8_t* from, uint8_t* codes) {
    for (int n = 0; n < 2; n++)
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < BLOCK; i++) codes[BLOCK * (4 * n + j) + i] = from[BLOCK * n + i] >> 2 * j & 3;
}
template <>
struct FileBlock<Q2_K> {
    static constexpr int BYTES = 84, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        for (int i = 0; i < 16; i++) to.small_scale[i] = from[i] & 15, to.small_minimum[i] = from[i] >> 4;
        read_two_bits(from + 16, to.codes);
        to.factor = load_16(from + 80), to.minimum_factor = load_16(from + 82);
    }
};
template <>
struct FileBlock<Q3_K> {
    static constexpr int BYTES = 110, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        const uint8_t* scales = from + 96;
        read_two_bits(from + 32, to.codes);
        for (int b = 0; b < 8; b++)
            for (int i = 0; i < BLOCK; i++) to.codes[BLOCK * b + i] |= (from[i] >> b & 1) << 2;
        for (int i = 0; i < 16; i++) {
            int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4, high = scales[8 + i % 4] >> 2 * (i / 4) & 3;
            to.small_scale[i] = (uint8_t)((low | high << 4) - 32);
        }
        to.factor = load_16(from + 108);
    }
};
template <>
struct FileBlock<IQ4_XS> {
    static constexpr int BYTES = 136, BLOCKS = 8;
    static void read(const uint8_t* from, UnitColumn& to, int) {
        const int high = load_16(from + 2);
        to.factor = load_16(from);
        for (int b = 0; b < 8; b++) {
            int low = from[4 + b / 2] >> 4 * (b % 2) & 15;
            to.small_scale[b] = (uint8_t)((low | (high >> 2 * b & 3) << 4) - 32);
            read_nibbles<16>(from + 8 + 16 * b, to.codes + BLOCK * b);
        }
    }
};
// Integers by group, in the layout of packed_integers.py: a block repeats the scale and the zero of its group.
template <bool IS_WIDE>
struct IntegerBlock {
    static constexpr int CODES = 5, BYTES = CODES + (IS_WIDE ? BLOCK : BLOCK / 2), BLOCKS = 1;
    static void read(const uint8_t* from, UnitColumn& to, int b) {
        if (b == 0) memcpy(&to.group_scale, from, sizeof to.group_scale), to.zero = from[4];
        if constexpr (IS_WIDE)
            memcpy(to.codes + BLOCK * b, from + CODES, BLOCK);
        else
            read_nibbles<BLOCK / 2>(from + CODES, to.codes + BLOCK * b);
    }
};
template <>
struct FileBlock<INT4> : IntegerBlock<false> {};
template <>
struct FileBlock<INT4_ZEROS> : IntegerBlock<false> {};
template <>
struct FileBlock<INT4_SMALL> : IntegerBlock<false> {};
template <>
struct FileBlock<INT8> : IntegerBlock<true> {};
template <>
struct FileBlock<INT8_SMALL> : IntegerBlock<true> {};
template <>
struct FileBlock<E4M3> {  // in the layout of packed_floats.py: a block repeats the scale of its group
    static constexpr int BYTES = 4 + BLOCK, BLOCKS = 1;
    static void read(const uint8_t* from, UnitColumn& to, int b) {
        if (b == 0) memcpy(&to.group_scale, from, sizeof to.group_scale);
        memcpy(to.codes + BLOCK * b, from + 4, BLOCK);
    }
};

}  // namespace paceline
