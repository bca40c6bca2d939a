// Attention of rows to their own paths: softmax(q k' * scale) v, in float, over keys in the order of their positions.
//
// Keys are processed in tiles of 16 positions that begin at multiples of 16. In a row's last tile, positions without a key
// have the score minus infinity, and so add an exact 0. A row's path alone decides what it sums and in which order.
//
// Keys and values of 8 bits are codes and scales, functions of the row that stored them. Queries, and a tile's weights times
// scales of values, are quantised to 16 bits. Products of integers are exact, and every float step is one rounding, so a
// row's bits do not depend on the instruction set either.
#pragma once
#include <cmath>
#include <type_traits>
#include <vector>

#include "rows.hpp"
#include "vectors.hpp"

namespace paceline {

constexpr int KEY_BLOCK = 32;  // inputs of a key that share a scale
template <class T>
constexpr bool IS_CODES = std::is_same_v<T, int8_t>;
template <class T>
using QueryNumber = std::conditional_t<IS_CODES<T>, int16_t, T>;

struct Heads {
    int key_value, queries_per_key;
    int width;  // numbers per head, padded with zeros to a multiple of KEY_BLOCK

    int queries() const { return key_value * queries_per_key; }
    // A query: numbers, or codes of 16 bits and their scale.
    template <class T>
    int query_size() const { return IS_CODES<T> ? width + 2 : width; }
    // Bytes in the cache: numbers of T, or codes and then scales, one for each KEY_BLOCK inputs of a key, one for a value.
    template <class T>
    size_t key_bytes() const { return width * sizeof(T) + (IS_CODES<T> ? width / KEY_BLOCK * sizeof(float) : 0); }
    template <class T>
    size_t value_bytes() const { return width * sizeof(T) + (IS_CODES<T> ? sizeof(float) : 0); }

    // Stores a query, a key or a value, float [width], as T or quantised.
    template <class T>
    void store_query(const float* x, QueryNumber<T>* to) const {
        if constexpr (IS_CODES<T>) store(to + width, quantise(x, width, to));
        else narrow(x, to);
    }
    template <class T>
    void store_key(const float* x, T* to) const {
        if constexpr (IS_CODES<T>)
            for (int i = 0; i < width; i += KEY_BLOCK)
                store(to + width + i / KEY_BLOCK * sizeof(float), quantise(x + i, KEY_BLOCK, to + i));
        else narrow(x, to);
    }
    template <class T>
    void store_value(const float* x, T* to) const {
        if constexpr (IS_CODES<T>) store(to + width, quantise(x, width, to));
        else narrow(x, to);
    }

   private:
    template <class T>
    void narrow(const float* x, T* to) const {
        for (int i = 0; i < width; i += LANES) Element<T>::narrow(to + i, load<Floats>(x + i));
    }
};

// A layer's keys and values. Those of a head are neighbours: a path's slots mostly are, too, so they are read in the order
// of memory.
template <class T>
struct LayerCache {
    Heads heads;
    uint8_t* data;  // keys [key-value heads, slots], then values
    size_t slots;

    T* key(int head, size_t slot) const { return (T*)(data + (head * slots + slot) * heads.key_bytes<T>()); }
    T* value(int head, size_t slot) const {
        return (T*)(data + bytes_of_keys() + (head * slots + slot) * heads.value_bytes<T>());
    }
    size_t bytes() const { return bytes_of_keys() + heads.key_value * slots * heads.value_bytes<T>(); }

   private:
    size_t bytes_of_keys() const { return heads.key_value * slots * heads.key_bytes<T>(); }
};

struct AttentionOptions {  // of one layer; part of the C interface
    float scale;
    float softcap = 0;             // limit of scores, by tanh; 0: none
    int32_t window;                // positions that a row sees, including its own; 0: all
    const float* sinks = nullptr;  // [query heads]: scores that take part in the softmax without a value; null: none
};

template <class T>  // of the cache
class Attention {
    using Query = QueryNumber<T>;
    using Weight = std::conditional_t<IS_CODES<T>, float, T>;
    using Sums = typename Element<T>::Sums;
    static constexpr int PER = Element<T>::PER_WORD, TILE_WORDS = KEY_TILE / PER;
#ifdef __AVX512F__
    static constexpr int MOST_QUERIES = 8;  // 16 of 32 registers hold sums
#else
    static constexpr int MOST_QUERIES = 4;
#endif
    static constexpr int LEAST_SHARING = 16, MOST_SHARING = 48;  // queries of a chunk, if a part has that many
    static int most_rows(const Heads& heads, int queries) { return std::max(1, queries / heads.queries_per_key); }

   public:
    // `longest`: most positions of a path.
    Attention(Heads heads, int longest) : heads_(heads), stride_(padded(longest, KEY_TILE)) {
        int queries = most_rows(heads, MOST_SHARING) * heads.queries_per_key;
        scores_.resize((size_t)queries * stride_);
        weights_.resize((size_t)queries * stride_);
        totals_.resize(queries);
        outputs_.resize((size_t)queries * heads.width);
        tile_.resize((size_t)KEY_TILE * heads.width / PER);
        if (IS_CODES<T>) scales_.resize((size_t)KEY_TILE * heads.width / KEY_BLOCK);
        queries_.resize(queries);
        sharing_.resize(queries);
    }
    // Rows in chunks, whose rows share the work on a tile: large ones, but enough for each part to have as many.
    static std::vector<Chunk> chunks(const Rows& rows, const Heads& heads, int parts) {
        const int least = most_rows(heads, LEAST_SHARING);
        int count = (rows.count - 1) / most_rows(heads, MOST_SHARING) + 1;
        auto is_even = [&] { return count * heads.key_value % parts == 0 || count * heads.key_value >= 4 * parts; };
        while (!is_even() && rows.count > count * least) count++;
        return chunks_of(rows, (rows.count - 1) / count + 1);
    }

    // One part of `parts`: every `parts`-th pair of a chunk and a key-value head. queries [rows, query heads, query size],
    // out [rows, query heads, width].
    template <class Out>
    void operator()(const Rows& rows, const std::vector<Chunk>& chunks, int part, int parts, const AttentionOptions& options,
                    const LayerCache<T>& cache, const Query* queries, Out* out) {
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
    void attend(const Rows& rows, Chunk chunk, int key_head, const AttentionOptions& options, const LayerCache<T>& cache,
                const Query* queries, Out* out) {
        const int per = heads_.queries_per_key, width = heads_.width, window = options.window;
        const int size = heads_.template query_size<T>();
        auto key = [&](int32_t slot) { return cache.key(key_head, slot); };
        auto value = [&](int32_t slot) { return cache.value(key_head, slot); };
        const float* sink = options.sinks ? options.sinks + key_head * per : nullptr;
        auto head_of = [&](auto* of, int row, int size) {
            return of + ((size_t)row * heads_.queries() + (size_t)key_head * per) * size;
        };
        auto prefetch = [](auto* from, size_t bytes) {
            for (size_t d = 0; d < bytes; d += 64) __builtin_prefetch((const char*)from + d);
        };
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++)
                queries_[first_query(chunk, r) + q] = {head_of(queries, r, size) + q * size, first_query(chunk, r) + q,
                                                       VisibleRange(rows, r, window)};
        for_each_tile(
            rows, chunk, window, [&](int32_t slot) { prefetch(key(slot), heads_.template key_bytes<T>()); },
            [&](const int32_t* slots) { load_keys(slots, key); },
            [&](const int* sharing, int count, int tile) {
                in_groups(chunk, sharing, count,
                          [&]<int COUNT>(const TileQuery* group) { score<COUNT>(group, tile, options); });
            });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++)
                normalise(first_query(chunk, r) + q, VisibleRange(rows, r, window), sink ? sink + q : nullptr);
        std::fill_n(outputs_.begin(), (size_t)first_query(chunk, chunk.end) * width, 0.0f);
        for_each_tile(
            rows, chunk, window, [&](int32_t slot) { prefetch(value(slot), heads_.template value_bytes<T>()); },
            [&](const int32_t* slots) { load_values(slots, value); },
            [&](const int* sharing, int count, int tile) {
                in_groups(chunk, sharing, count, [&]<int COUNT>(const TileQuery* group) { mix<COUNT>(group, tile); });
            });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++) {
                int i = first_query(chunk, r) + q;
                for (int d = 0; d < width; d += LANES)
                    Element<Out>::narrow(head_of(out, r, width) + q * width + d,
                                           load<Floats>(&outputs_[(size_t)i * width + d]) * (1.0f / totals_[i]));
            }
    }

    // The index of a row's first query among the chunk's.
    int first_query(Chunk chunk, int row) const { return (row - chunk.first) * heads_.queries_per_key; }

    // The tile's keys, `key(slot)` each, as [words of a head, positions].
    template <class Key>
    void load_keys(const int32_t* slots, Key key) {
        const T* keys[KEY_TILE];
        for (int i = 0; i < KEY_TILE; i++) keys[i] = key(slots[i]);
        for (int w = 0, words = heads_.width / PER; w < words; w += LANES) {
            uint32_t* to = tile_.data() + w * KEY_TILE;
            if constexpr (IS_CODES<T>) {
                alignas(64) int16_t square[KEY_TILE][KEY_BLOCK];
                for (int i = 0; i < KEY_TILE; i++) {
                    for (int c = 0; c < KEY_BLOCK; c++) square[i][c] = keys[i][2 * w + c];
                    memcpy(&scales_[w + i], keys[i] + heads_.width + 4 * (w / LANES), sizeof(float));
                }
                transpose([&](int i) { return (const uint32_t*)square[i]; }, to);
            } else {
                transpose([&](int i) { return (const uint32_t*)keys[i] + w; }, to);
            }
        }
    }

    // The tile's values, `value(slot)` each, as [KEY_TILE / PER, width] words of two neighbouring positions, or one.
    template <class Value>
    void load_values(const int32_t* slots, Value value) {
        uint32_t* to = tile_.data();
        const int width = heads_.width;
        if constexpr (IS_CODES<T>)
            for (int i = 0; i < KEY_TILE; i++) memcpy(&scales_[i], value(slots[i]) + width, sizeof(float));
        for (int i = 0; i < TILE_WORDS; i++, to += width) {
            const T *low = value(slots[PER * i]), *high = value(slots[PER * i + PER - 1]);
            if constexpr (PER == 1) memcpy(to, low, width * sizeof(T));
            else
                for (int d = 0; d < width; d++) to[d] = bits_of(low[d]) | (uint32_t)bits_of(high[d]) << 16;
        }
    }
    static uint16_t bits_of(bf16 x) { return x.bits; }
    static uint16_t bits_of(int8_t x) { return (uint16_t)(int16_t)x; }

    struct TileQuery {
        const Query* numbers;
        int index;  // among the chunk's queries
        VisibleRange visible;
    };

    // Calls f with each group of the queries of these rows of the chunk; the group's size is a template argument. The sums
    // of several queries hide each other's latency.
    template <class F>
    void in_groups(Chunk chunk, const int* sharing, int count, F f) {
        const int per = heads_.queries_per_key;
        const TileQuery* first = queries_.data();
        if (count < chunk.end - chunk.first) {
            for (int i = 0; i < count; i++)
                std::copy_n(&queries_[first_query(chunk, sharing[i])], per, &sharing_[i * per]);
            first = sharing_.data();
        }
        split<MOST_QUERIES>(first, first + count * per, f);
    }
    template <int COUNT, class F>
    static void split(const TileQuery* first, const TileQuery* end, F f) {
        for (; end - first >= COUNT; first += COUNT) f.template operator()<COUNT>(first);
        if constexpr (COUNT > 1) split<COUNT / 2>(first, end, f);
    }

    template <int COUNT>
    void score(const TileQuery* queries, int tile, const AttentionOptions& options) {
        static const Ints numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Ints position = numbers + tile * KEY_TILE;
        const uint32_t* keys = tile_.data();
        Floats sums[COUNT] = {};
        const int words = heads_.width / PER, block = IS_CODES<T> ? KEY_BLOCK / PER : words;
        for (int first = 0; first < words; first += block) {
            Sums parts[COUNT] = {};
            for (int w = first; w < first + block; w++) {
                const uint32_t* key = keys + w * KEY_TILE;
                for (int i = 0; i < COUNT; i++) parts[i].add(key, ((const uint32_t*)queries[i].numbers)[w]);
            }
            for (int i = 0; i < COUNT; i++)
                if constexpr (IS_CODES<T>) sums[i] = fused(parts[i].floats(), load<Floats>(&scales_[first]), sums[i]);
                else sums[i] = parts[i].floats();
        }
        for (int i = 0; i < COUNT; i++) {
            Floats s = sums[i] * options.scale;
            if constexpr (IS_CODES<T>) s = s * load<float>(queries[i].numbers + heads_.width);
            if (options.softcap > 0) s = tanh_of(s / options.softcap) * options.softcap;
            Ints seen = (position >= queries[i].visible.begin) & (position < queries[i].visible.end);
            store(&scores_[queries[i].index * stride_ + tile * KEY_TILE], seen ? s : all(-INFINITY));
        }
    }

    // Turns scores into weights e^(score - largest), rounded to `Weight`; the sum is of rounded weights.
    void normalise(int index, VisibleRange visible, const float* sink) {
        const float* scores = &scores_[index * stride_];
        Weight* weights = &weights_[index * stride_];
        Floats most = all(sink ? *sink : -INFINITY), sum = {};
        for (int t = visible.first_tile; t < visible.last_tile; t++) most = larger(load<Floats>(scores + t * KEY_TILE), most);
        Floats largest = all(max_of(most));
        for (int t = visible.first_tile; t < visible.last_tile; t++) {
            Floats s = load<Floats>(scores + t * KEY_TILE);
            Floats weight = s == all(-INFINITY) ? Floats{} : exp_of(s - largest);
            Element<Weight>::narrow(weights + t * KEY_TILE, weight);
            sum += Element<Weight>::widen(weights + t * KEY_TILE);
        }
        totals_[index] = sum_of(sum);
        if (sink) totals_[index] += sum_of(exp_of(all(*sink) - largest)) / LANES;
    }

    template <int COUNT>
    void mix(const TileQuery* queries, int tile) {
        const int width = heads_.width;
        const uint32_t* weights[COUNT];
        float *out[COUNT], scales[COUNT];
        int16_t codes[COUNT][KEY_TILE];  // of weights times scales of values
        for (int i = 0; i < COUNT; i++) {
            const Weight* weight = &weights_[queries[i].index * stride_ + tile * KEY_TILE];
            weights[i] = (const uint32_t*)weight;
            out[i] = &outputs_[(size_t)queries[i].index * width];
            if constexpr (IS_CODES<T>) {
                const Floats numbers = load<Floats>(weight);
                float scaled[KEY_TILE];  // a hidden value may have any scale
                store(scaled, numbers == 0.0f ? numbers : numbers * load<Floats>(scales_.data()));
                scales[i] = quantise(scaled, KEY_TILE, codes[i]);
                weights[i] = (const uint32_t*)codes[i];
            }
        }
        for (int d = 0; d < width; d += 2 * LANES) {  // widths are multiples of 32
            const uint32_t* values = tile_.data() + d;
            Sums low[COUNT] = {}, high[COUNT] = {};
            if constexpr (!IS_CODES<T>)
                for (int i = 0; i < COUNT; i++) low[i] = load<Sums>(out[i] + d), high[i] = load<Sums>(out[i] + d + LANES);
            for (int w = 0; w < TILE_WORDS; w++, values += width) {
                for (int i = 0; i < COUNT; i++) {
                    low[i].add(values, weights[i][w]);
                    high[i].add(values + LANES, weights[i][w]);
                }
            }
            auto finish = [&](Sums sum, int i, float* to) {
                if constexpr (IS_CODES<T>) store(to, fused(sum.floats(), all(scales[i]), load<Floats>(to)));
                else store(to, sum.floats());
            };
            for (int i = 0; i < COUNT; i++) finish(low[i], i, out[i] + d), finish(high[i], i, out[i] + d + LANES);
        }
    }

    const Heads heads_;
    const size_t stride_;  // of scores and weights: positions, in whole tiles
    std::vector<float> scores_, totals_, outputs_;
    std::vector<Weight> weights_;
    std::vector<uint32_t> tile_;
    std::vector<float> scales_;  // of the tile: [words / 16, positions] of keys, [positions] of values
    std::vector<TileQuery> queries_, sharing_;  // of the chunk, and of the rows that share a tile
};

}  // namespace paceline
