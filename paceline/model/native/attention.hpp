// Attention of rows to their own paths: softmax(q k' * scale) v, in float, over keys in the order of their positions.
//
// Keys are taken in tiles of 16 positions that begin at multiples of 16. In a row's last tile, places without a key count
// as minus infinity, and so add an exact 0. What a row sums, and in which order, follows from its own path alone.
#pragma once
#include <cmath>
#include <vector>

#include "rows.hpp"
#include "vectors.hpp"

namespace paceline {

struct Heads {
    int key_value, queries_per_key;
    int width;      // numbers of a head, padded with zeros to whole vectors of words
    float scale;
    float softcap;  // scores are squashed to it; 0: they are not
};

template <class T>
class Attention {
    static constexpr int PER = Element<T>::PER_WORD, TILE_WORDS = TILE / PER;

   public:
    // `longest`: most positions of a path.
    Attention(Heads heads, int longest) : heads_(heads), stride_(padded(longest, TILE)) {
        int queries = most_rows(heads) * heads.queries_per_key;
        scores_.resize((size_t)queries * stride_);
        weights_.resize((size_t)queries * stride_);
        totals_.resize(queries);
        outputs_.resize((size_t)queries * heads.width);
        tile_.resize((size_t)TILE * heads.width / PER);
    }
    // Of a chunk: as many as share the work on a tile.
    static int most_rows(const Heads& heads) { return std::max(1, 16 / heads.queries_per_key); }

    // One key-value head of the rows of a chunk. `keys`: of this head in slot 0; a slot's values stand `values` numbers
    // further, and the next slot `slot` numbers. queries, out [rows, query heads, width]. `sink`: a score that takes part
    // in the softmax and has no value, for each query head of this key head; or null.
    void operator()(const Rows& rows, Chunk chunk, int key_head, int window, const float* sink, const T* keys,
                    size_t values, size_t slot, const T* queries, T* out) {
        const int per = heads_.queries_per_key, width = heads_.width;
        const size_t row_width = (size_t)heads_.key_value * per * width;
        auto head_of = [&](auto* of, int row) { return of + row * row_width + (size_t)key_head * per * width; };
        auto expect = [&](const T* from) {
            return [=, this](int32_t s) {
                for (int d = 0; d < heads_.width; d += 64 / (int)sizeof(T)) __builtin_prefetch(from + s * slot + d);
            };
        };
        each_tile(
            rows, chunk, window, expect(keys), [&](const int32_t* slots) { load_keys(keys, slot, slots); },
            [&](int row, int tile) {
                score(head_of(queries, row), place(chunk, row), tile, Sight(rows, row, window));
            });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++)
                normalise(place(chunk, r) + q, Sight(rows, r, window), sink ? sink + key_head * per + q : nullptr);
        std::fill(outputs_.begin(), outputs_.end(), 0.0f);
        each_tile(
            rows, chunk, window, expect(keys + values),
            [&](const int32_t* slots) { load_values(keys + values, slot, slots); },
            [&](int row, int tile) { mix(place(chunk, row), tile); });
        for (int r = chunk.first; r < chunk.end; r++)
            for (int q = 0; q < per; q++) {
                int i = place(chunk, r) + q;
                for (int d = 0; d < width; d += LANES)
                    Element<T>::narrow(head_of(out, r) + q * width + d,
                                       load<Floats>(&outputs_[(size_t)i * width + d]) * (1.0f / totals_[i]));
            }
    }

   private:
    // Of a row's first query among those of the chunk.
    int place(Chunk chunk, int row) const { return (row - chunk.first) * heads_.queries_per_key; }

    // The tile's keys as [words of a head, positions].
    void load_keys(const T* keys, size_t slot, const int32_t* slots) {
        uint32_t* to = tile_.data();
        for (int w = 0, words = heads_.width / PER; w < words; w += LANES) {
            Words square[LANES];
            for (int i = 0; i < TILE; i++) square[i] = load<Words>((const uint32_t*)(keys + slots[i] * slot) + w);
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + (w + i) * TILE, square[i]);
        }
    }

    // The tile's values as [TILE / PER, width] words: two positions side by side in each, or one.
    void load_values(const T* values, size_t slot, const int32_t* slots) {
        uint32_t* to = tile_.data();
        for (int i = 0; i < TILE_WORDS; i++)
            for (int d = 0, width = heads_.width; d < width; d += LANES, to += LANES) {
                if constexpr (PER == 1) {
                    store(to, load<Words>(values + slots[i] * slot + d));
                } else {
                    Words first = __builtin_convertvector(load<Halves>(values + slots[2 * i] * slot + d), Words);
                    Words second = __builtin_convertvector(load<Halves>(values + slots[2 * i + 1] * slot + d), Words);
                    store(to, first | second << 16);
                }
            }
    }

    void score(const T* queries, int place, int tile, Sight sight) {
        static const Ints count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Ints position = count + tile * TILE;
        Ints seen = (position >= sight.begin) & (position < sight.end);
        int q = 0, per = heads_.queries_per_key;
        for (; q + 4 <= per; q += 4) score_some<4>(queries + q * heads_.width, place + q, tile, seen);
        for (; q + 2 <= per; q += 2) score_some<2>(queries + q * heads_.width, place + q, tile, seen);
        for (; q < per; q++) score_some<1>(queries + q * heads_.width, place + q, tile, seen);
    }

    template <int COUNT>
    void score_some(const T* queries, int place, int tile, Ints seen) {
        const int words = heads_.width / PER;
        const uint32_t *q = (const uint32_t*)queries, *keys = tile_.data();
        Floats sums[COUNT] = {};
        for (int w = 0; w < words; w++) {
            Words key = load<Words>(keys + w * TILE);
            for (int i = 0; i < COUNT; i++)
                sums[i] = Element<T>::multiply_add(sums[i], key, all_words(q[(size_t)i * words + w]));
        }
        for (int i = 0; i < COUNT; i++) {
            Floats s = sums[i] * heads_.scale;
            if (heads_.softcap > 0) s = tanh_of(s / heads_.softcap) * heads_.softcap;
            store(&scores_[(place + i) * stride_ + tile * TILE], seen ? s : all(-INFINITY));
        }
    }

    // Scores become weights e^(score - largest), rounded to T; their sum is taken after rounding.
    void normalise(int place, Sight sight, const float* sink) {
        const float* scores = &scores_[place * stride_];
        T* weights = &weights_[place * stride_];
        Floats most = all(sink ? *sink : -INFINITY), sum = {};
        for (int t = sight.first_tile; t < sight.last_tile; t++) most = larger(load<Floats>(scores + t * TILE), most);
        Floats largest = all(max_of(most));
        for (int t = sight.first_tile; t < sight.last_tile; t++) {
            Floats s = load<Floats>(scores + t * TILE);
            Floats weight = s == all(-INFINITY) ? Floats{} : exp_of(s - largest);
            Element<T>::narrow(weights + t * TILE, weight);
            sum += Element<T>::widen(weights + t * TILE);
        }
        totals_[place] = sum_of(sum);
        if (sink) totals_[place] += sum_of(exp_of(all(*sink) - largest)) / LANES;
    }

    void mix(int place, int tile) {
        for (int q = 0; q < heads_.queries_per_key; q++) {
            const uint32_t* weights = (const uint32_t*)&weights_[(place + q) * stride_ + tile * TILE];
            float* out = &outputs_[(size_t)(place + q) * heads_.width];
            const int width = heads_.width;
            for (int d = 0; d < width; d += 2 * LANES) {  // widths are multiples of 32
                const uint32_t* values = tile_.data() + d;
                Floats low = load<Floats>(out + d), high = load<Floats>(out + d + LANES);
                for (int i = 0; i < TILE_WORDS; i++, values += width) {
                    Words weight = all_words(weights[i]);
                    low = Element<T>::multiply_add(low, load<Words>(values), weight);
                    high = Element<T>::multiply_add(high, load<Words>(values + LANES), weight);
                }
                store(out + d, low);
                store(out + d + LANES, high);
            }
        }
    }

    const Heads heads_;
    const size_t stride_;  // of scores and weights: positions, in whole tiles
    std::vector<float> scores_, totals_, outputs_;
    std::vector<T> weights_;
    std::vector<uint32_t> tile_;
};

}  // namespace paceline
