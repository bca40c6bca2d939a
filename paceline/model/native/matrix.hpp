// A weight matrix in a layout for products with few rows: y[r, column] (+)= sum over i of x[r, i] * weight[column, i].
// Columns are of type T, or quantised (see packed.hpp and float8.hpp); a matrix may have both.
//
// Columns are in panels of up to 64; within a panel the weights of one input word are contiguous. So a product reads the
// weights once, in the order of memory. Each sum runs over the input in one order, which does not depend on the number of
// rows, the thread, or how columns are distributed: a result depends on its own row alone.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "float8.hpp"
#include "packed.hpp"
#include "thread_pool.hpp"
#include "vectors.hpp"
#ifdef __AMX_BF16__
#include "amx.hpp"
#endif

#ifndef __has_feature  // a macro of Clang
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes)
#endif

namespace paceline {

// Memory that is freed all at once, in huge pages where the kernel has them.
class Arena {
   public:
    Arena() = default;
    Arena(Arena&&) = default;
    ~Arena() {
        for (auto [memory, bytes] : chunks_) {
            ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
            munmap(memory, bytes);
        }
    }
    uint32_t* allocate(size_t count) {
        size_t bytes = (count * sizeof(uint32_t) / 64 + 1) * 64;  // the gap lets AddressSanitizer detect overruns
        if (used_ + bytes > size_) grow(bytes);
        char* taken = chunk_ + used_;
        used_ += bytes;
        ASAN_UNPOISON_MEMORY_REGION(taken, count * sizeof(uint32_t));
        return (uint32_t*)taken;
    }

   private:
    void grow(size_t bytes) {
        constexpr size_t PAGE = 2 << 20, CHUNK = 16 << 20;
        size_t mapped = (std::max(bytes + AHEAD, CHUNK) + 2 * PAGE - 1) / PAGE * PAGE;
        void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        chunks_.push_back({memory, mapped});
        chunk_ = (char*)(((uintptr_t)memory + PAGE - 1) / PAGE * PAGE);
        size_ = (char*)memory + mapped - chunk_ - AHEAD;
        used_ = 0;
        ASAN_POISON_MEMORY_REGION(chunk_, size_ + AHEAD);
#ifdef MADV_HUGEPAGE
        madvise(chunk_, size_, MADV_HUGEPAGE);
#endif
    }

    std::vector<std::pair<void*, size_t>> chunks_;
    char* chunk_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

constexpr int SOME_ROWS = 4;  // from here on arithmetic takes about as long as reading weights
#ifdef __AVX512F__
constexpr int MOST_BLOCKS = 4, MOST_ROWS = 6;  // 24 of 32 registers hold sums
#else
constexpr int MOST_BLOCKS = 1, MOST_ROWS = SOME_ROWS - 1;  // a vector takes two registers of AVX2, four of NEON
#endif
constexpr int MOST_TILE_ROWS = 6;  // of many rows: 12 of 16 registers hold sums, with AVX2

// Rows that a product takes, in the form of its matrix: [rows, padded in] of T, or quantised; null for one that no column needs.
template <class T>
struct ProductInput {
    const T* dense;
    const QuantisedRows* quantised;
    int rows;
};

template <class T>
class Matrix {
   public:
    struct Source {  // columns [count, in] as PyTorch has them, or GGUF's blocks; and their biases [count] or null
        const void* weights;
        BlockType type;
        int count;
        const float* bias;
    };

    Matrix() = default;
    // The columns of each source start at a multiple of `unit`, and no unit is split between two parts. `in`: numbers per
    // input row, which is padded with zeros to `padded_in`. arenas[p] holds the weights of part p, which that part packs.
    Matrix(ThreadPool& pool, std::vector<Arena>& arenas, const std::vector<Source>& sources, int unit, int in, int padded_in)
        : words_(padded_in / Element<T>::PER_WORD), in_(in) {
        std::vector<Column> columns;
        for (const Source& source : sources) {
            const size_t bytes = source.type == DENSE ? in * sizeof(T) : file_bytes(source.type, in);
            for (int i = 0; i < padded(source.count, unit); i++) {
                bool there = i < source.count;
                columns.push_back({there ? (const uint8_t*)source.weights + i * bytes : nullptr, source.type});
                bias_.push_back(there && source.bias ? source.bias[i] : 0.0f);
            }
            (source.type == DENSE || source.type == E4M3 ? takes_dense_ : takes_quantised_) = true;
        }
        columns_ = (int)columns.size();
        const int units = columns_ / unit, parts = (int)arenas.size();
        for (int p = 0; p <= parts; p++) first_unit_.push_back((int)((int64_t)units * p / parts));
        parts_.resize(parts), quantised_.resize(parts), float8_.resize(parts);
        pool.run(1, [&](int, int p, int) { pack_part(arenas[p], columns, first_unit_[p] * unit, first_unit_[p + 1] * unit, p); });
    }

    int columns() const { return columns_; }
    int first_unit(int part) const { return first_unit_[part]; }  // of the part's columns; `part` may be the number of parts
    bool takes_dense() const { return takes_dense_; }  // rows of T
    bool takes_quantised() const { return takes_quantised_; }

    // Computes one part's columns for all rows. y [rows, stride], which sums are added to if `add`.
    void product(int part, ProductInput<T> x, float* y, size_t stride, bool add) const {
        if (!parts_[part].empty()) dense_product(part, x.dense, x.rows, y, stride, add);
        if (!quantised_[part].empty()) quantised_product(part, *x.quantised, y, stride, add);
        for (const QuantisedPanel& panel : float8_[part])
            float8_product(panel.weights, in_, x.dense, words_ * Element<T>::PER_WORD, x.rows, &bias_[panel.column],
                           y + panel.column, stride, add);
    }

   private:
    struct Panel {  // weights [words, blocks * LANES]
        const uint32_t* weights;
        int column, blocks;
    };
    struct QuantisedPanel {  // LANES columns in the layout of the type
        const uint8_t* weights;
        int column;
        BlockType type;
    };
    struct Column {
        const uint8_t* weights;  // null for padding
        BlockType type;
    };
    struct Prefetch {  // what a tile prefetches for each input word
        size_t words;      // distance from the weights that it reads
        int blocks;
    };

    void pack_part(Arena& arena, const std::vector<Column>& columns, int begin, int end, int part) {
        for (int column = begin; column < end;) {
            if (columns[column].type != DENSE) {
                auto& panels = columns[column].type == E4M3 ? float8_ : quantised_;
                panels[part].push_back(pack_quantised(arena, &columns[column], column));
                column += LANES;
                continue;
            }
            int blocks = 1;
            while (blocks < MOST_BLOCKS && column + blocks * LANES < end && columns[column + blocks * LANES].type == DENSE) blocks++;
            parts_[part].push_back(pack(arena, &columns[column], column, blocks));
            column += blocks * LANES;
        }
    }

    void quantised_product(int part, const QuantisedRows& x, float* y, size_t stride, bool add) const {
        constexpr size_t CACHE_BYTES = 512 << 10;  // of rows that stay in a cache while panels pass by
        const size_t group_bytes = QuantisedRows::record(MOST_PACKED_ROWS) * (in_ / BLOCK);
        const int at_once = std::max(1, (int)(CACHE_BYTES / group_bytes));
        for (int first = 0; first < x.groups(); first += at_once)
            for (const QuantisedPanel& panel : quantised_[part])
                with_layout(panel.type, [&]<class L>() {
                    if constexpr (L::TYPE == E4M3) return;
                    else for (int g = first; g < std::min(first + at_once, x.groups()); g++) {
                        const int row = g * MOST_PACKED_ROWS;
                        group_product<L>(panel.weights, units_of(in_, L::UNIT_INPUTS), x.group(g), x.size(g), x.rows() - row,
                                         &bias_[panel.column], y + row * stride + panel.column, stride, add);
                    }
                });
    }

    void dense_product(int part, const T* x, int rows, float* y, size_t stride, bool add) const {
#ifdef __AMX_BF16__
        if constexpr (Element<T>::PER_WORD == 2) {
            if (rows == 1) return product_of_row(part, (const uint32_t*)x, y, add);
            return rows ? product_of_tiles(part, (const uint32_t*)x, rows, y, stride, add) : void();
        }
#endif
        if (!rows) return;
        if constexpr (MOST_BLOCKS == 1)
            if (rows >= SOME_ROWS) return product_of_many(part, x, rows, y, stride, add);
        int tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
        for (const Panel& panel : parts_[part]) {
            // The first tile reads the panel from memory, the others from a cache. To keep memory busy, each prefetches its
            // share of the next panel. With few rows it prefetches the weights that follow soon.
            int share = (panel.blocks + tiles - 1) / tiles;
            for (int tile = 0, row = 0; tile < tiles; tile++) {
                int count = rows / tiles + (tile < rows % tiles);
                const uint32_t* inputs = (const uint32_t*)x + (size_t)row * words_;
                size_t next = (size_t)words_ * LANES * (panel.blocks + tile * share);
                Prefetch ahead = rows < SOME_ROWS ? Prefetch{AHEAD / sizeof(uint32_t), panel.blocks} : Prefetch{next, share};
                multiply(panel, ahead, count, inputs, y + row * stride + panel.column, stride, add);
                row += count;
            }
        }
    }

    // As `dense_product` bit for bit, for many rows where a vector takes several registers. Rows are widened once, for all
    // panels, and those of a tile lie side by side: they are read one after another.
    void product_of_many(int part, const T* x, int rows, float* y, size_t stride, bool add) const {
        const size_t width = (size_t)words_ * Element<T>::PER_WORD;
        const int tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
        auto for_each_tile = [&](auto f) {
            for (int tile = 0, row = 0; tile < tiles; tile++) {
                const int count = rows / tiles + (tile < rows % tiles);
                f(tile, row, count);
                row += count;
            }
        };
        thread_local std::vector<float> numbers;
        numbers.resize(rows * width);
        for_each_tile([&](int, int row, int count) {
            for (int r = 0; r < count; r++)
                for (size_t i = 0; i < width; i++) numbers[row * width + i * count + r] = Element<T>::widen_one(x[(row + r) * width + i]);
        });
        for (const Panel& panel : parts_[part])
            for_each_tile([&](int tile, int row, int count) {
                // Each tile prefetches its share of the next panel.
                const uint32_t* asked = panel.weights + (size_t)words_ * LANES + (size_t)words_ * tile / tiles * LANES;
                tile_of_many(panel, asked, tiles, count, &numbers[row * width], y + row * stride + panel.column, stride, add);
            });
    }
    template <int ROWS = MOST_TILE_ROWS>
    __attribute__((noinline)) void tile_of_many(const Panel& panel, const uint32_t* asked, int tiles, int rows, const float* x, float* y,
                                                size_t stride, bool add) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return tile_of_many<ROWS - 1>(panel, asked, tiles, rows, x, y, stride, add);
        constexpr int PER = Element<T>::PER_WORD;
        PartFloats sums[ROWS][PARTS] = {};
        const uint32_t* w = panel.weights;
        for (int i = 0, until_asked = 1; i < words_; i++, w += LANES, x += PER * ROWS) {
            if (!--until_asked) __builtin_prefetch(asked, 0, 2), asked += LANES, until_asked = tiles;
            // The upper halves of words first, as everywhere: few vectors are needed at a time.
            PartFloats weights[PARTS];
            if constexpr (PER == 2) {
                for (int p = 0; p < PARTS; p++) weights[p] = (PartFloats)(load<PartWords>(w + PART * p) & 0xffff0000u);
                for (int r = 0; r < ROWS; r++)
                    for (int p = 0; p < PARTS; p++) sums[r][p] = added_product(weights[p], all_of_part(x[ROWS + r]), sums[r][p]);
            }
            for (int p = 0; p < PARTS; p++) weights[p] = (PartFloats)(load<PartWords>(w + PART * p) << (PER == 2 ? 16 : 0));
            for (int r = 0; r < ROWS; r++)
                for (int p = 0; p < PARTS; p++) sums[r][p] = added_product(weights[p], all_of_part(x[r]), sums[r][p]);
        }
        for (int r = 0; r < ROWS; r++) finish(panel, 0, load<Floats>(sums[r]), y + r * stride, add);
    }

    Panel pack(Arena& arena, const Column* columns, int first, int blocks) const {
        constexpr int PER = Element<T>::PER_WORD;
        int width = blocks * LANES;
        T* to = (T*)arena.allocate((size_t)words_ * width);
        for (int i = 0; i < words_; i++)
            for (int c = 0; c < width; c++)
                for (int j = 0; j < PER; j++)
                    *to++ = columns[c].weights && i * PER + j < in_ ? ((const T*)columns[c].weights)[i * PER + j] : T{};
        return {(const uint32_t*)(to - (size_t)words_ * width * PER), first, blocks};
    }
    QuantisedPanel pack_quantised(Arena& arena, const Column* columns, int first) const {
        const uint8_t* weights[LANES];
        for (int c = 0; c < LANES; c++) weights[c] = columns[c].weights;
        return with_layout(columns->type, [&]<class L>() {
            uint8_t* to = (uint8_t*)arena.allocate(panel_bytes<L>(in_) / sizeof(uint32_t));
            pack_panel<L>(weights, in_, to);
            return QuantisedPanel{to, first, columns->type};
        });
    }

#ifdef __AMX_BF16__
    void product_of_row(int part, const uint32_t* x, float* y, bool add) const {
        alignas(64) float sums[MOST_BLOCKS * LANES];
        for (const Panel& panel : parts_[part]) {
            with_blocks(panel, [&]<int BLOCKS>() { multiply_row<BLOCKS>(x, panel.weights, words_, sums); });
            finish(panel, sums, y, add);
        }
    }
    void product_of_tiles(int part, const uint32_t* x, int rows, float* y, size_t stride, bool add) const {
        const int height = std::min(rows, Tiles::ROWS);
        const Tiles tiles(height);
        alignas(64) float sums[Tiles::ROWS][MOST_BLOCKS * LANES];
        for (const Panel& panel : parts_[part])
            for (int done = 0; done < rows; done += height) {
                int first = std::min(done, rows - height);  // the last tile repeats rows of the one before
                const uint32_t* inputs = x + (size_t)first * words_;
                with_blocks(panel, [&]<int BLOCKS>() { tiles.multiply<BLOCKS>(inputs, panel.weights, words_, *sums, sizeof *sums); });
                for (int r = done; r < first + height; r++) finish(panel, sums[r - first], y + r * stride, add);
            }
    }
    // Calls f with the panel's number of blocks as a template argument.
    template <int BLOCKS = MOST_BLOCKS, class F>
    static void with_blocks(const Panel& panel, F f) {
        if (panel.blocks == BLOCKS) return f.template operator()<BLOCKS>();
        if constexpr (BLOCKS > 1) with_blocks<BLOCKS - 1>(panel, f);
    }
    // Writes a row's sums to its columns of this panel.
    void finish(const Panel& panel, const float* sums, float* y, bool add) const {
        for (int b = 0; b < panel.blocks; b++) finish(panel, b, load<Floats>(sums + b * LANES), y + panel.column, add);
    }
#endif

    // Writes a block of a row's sums to the row's columns of this panel.
    void finish(const Panel& panel, int block, Floats sum, float* y, bool add) const {
        float* to = y + block * LANES;
        sum += load<Floats>(&bias_[panel.column + block * LANES]);
        store(to, add ? load<Floats>(to) + sum : sum);
    }

    template <int ROWS, int BLOCKS>
    void tile(const Panel& panel, Prefetch ahead, const uint32_t* x, float* y, size_t stride, bool add) const {
        typename Element<T>::Sums sums[ROWS][BLOCKS];
        const uint32_t* w = panel.weights;
        const uint32_t* asked = w + ahead.words;
        for (int i = 0; i < words_; i++, w += BLOCKS * LANES, asked += ahead.blocks * LANES) {
            for (int b = 0; b < ahead.blocks; b++) __builtin_prefetch(asked + b * LANES, 0, 2);  // into the L2 cache
            for (int r = 0; r < ROWS; r++)
                for (int b = 0; b < BLOCKS; b++) sums[r][b].add(w + b * LANES, x[(size_t)r * words_ + i]);
        }
        for (int r = 0; r < ROWS; r++)
            for (int b = 0; b < BLOCKS; b++) finish(panel, b, sums[r][b].floats(), y + r * stride, add);
    }

    // Calls `tile` with the numbers of rows and blocks as template arguments.
    template <int ROWS = MOST_ROWS, int BLOCKS = MOST_BLOCKS>
    void multiply(const Panel& panel, Prefetch ahead, int rows, const uint32_t* x, float* y, size_t stride, bool add) const {
        if (rows == ROWS && panel.blocks == BLOCKS) return tile<ROWS, BLOCKS>(panel, ahead, x, y, stride, add);
        if constexpr (ROWS > 1)
            if (rows < ROWS) return multiply<ROWS - 1, BLOCKS>(panel, ahead, rows, x, y, stride, add);
        if constexpr (BLOCKS > 1) return multiply<ROWS, BLOCKS - 1>(panel, ahead, rows, x, y, stride, add);
    }

    int words_ = 0, columns_ = 0, in_ = 0;
    bool takes_dense_ = false, takes_quantised_ = false;
    std::vector<float> bias_;
    std::vector<int> first_unit_;
    std::vector<std::vector<Panel>> parts_;
    std::vector<std::vector<QuantisedPanel>> quantised_, float8_;  // by part
};

}  // namespace paceline
