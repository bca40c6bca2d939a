// Attention of rows to their own paths: softmax(q k' * scale) v, in float, over keys in the order of their positions.
//
// Keys are processed in tiles of 16 positions that begin at multiples of 16. In a row's last tile, positions without a key
// have the score minus infinity, and so add an exact 0. A row's path alone decides what it sums and in which order.
#pragma once
#include <cmath>
#include <vector>

#include "rows.hpp"
#include "vectors.hpp"

namespace paceline {

struct Heads {
    int key_value, queries_per_key;
    int width;  // numbers per head, padded with zeros to whole vectors

    size_t query_row() const { return (size_t)key_value * queries_per_key * width; }
    size_t key_row() const { return (size_t)key_value * width; }  // a slot of the cache has a row of keys, then one of values
};

struct AttentionOptions {  // of one layer; part of the C interface
    float scale;
    float softcap = 0;             // limit of scores, by tanh; 0: none
    int32_t window;                // positions that a row sees, including its own; 0: all
    const float* sinks = nullptr;  // [query heads]: scores that take part in the softmax without a value; null: none
};

template <class T>
class Attention {
    static constexpr int PER = Element<T>::PER_WORD, TILE_WORDS = KEY_TILE / PER;
#ifdef __AVX512F__
    static constexpr int MOST_QUERIES = 8;  // 16 of 32 registers hold sums
#else
    static constexpr int MOST_QUERIES = 2;
#endif

   public:
    // `longest`: most positions of a path.
    Attention(Heads heads, int longest) : heads_(heads), stride_(padded(longest, KEY_TILE)) {
        int queries = most_rows(heads) * heads.queries_per_key;
        scores_.resize((size_t)queries * stride_);
        weights_.resize((size_t)queries * stride_);
        totals_.resize(queries);
        outputs_.resize((size_t)queries * heads.width);
        tile_.resize((size_t)KEY_TILE * heads.width / PER);
        queries_.resize(queries);
    }
    // Rows of a chunk: they share the work on a tile.
    static int most_rows(const Heads& heads) { return std::max(1, 16 / heads.queries_per_key); }

    // One part of `parts`: every `parts`-th pair of a chunk and a key-value head. `cache`: a layer's keys and values
    // [slots, 2 * key-value heads, width]. queries, out [rows, query heads, width].
    template <class Out>
    void operator()(const Rows& rows, const std::vector<Chunk>& chunks, int part, int parts, const AttentionOptions& options,
                    const T* cache, const T* queries, Out* out) {
        for_each_item(chunks, part, parts,
                      [&](Chunk chunk, int key_head) { attend(rows, chunk, key_head, options, cache, queries, out); });
    }
    // Calls f(chunk, key-value head) for each pair of a part.
    template <class F>
    void for_each_item(const std::vector<Chunk>& chunks, int part, int parts, F f) const {
        for (int i = part; i < (int)chunks.size() * heads_.key_value; i += parts) f(chunks[i / heads_.key_value], i % heads_.key_value);
    }

   private:
    // One key-value head of the rows of a chunk.
    template <class Out>
    void attend(const Rows& rows, Chunk chunk, int key_head, const AttentionOptions& options, const T* cache, const T* queries,
                Out* out) {
        const int per = heads_.queries_per_key, width = heads_.width, window = options.window;
        const size_t values = heads_.key_row(), slot = 2 * values;
        const T* keys = cache + (size_t)key_head * width;
        const float* sink = options.sinks ? options.sinks + key_head * per : nullptr;
        auto head_of = [&](auto* of, int row) { return of + row * heads_.query_row() + (size_t)key_head * per * width; };
        auto prefetch_slot = [&](const T* from) {
            return [=, this](int32_t s) {
                for (int d = 0; d < heads_.width; d += 64 / (int)sizeof(T)) __builtin_prefetch(from + s * slot + d);
            };
        };
        for_each_tile(
            rows, chunk, window, prefetch_slot(keys), [&](const int32_t* slots) { load_keys(keys, slot, slots); },
            [&](const int* sharing, int count, int tile) {
                for (int i = 0; i < count * per; i++) {
                    int row = sharing[i / per], q = i % per;
                    queries_[i] = {head_of(queries, row) + q * width, first_query(chunk, row) + q,
                                   VisibleRange(rows, row, window)};
                }
                in_groups(count * per, [&]<int COUNT>(int first) { score<COUNT>(&queries_[first], tile, options); });
            });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++)
                normalise(first_query(chunk, r) + q, VisibleRange(rows, r, window), sink ? sink + q : nullptr);
        std::fill(outputs_.begin(), outputs_.end(), 0.0f);
        for_each_tile(
            rows, chunk, window, prefetch_slot(keys + values),
            [&](const int32_t* slots) { load_values(keys + values, slot, slots); },
            [&](const int* sharing, int count, int tile) {
                for (int i = 0; i < count * per; i++) queries_[i].index = first_query(chunk, sharing[i / per]) + i % per;
                in_groups(count * per, [&]<int COUNT>(int first) { mix<COUNT>(&queries_[first], tile); });
            });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++) {
                int i = first_query(chunk, r) + q;
                for (int d = 0; d < width; d += LANES)
                    Element<Out>::narrow(head_of(out, r) + q * width + d,
                                           load<Floats>(&outputs_[(size_t)i * width + d]) * (1.0f / totals_[i]));
            }
    }

    // The index of a row's first query among the chunk's.
    int first_query(Chunk chunk, int row) const { return (row - chunk.first) * heads_.queries_per_key; }

    // The tile's keys as [words of a head, positions].
    void load_keys(const T* keys, size_t slot, const int32_t* slots) {
        uint32_t* to = tile_.data();
        for (int w = 0, words = heads_.width / PER; w < words; w += LANES) {
            Uint32s square[LANES];
            for (int i = 0; i < KEY_TILE; i++) square[i] = load<Uint32s>((const uint32_t*)(keys + slots[i] * slot) + w);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + (w + i) * KEY_TILE, square[i]);
        }
    }

    // The tile's values as [KEY_TILE / PER, width] words of two neighbouring positions, or one.
    void load_values(const T* values, size_t slot, const int32_t* slots) {
        uint32_t* to = tile_.data();
        for (int i = 0; i < TILE_WORDS; i++)
            for (int d = 0, width = heads_.width; d < width; d += LANES, to += LANES) {
                if constexpr (PER == 1) {
                    store(to, load<Uint32s>(values + slots[i] * slot + d));
                } else {
                    Uint32s first = __builtin_convertvector(load<Halves>(values + slots[2 * i] * slot + d), Uint32s);
                    Uint32s second = __builtin_convertvector(load<Halves>(values + slots[2 * i + 1] * slot + d), Uint32s);
                    store(to, first | second << 16);
                }
            }
    }

    struct Query {
        const T* numbers;
        int index;  // among the chunk's queries
        VisibleRange visible;
    };

    // Calls f with the first query of each group; the group's size is a template argument. The sums of several queries hide
    // each other's latency.
    template <int COUNT = MOST_QUERIES, class F>
    static void in_groups(int count, F f, int first = 0) {
        for (; first + COUNT <= count; first += COUNT) f.template operator()<COUNT>(first);
        if constexpr (COUNT > 1) in_groups<COUNT / 2>(count, f, first);
    }

    template <int COUNT>
    void score(const Query* queries, int tile, const AttentionOptions& options) {
        static const Ints numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Ints position = numbers + tile * KEY_TILE;
        const uint32_t* keys = tile_.data();
        Floats sums[COUNT] = {};
        for (int w = 0, words = heads_.width / PER; w < words; w++) {
            Uint32s key = load<Uint32s>(keys + w * KEY_TILE);
            for (int i = 0; i < COUNT; i++)
                sums[i] = Element<T>::multiply_add(sums[i], key, all_words(((const uint32_t*)queries[i].numbers)[w]));
        }
        for (int i = 0; i < COUNT; i++) {
            Floats s = sums[i] * options.scale;
            if (options.softcap > 0) s = tanh_of(s / options.softcap) * options.softcap;
            Ints seen = (position >= queries[i].visible.begin) & (position < queries[i].visible.end);
            store(&scores_[queries[i].index * stride_ + tile * KEY_TILE], seen ? s : all(-INFINITY));
        }
    }

    // Turns scores into weights e^(score - largest), rounded to T; the sum is of rounded weights.
    void normalise(int index, VisibleRange visible, const float* sink) {
        const float* scores = &scores_[index * stride_];
        T* weights = &weights_[index * stride_];
        Floats most = all(sink ? *sink : -INFINITY), sum = {};
        for (int t = visible.first_tile; t < visible.last_tile; t++) most = larger(load<Floats>(scores + t * KEY_TILE), most);
        Floats largest = all(max_of(most));
        for (int t = visible.first_tile; t < visible.last_tile; t++) {
            Floats s = load<Floats>(scores + t * KEY_TILE);
            Floats weight = s == all(-INFINITY) ? Floats{} : exp_of(s - largest);
            Element<T>::narrow(weights + t * KEY_TILE, weight);
            sum += Element<T>::widen(weights + t * KEY_TILE);
        }
        totals_[index] = sum_of(sum);
        if (sink) totals_[index] += sum_of(exp_of(all(*sink) - largest)) / LANES;
    }

    template <int COUNT>
    void mix(const Query* queries, int tile) {
        const int width = heads_.width;
        const uint32_t* weights[COUNT];
        float* out[COUNT];
        for (int i = 0; i < COUNT; i++) {
            weights[i] = (const uint32_t*)&weights_[queries[i].index * stride_ + tile * KEY_TILE];
            out[i] = &outputs_[(size_t)queries[i].index * width];
        }
        for (int d = 0; d < width; d += 2 * LANES) {  // widths are multiples of 32
            const uint32_t* values = tile_.data() + d;
            Floats low[COUNT], high[COUNT];
            for (int i = 0; i < COUNT; i++) low[i] = load<Floats>(out[i] + d), high[i] = load<Floats>(out[i] + d + LANES);
            for (int w = 0; w < TILE_WORDS; w++, values += width) {
                const Uint32s first = load<Uint32s>(values), second = load<Uint32s>(values + LANES);
                for (int i = 0; i < COUNT; i++) {
                    Uint32s weight = all_words(weights[i][w]);
                    low[i] = Element<T>::multiply_add(low[i], first, weight);
                    high[i] = Element<T>::multiply_add(high[i], second, weight);
                }
            }
            for (int i = 0; i < COUNT; i++) store(out[i] + d, low[i]), store(out[i] + d + LANES, high[i]);
        }
    }

    const Heads heads_;
    const size_t stride_;  // of scores and weights: positions, in whole tiles
    std::vector<float> scores_, totals_, outputs_;
    std::vector<T> weights_;
    std::vector<uint32_t> tile_;
    std::vector<Query> queries_;  // of the rows that share a tile
};

}  // namespace paceline
