// Products with quantised weights, which stay packed: y[r, column] = sum over blocks of 32 inputs of
// (integer dot product) * (the column's scale) * (the row's scale), in the order of blocks.
//
// A row is quantised to int8 by blocks of 32, with scale = largest magnitude / 127: a function of the row alone. A block's
// dot product is an exact integer, so any instruction gives the same. Then every float step is one rounding, by the same
// function for every number of rows. So a row's bits depend neither on the other rows, nor on threads, nor on the
// instruction set.
//
// Weights lie in *panels* of 16 columns. A panel is a sequence of units (see blocks.hpp); a unit has the scales of its
// columns, then the codes of one block after another: eight vectors, of which vector i has inputs 4i to 4i + 3 of each
// column. Codes are unsigned; where a format is signed, an offset is taken from the sum. Bits of a code are in planes:
//
//     4 bits  4 vectors: byte j of vector i in the lower half, of vector i + 4 in the upper
//     2 bits  2 vectors: bits 2t and 2t + 1 of a byte of vector j belong to vector j + 2t
//     1 bit   1 vector: bit i belongs to vector i
//     8 bits  8 vectors
//
// Numbers of e4m3 are no integers of 8 bits: float8.hpp multiplies them.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "blocks.hpp"

namespace paceline {

constexpr int VECTOR_BYTES = 64, BLOCK_VECTORS = 8;
constexpr int PACKED_AHEAD = 4096;  // bytes that products prefetch ahead
#ifdef __AVX512F__
constexpr int MOST_PACKED_ROWS = 16;
#else
constexpr int MOST_PACKED_ROWS = 8;
#endif

// Bits [FROM, FROM + COUNT) of every byte as bits [TO, TO + COUNT), the others 0.
template <int FROM, int COUNT, int TO>
inline PartWords move_bits(PartWords x) {
    constexpr uint32_t mask = ((1u << COUNT) - 1) << TO;
    PartWords moved = TO > FROM ? x << (TO > FROM ? TO - FROM : 0) : x >> (FROM > TO ? FROM - TO : 0);
    return moved & (mask * 0x01010101u);
}

// ---- codes of a block, of a part's columns, as eight vectors of unsigned bytes; `OFFSET` is taken from each ----

struct PlainCodes {
    static int value(int code) { return code; }
};
struct Codes4 : PlainCodes {
    static constexpr int VECTORS = 4, BITS = 4;
    static void load_codes(const uint8_t* p, PartWords* v) {
        for (int j = 0; j < 4; j++) {
            PartWords both = load<PartWords>(p + VECTOR_BYTES * j);
            v[j] = both & 0x0f0f0f0fu;
            v[j + 4] = move_bits<4, 4, 0>(both);
        }
    }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p) {
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < VECTOR_BYTES; i++) p[VECTOR_BYTES * j + i] = (uint8_t)((v[j][i] & 15) | v[j + 4][i] << 4);
    }
};
struct Codes2 : PlainCodes {
    static constexpr int VECTORS = 2, BITS = 2;
    template <int TO = 0>
    static void load_codes(const uint8_t* p, PartWords* v) {
        for (int j = 0; j < 2; j++) {
            PartWords four = load<PartWords>(p + VECTOR_BYTES * j);
            v[j] = move_bits<0, 2, TO>(four), v[j + 2] = move_bits<2, 2, TO>(four);
            v[j + 4] = move_bits<4, 2, TO>(four), v[j + 6] = move_bits<6, 2, TO>(four);
        }
    }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p, int from = 0) {
        memset(p, 0, 2 * VECTOR_BYTES);
        for (int j = 0; j < BLOCK_VECTORS; j++)
            for (int i = 0; i < VECTOR_BYTES; i++) p[VECTOR_BYTES * (j & 1) + i] |= (uint8_t)((v[j][i] >> from & 3) << (j & 6));
    }
};
struct Codes1 {
    static constexpr int VECTORS = 1, BITS = 1;
    template <int TO>
    static void load_codes(const uint8_t* p, PartWords* v) {
        const PartWords all = load<PartWords>(p);
        v[0] = move_bits<0, 1, TO>(all), v[1] = move_bits<1, 1, TO>(all), v[2] = move_bits<2, 1, TO>(all);
        v[3] = move_bits<3, 1, TO>(all), v[4] = move_bits<4, 1, TO>(all), v[5] = move_bits<5, 1, TO>(all);
        v[6] = move_bits<6, 1, TO>(all), v[7] = move_bits<7, 1, TO>(all);
    }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p, int from) {
        memset(p, 0, VECTOR_BYTES);
        for (int j = 0; j < BLOCK_VECTORS; j++)
            for (int i = 0; i < VECTOR_BYTES; i++) p[i] |= (uint8_t)((v[j][i] >> from & 1) << j);
    }
};
template <class Low, class High>
struct TwoPlanes : PlainCodes {
    static constexpr int VECTORS = Low::VECTORS + High::VECTORS, BITS = Low::BITS + High::BITS;
    static void load_codes(const uint8_t* p, PartWords* v) {
        PartWords high[BLOCK_VECTORS];
        Low::load_codes(p, v);
        High::template load_codes<Low::BITS>(p + VECTOR_BYTES * Low::VECTORS, high);
        for (int i = 0; i < BLOCK_VECTORS; i++) v[i] |= high[i];
    }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p) {
        Low::store_codes(v, p);
        High::store_codes(v, p + VECTOR_BYTES * Low::VECTORS, Low::BITS);
    }
};
using Codes3 = TwoPlanes<Codes2, Codes1>;
using Codes5 = TwoPlanes<Codes4, Codes1>;
using Codes6 = TwoPlanes<Codes4, Codes2>;
struct Codes8 : PlainCodes {
    static constexpr int VECTORS = 8, BITS = 8;
    static void load_codes(const uint8_t* p, PartWords* v) {
        for (int i = 0; i < BLOCK_VECTORS; i++) v[i] = load<PartWords>(p + VECTOR_BYTES * i);
    }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p) { memcpy(p, v, BLOCK_VECTORS * VECTOR_BYTES); }
};

// Codes of four bits that number values, which are stored plus 128.
constexpr uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_VALUES[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

inline PartWords look_up(const uint8_t (&values)[16], PartWords codes) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values));
    return (PartWords)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
    return (PartWords)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__ARM_NEON)
    return (PartWords)vqtbl1q_u8(vld1q_u8(values), (uint8x16_t)codes);
#else
    uint8_t bytes[sizeof codes];
    store(bytes, codes);
    for (uint8_t& byte : bytes) byte = values[byte];
    return load<PartWords>(bytes);
#endif
}
template <const uint8_t (&VALUES)[16]>
struct ValueCodes : Codes4 {
    static constexpr int BITS = 8;
    static int value(int code) { return VALUES[code]; }
    static void load_codes(const uint8_t* p, PartWords* v) {
        Codes4::load_codes(p, v);
        for (int i = 0; i < BLOCK_VECTORS; i++) v[i] = look_up(VALUES, v[i]);
    }
};

// Numbers of 8 bits in e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"), not NaN: as a binary16 of the same
// bits a number is 1/256 of its value. An input's 16 columns are neighbours.
struct Float8Codes {
    static constexpr int VECTORS = 8;
    static float value(int code) { return 256.0f * from_half((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)); }
    static void store_codes(const uint8_t (*v)[VECTOR_BYTES], uint8_t* p) {
        for (int i = 0; i < BLOCK; i++)
            for (int c = 0; c < LANES; c++) p[LANES * i + c] = v[i / 4][4 * c + i % 4];
    }
};

// ---- scales of a unit: what a block's two halves are worth ----

struct BlockScales {  // of a part's columns
    PartFloats scale[2], minimum[2];  // by half; [0] alone where a block has one
};
template <class Byte>
inline PartFloats small_numbers(const uint8_t* p) {
#if defined(__AVX512F__)  // GCC 12 converts in three steps
    const __m128i bytes = load<__m128i>(p);
    return (PartFloats)_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return (PartFloats)_mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Byte Small __attribute__((vector_size(PART)));
    return __builtin_convertvector(__builtin_convertvector(load<Small>(p), PartInts), PartFloats);
#endif
}
enum Minimum { NO_MINIMUM, ADDED, TAKEN, ZERO };  // ZERO: the code that is worth 0, taken from each code

// A 16-bit scale, and a minimum if there is one, for each of two blocks.
template <bool HAS_MINIMUM, bool IS_BF16 = false>
struct TwoBlocks {
    static constexpr int BLOCKS = 2, HALVES = 1, BYTES = HAS_MINIMUM ? 128 : 64;
    static constexpr Minimum MINIMUM = HAS_MINIMUM ? ADDED : NO_MINIMUM;
    static PartFloats number(const uint8_t* p) {
        typedef uint16_t Shorts __attribute__((vector_size(2 * PART)));
        if constexpr (IS_BF16) return (PartFloats)(__builtin_convertvector(load<Shorts>(p), PartWords) << 16);
        return load_halves(p);
    }
    struct Factors {
        Factors(const uint8_t*, int) {}
    };
    static void load_scales(const Factors&, const uint8_t* p, int b, int part, BlockScales& s) {
        s.scale[0] = number(p + 32 * b + 2 * PART * part);
        if constexpr (HAS_MINIMUM) s.minimum[0] = load_halves(p + 64 + 32 * b + 2 * PART * part);
    }
    static void store_scales(const UnitColumn& from, int column, uint8_t* p) {
        for (int b = 0; b < 2; b++) {
            memcpy(p + 32 * b + 2 * column, &from.scale[b], 2);
            if constexpr (HAS_MINIMUM) memcpy(p + 64 + 32 * b + 2 * column, &from.minimum[b], 2);
        }
    }
};
// Two 16-bit factors of a unit; a small scale, and a small minimum if there is one, for each block or half.
template <int HALVES_, bool IS_SIGNED, bool HAS_MINIMUM>
struct SuperBlock {
    static constexpr int BLOCKS = 8, HALVES = HALVES_, SMALL = BLOCKS * HALVES * LANES;
    static constexpr int BYTES = 64 + SMALL * (HAS_MINIMUM ? 2 : 1);
    static constexpr Minimum MINIMUM = HAS_MINIMUM ? TAKEN : NO_MINIMUM;
    struct Factors {
        PartFloats scale, minimum;
        Factors(const uint8_t* p, int part) : scale(load_halves(p + 2 * PART * part)) {
            if constexpr (HAS_MINIMUM) minimum = load_halves(p + 32 + 2 * PART * part);
        }
    };
    static void load_scales(const Factors& factors, const uint8_t* p, int b, int part, BlockScales& s) {
        for (int h = 0; h < HALVES; h++) {
            const uint8_t* small = p + 64 + LANES * (b * HALVES + h) + PART * part;
            s.scale[h] = factors.scale * small_numbers<std::conditional_t<IS_SIGNED, int8_t, uint8_t>>(small);
            if constexpr (HAS_MINIMUM) s.minimum[h] = factors.minimum * small_numbers<uint8_t>(small + SMALL);
        }
    }
    static void store_scales(const UnitColumn& from, int column, uint8_t* p) {
        memcpy(p + 2 * column, &from.factor, 2);
        memcpy(p + 32 + 2 * column, &from.minimum_factor, 2);
        for (int i = 0; i < BLOCKS * HALVES; i++) {
            p[64 + LANES * i + column] = from.small_scale[i];
            if constexpr (HAS_MINIMUM) p[64 + SMALL + LANES * i + column] = from.small_minimum[i];
        }
    }
};
// A float32 scale, and a zero if there is one, for all `BLOCKS_` blocks of a unit. The zero is a float, so that it is taken
// from an exact sum in one step: codes, and so sums of a block, are small integers.
template <int BLOCKS_, bool HAS_ZERO>
struct Group {
    static constexpr int BLOCKS = BLOCKS_, HALVES = 1, BYTES = HAS_ZERO ? 128 : 64;
    static constexpr Minimum MINIMUM = HAS_ZERO ? ZERO : NO_MINIMUM;
    struct Factors {
        PartFloats scale, zero;
        Factors(const uint8_t* p, int part) : scale(load<PartFloats>(p + 4 * PART * part)) {
            if constexpr (HAS_ZERO) zero = load<PartFloats>(p + 64 + 4 * PART * part);
        }
    };
    static void load_scales(const Factors& factors, const uint8_t*, int, int, BlockScales& s) {
        s.scale[0] = factors.scale;
        if constexpr (HAS_ZERO) s.minimum[0] = factors.zero;
    }
    static void store_scales(const UnitColumn& from, int column, uint8_t* p) {
        const float zero = from.zero;
        memcpy(p + 4 * column, &from.group_scale, 4);
        if constexpr (HAS_ZERO) memcpy(p + 64 + 4 * column, &zero, 4);
    }
};

template <BlockType TYPE_, class Codes, class Scales, int OFFSET_>
struct Layout : Codes, Scales {
    static constexpr BlockType TYPE = TYPE_;
    static constexpr int OFFSET = OFFSET_;
    static constexpr int UNIT_INPUTS = Scales::BLOCKS * BLOCK;
    static constexpr int SCALE_BYTES = Scales::BYTES, BLOCK_BYTES = Codes::VECTORS * VECTOR_BYTES;
    static constexpr int UNIT_BYTES = SCALE_BYTES + Scales::BLOCKS * BLOCK_BYTES;
    static constexpr int FILE_BYTES = FileBlock<TYPE>::BYTES, FILE_BLOCKS = FileBlock<TYPE>::BLOCKS;
};

using Float8Layout = Layout<E4M3, Float8Codes, Group<4, false>, 0>;

// Calls `f` with the layout of a type as a template argument.
template <class F>
inline auto with_layout(BlockType type, F f) {
    switch (type) {
        case Q4_0: return f.template operator()<Layout<Q4_0, Codes4, TwoBlocks<false>, 8>>();
        case Q4_1: return f.template operator()<Layout<Q4_1, Codes4, TwoBlocks<true>, 0>>();
        case Q5_0: return f.template operator()<Layout<Q5_0, Codes5, TwoBlocks<false>, 16>>();
        case Q5_1: return f.template operator()<Layout<Q5_1, Codes5, TwoBlocks<true>, 0>>();
        case Q2_K: return f.template operator()<Layout<Q2_K, Codes2, SuperBlock<2, false, true>, 0>>();
        case Q3_K: return f.template operator()<Layout<Q3_K, Codes3, SuperBlock<2, true, false>, 4>>();
        case Q4_K: return f.template operator()<Layout<Q4_K, Codes4, SuperBlock<1, false, true>, 0>>();
        case Q5_K: return f.template operator()<Layout<Q5_K, Codes5, SuperBlock<1, false, true>, 0>>();
        case Q6_K: return f.template operator()<Layout<Q6_K, Codes6, SuperBlock<2, true, false>, 32>>();
        case IQ4_NL: return f.template operator()<Layout<IQ4_NL, ValueCodes<IQ4_VALUES>, TwoBlocks<false>, 128>>();
        case IQ4_XS: return f.template operator()<Layout<IQ4_XS, ValueCodes<IQ4_VALUES>, SuperBlock<1, true, false>, 128>>();
        case MXFP4: return f.template operator()<Layout<MXFP4, ValueCodes<FP4_VALUES>, TwoBlocks<false, true>, 128>>();
        case INT4: return f.template operator()<Layout<INT4, Codes4, Group<4, false>, 8>>();
        case INT4_ZEROS: return f.template operator()<Layout<INT4_ZEROS, Codes4, Group<4, true>, 0>>();
        case INT4_SMALL: return f.template operator()<Layout<INT4_SMALL, Codes4, Group<1, true>, 0>>();
        case INT8: return f.template operator()<Layout<INT8, Codes8, Group<4, false>, 128>>();
        case E4M3: return f.template operator()<Float8Layout>();
        case INT8_SMALL: return f.template operator()<Layout<INT8_SMALL, Codes8, Group<1, true>, 0>>();
        default: return f.template operator()<Layout<Q8_0, Codes8, TwoBlocks<false>, 128>>();
    }
}

// Bytes of a column in the file's layout.
inline size_t file_bytes(BlockType type, int in) {
    return with_layout(type, [&]<class L>() { return (size_t)in / (BLOCK * L::FILE_BLOCKS) * L::FILE_BYTES; });
}

// ---- packing ----

inline int units_of(int in, int unit_inputs) { return (in + unit_inputs - 1) / unit_inputs; }
template <class L>
inline size_t panel_bytes(int in) {
    return (size_t)units_of(in, L::UNIT_INPUTS) * L::UNIT_BYTES;
}
// Reads unit `u` of a column in the file's layout; blocks past the column's end are worth 0.
template <class L>
inline void read_unit(const uint8_t* column, int in, int u, UnitColumn& to) {
    const int first = u * L::UNIT_INPUTS / BLOCK, blocks = in / BLOCK;
    for (int b = 0; b < L::BLOCKS; b += L::FILE_BLOCKS)
        if (column && first + b < blocks)
            FileBlock<L::TYPE>::read(column + (size_t)(first + b) / L::FILE_BLOCKS * L::FILE_BYTES, to, b);
        else if (L::TYPE >= INT4)
            break;  // rows are worth 0 there, whatever codes and scales are
        else if (L::FILE_BLOCKS == 1)
            to.scale[b] = to.minimum[b] = 0;
        else
            to = {};
}
// columns [16]: in the file's layout, null for one that is not there.
template <class L>
inline void pack_panel(const uint8_t* const* columns, int in, uint8_t* to) {
    UnitColumn unit[LANES] = {};
    for (int u = 0; u < units_of(in, L::UNIT_INPUTS); u++, to += L::UNIT_BYTES) {
        memset(to, 0, L::SCALE_BYTES);
        for (int c = 0; c < LANES; c++) {
            read_unit<L>(columns[c], in, u, unit[c]);
            L::store_scales(unit[c], c, to);
        }
        for (int b = 0; b < L::BLOCKS; b++) {
            alignas(64) uint8_t vectors[BLOCK_VECTORS][VECTOR_BYTES];
            for (int c = 0; c < LANES; c++)
                for (int i = 0; i < BLOCK_VECTORS; i++) memcpy(&vectors[i][4 * c], unit[c].codes + BLOCK * b + 4 * i, 4);
            L::store_codes(vectors, to + L::SCALE_BYTES + (size_t)b * L::BLOCK_BYTES);
        }
    }
}
// The numbers of a column in the file's layout: out [in].
inline void dequantise(BlockType type, const uint8_t* column, int in, float* out) {
    with_layout(type, [&]<class L>() {
        alignas(64) uint8_t scales[L::SCALE_BYTES] = {};
        UnitColumn unit = {};
        for (int u = 0; u < units_of(in, L::UNIT_INPUTS); u++) {
            read_unit<L>(column, in, u, unit);
            L::store_scales(unit, 0, scales);
            for (int b = 0; b < L::BLOCKS && u * L::UNIT_INPUTS + b * BLOCK < in; b++) {
                BlockScales s = {};
                L::load_scales(typename L::Factors(scales, 0), scales, b, 0, s);
                for (int i = 0; i < BLOCK; i++) {
                    const int h = L::HALVES == 2 ? i / (BLOCK / 2) : 0;
                    const auto code = L::value(unit.codes[BLOCK * b + i]) - L::OFFSET;
                    const float minimum = L::MINIMUM == NO_MINIMUM ? 0.0f : s.minimum[h][0];
                    float& number = out[u * L::UNIT_INPUTS + b * BLOCK + i];
                    if constexpr (L::MINIMUM == ZERO)
                        number = ((float)code - minimum) * s.scale[h][0];
                    else
                        number = __builtin_fmaf((float)code, s.scale[h][0], L::MINIMUM == TAKEN ? -minimum : minimum);
                }
            }
        }
    });
}

// ---- rows ----

// Rows in groups of at most MOST_PACKED_ROWS, so that a block of weights is unpacked once for a group. A group of n rows is
// a sequence of records, one a block: codes int8 [n][32]; scale, scale * sum of codes, float [n] each; and, int32 [n] each,
// minus the sum of codes, of those of the first half, and of those of the second.
class QuantisedRows {
   public:
    static constexpr int PAD = 8 * BLOCK;

    static size_t record(int n) { return (size_t)n * (BLOCK + 5 * 4); }
    // The rows of a product, in the fewest groups; the last may have more rows than there are.
    static int group_size(int rows, int group) {
        const int left = rows - group * MOST_PACKED_ROWS;
        for (int size : {1, 2, 3, 4, 6, 8, 12})
            if (size >= left && size <= MOST_PACKED_ROWS) return size;
        return MOST_PACKED_ROWS;
    }

    void resize(int rows, int in) {
        rows_ = rows, blocks_ = (in + PAD - 1) / PAD * (PAD / BLOCK);
        bytes_.resize(record(rows + MOST_PACKED_ROWS) * blocks_ + VECTOR_BYTES);
        for (int g = 0; g < groups(); g++)  // rows that are not there are worth 0
            for (int r = rows - g * MOST_PACKED_ROWS; r < size(g); r++)
                for (int b = 0; b < blocks_; b++) clear(g, r, b);
        for (int r = 0; r < rows; r++)  // so are blocks that are not there
            for (int b = (in + BLOCK - 1) / BLOCK; b < blocks_; b++) clear(r / MOST_PACKED_ROWS, r % MOST_PACKED_ROWS, b);
    }
    int groups() const { return (rows_ + MOST_PACKED_ROWS - 1) / MOST_PACKED_ROWS; }
    int size(int group) const { return group_size(rows_, group); }
    const uint8_t* group(int g) const { return bytes_.data() + record(g * MOST_PACKED_ROWS) * blocks_; }
    int rows() const { return rows_; }

    // Quantises numbers [begin, end) of a row, whole blocks.
    void quantise(int row, const float* x, int begin, int end) {
        for (int b = begin / BLOCK; b * BLOCK < end; b++) quantise_block(row / MOST_PACKED_ROWS, row % MOST_PACKED_ROWS, b, x + b * BLOCK);
    }

   private:
    uint8_t* at(int g, int b) { return bytes_.data() + record(g * MOST_PACKED_ROWS) * blocks_ + record(size(g)) * b; }
    void clear(int g, int r, int b) {
        static constexpr float zeros[BLOCK] = {};
        quantise_block(g, r, b, zeros);
    }
    void quantise_block(int g, int r, int b, const float* x) {
        uint8_t* to = at(g, b);
        const int n = size(g);
        int8_t* codes = (int8_t*)to + BLOCK * r;
        Floats low = load<Floats>(x), high = load<Floats>(x + LANES);
        const float top = max_of(larger(larger(low, -low), larger(high, -high)));
        const float inverse = top > 0 ? 127.0f / top : 0.0f, scale = top / 127.0f;
        int32_t sums[2] = {};
        const Floats halves[2] = {low, high};
        for (int h = 0; h < 2; h++) {
            const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
            const Ints rounded = (Ints)fused(halves[h], all(inverse), all(to_integer)) - 0x4b400000;
            typedef int8_t Small __attribute__((vector_size(LANES)));
            store(codes + LANES * h, __builtin_convertvector(rounded, Small));
            for (int i = 0; i < LANES; i++) sums[h] += rounded[i];
        }
        float* floats = (float*)(to + BLOCK * n);
        int32_t* integers = (int32_t*)(floats + 2 * n);
        floats[r] = scale;
        floats[n + r] = scale * (float)(sums[0] + sums[1]);
        integers[r] = -(sums[0] + sums[1]);
        integers[n + r] = -sums[0];
        integers[2 * n + r] = -sums[1];
    }

    int rows_ = 0, blocks_ = 0;
    std::vector<uint8_t> bytes_;
};

// ---- products ----

// Codes of eight bits are signed, less 128, where an instruction takes no unsigned ones or the sums of two products would
// not fit 16 bits.
#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD))
constexpr bool SIGNS_WIDE = false;
#else
constexpr bool SIGNS_WIDE = true;
#endif
template <class L>
constexpr bool IS_SIGNED_HERE = SIGNS_WIDE && L::BITS == 8;

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#ifdef __AVX512BW__
typedef __m512i PartBytes;
inline PartBytes every_word(const uint8_t* four) { return _mm512_set1_epi32(load<int32_t>(four)); }
inline PartBytes pairs(PartBytes codes, PartBytes x) { return _mm512_maddubs_epi16(codes, x); }  // 16 bits, which saturate
inline PartBytes add_pairs(PartBytes a, PartBytes b) { return _mm512_add_epi16(a, b); }
inline PartBytes sum_pairs(PartBytes a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline PartBytes magnitude(PartBytes a) { return _mm512_abs_epi8(a); }
inline PartBytes with_sign(PartBytes x, PartBytes of) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(of), __m512i{}, x); }
#else
typedef __m256i PartBytes;
inline PartBytes every_word(const uint8_t* four) { return _mm256_set1_epi32(load<int32_t>(four)); }
inline PartBytes pairs(PartBytes codes, PartBytes x) { return _mm256_maddubs_epi16(codes, x); }
inline PartBytes add_pairs(PartBytes a, PartBytes b) { return _mm256_add_epi16(a, b); }
inline PartBytes sum_pairs(PartBytes a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
inline PartBytes magnitude(PartBytes a) { return _mm256_abs_epi8(a); }
inline PartBytes with_sign(PartBytes x, PartBytes of) { return _mm256_sign_epi8(x, of); }
#endif
#endif

// sum + the dot products of a part's columns, VECTORS * 4 codes each, with a row's.
template <int BITS, int VECTORS>
inline PartInts dot(PartInts sum, const PartWords* codes, const uint8_t* x) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++)
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes[i]), "m"(*(const int32_t*)(x + 4 * i)));
#elif defined(__AVX2__)
    if constexpr (BITS == 8) {  // of two magnitudes up to 128, so that 16 bits hold the sum
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            const PartBytes code = (PartBytes)codes[i];
            sum += (PartInts)sum_pairs(pairs(magnitude(code), with_sign(every_word(x + 4 * i), code)));
        }
        return sum;
    }
    constexpr int AT_ONCE = std::min(VECTORS, 32767 / (2 * 127 * ((1 << BITS) - 1)));  // 16 bits hold so many sums
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i += AT_ONCE) {
        PartBytes some = pairs((PartBytes)codes[i], every_word(x + 4 * i));
        for (int j = i + 1; j < std::min(VECTORS, i + AT_ONCE); j++)
            some = add_pairs(some, pairs((PartBytes)codes[j], every_word(x + 4 * j)));
        sum += (PartInts)sum_pairs(some);
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int i = 0; i < VECTORS; i++)
        sum = (PartInts)vdotq_s32((int32x4_t)sum, (int8x16_t)codes[i], vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(x + 4 * i))));
#else
    for (int i = 0; i < VECTORS; i++)
        for (int j = 0; j < 4; j++) sum += (PartInts)(codes[i] >> 8 * j & 255u) * (int32_t)(int8_t)x[4 * i + j];
#endif
    return sum;
}

// One step of a row's sums: every float operation of a product. halves: minus the sums of the row's codes of the first half
// and, n further, of the second; n before, of both.
template <class L>
inline PartFloats add_block(PartFloats sum, const PartInts (&dots)[2], const BlockScales& s, float scale, float scaled_sum,
                            const int32_t* halves, int n) {
    PartFloats t = __builtin_convertvector(dots[0], PartFloats);
    if constexpr (L::MINIMUM == ZERO) t = fused(s.minimum[0], all_of_part((float)halves[-n]), t);
    t = t * s.scale[0];
    if constexpr (L::HALVES == 2) t = fused(__builtin_convertvector(dots[1], PartFloats), s.scale[1], t);
    sum = fused(t, all_of_part(scale), sum);
    if constexpr (L::MINIMUM == NO_MINIMUM || L::MINIMUM == ZERO) return sum;
    if constexpr (L::HALVES == 2) {  // the halves' sums are negative: the minimum is taken
        PartFloats m = s.minimum[0] * (float)halves[0];
        return fused(fused(s.minimum[1], all_of_part((float)halves[n]), m), all_of_part(scale), sum);
    }
    return fused(s.minimum[0], all_of_part(L::MINIMUM == TAKEN ? -scaled_sum : scaled_sum), sum);
}

// One panel for a group of R rows. y: of the panel's columns and the first row.
template <class L, int R>
inline void panel_product(const uint8_t* w, int units, const uint8_t* x, int rows, const float* bias, float* y, size_t stride, bool add) {
    constexpr int OFFSET = L::OFFSET - (IS_SIGNED_HERE<L> ? 128 : 0), HALF = BLOCK_VECTORS / 2;
    PartFloats sums[PARTS][R] = {};
    for (int u = 0; u < units; u++, w += L::UNIT_BYTES) {
#pragma GCC unroll 1
        for (int b = 0; b < L::BLOCKS; b++, x += QuantisedRows::record(R)) {
            constexpr int SHARE = (L::UNIT_BYTES + VECTOR_BYTES * L::BLOCKS - 1) / (VECTOR_BYTES * L::BLOCKS);
            for (int i = 0; i < SHARE; i++) __builtin_prefetch(w + PACKED_AHEAD + VECTOR_BYTES * (b * SHARE + i));
            const float* floats = (const float*)(x + BLOCK * R);
            const int32_t* integers = (const int32_t*)(floats + 2 * R);
#pragma GCC unroll 1
            for (int part = 0; part < PARTS; part++) {
                const uint8_t* codes = x;
                asm("" : "+r"(codes));  // or GCC loads the inputs of all rows before, which do not fit the registers
                PartWords v[BLOCK_VECTORS];
                BlockScales s;
                L::load_codes(w + L::SCALE_BYTES + b * L::BLOCK_BYTES + 4 * PART * part, v);
                if constexpr (IS_SIGNED_HERE<L>)
                    for (PartWords& codes : v) codes ^= 0x80808080u;
                L::load_scales(typename L::Factors(w, part), w, b, part, s);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const uint8_t* row = codes + BLOCK * r;
                    // minus offset * sum of the row's codes: `integers` has minus the sum
                    PartInts dots[2] = {};
                    if constexpr (OFFSET) dots[0] += OFFSET * integers[(L::HALVES == 2 ? R : 0) + r];
                    if constexpr (L::HALVES == 2) {
                        if constexpr (OFFSET) dots[1] += OFFSET * integers[2 * R + r];
                        dots[0] = dot<L::BITS, HALF>(dots[0], v, row);
                        dots[1] = dot<L::BITS, HALF>(dots[1], v + HALF, row + 4 * HALF);
                    } else {
                        dots[0] = dot<L::BITS, BLOCK_VECTORS>(dots[0], v, row);
                    }
                    sums[part][r] = add_block<L>(sums[part][r], dots, s, floats[r], floats[R + r], integers + R + r, R);
                }
            }
        }
    }
    for (int r = 0; r < R && r < rows; r++)
        for (int part = 0; part < PARTS; part++) {
            float* to = y + r * stride + PART * part;
            PartFloats sum = sums[part][r] + load<PartFloats>(bias + PART * part);
            store(to, add ? load<PartFloats>(to) + sum : sum);
        }
}
template <class L>
inline void group_product(const uint8_t* w, int units, const uint8_t* x, int n, int rows, const float* bias, float* y, size_t stride,
                          bool add) {
    auto of_size = [&]<int R>() { panel_product<L, R>(w, units, x, rows, bias, y, stride, add); };
    switch (n) {
        case 1: return of_size.template operator()<1>();
        case 2: return of_size.template operator()<2>();
        case 3: return of_size.template operator()<3>();
        case 4: return of_size.template operator()<4>();
        case 6: return of_size.template operator()<6>();
#ifdef __AVX512F__
        case 8: return of_size.template operator()<8>();
        case 12: return of_size.template operator()<12>();
#endif
        default: return of_size.template operator()<MOST_PACKED_ROWS>();
    }
}

}  // namespace paceline
