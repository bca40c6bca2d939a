// Attention of one layer as one call, for models whose other operators are not native.
#pragma once
#include "attention.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct AttentionSpec {  // part of the C interface
    Rows rows;
    AttentionOptions options;
    const void *queries, *keys, *values;  // [rows, query heads, width], twice [rows, key-value heads, width]
    void* cache;                          // of the layer, see `LayerCache`
    void* out;                            // [rows, query heads, width]
    int64_t slots;                        // of the cache
};

struct AnyLayerAttention {
    virtual ~AnyLayerAttention() = default;
    virtual void run(ThreadPool& pool, const AttentionSpec& layer) = 0;
};

template <class T, class Cached>  // of queries, and of the cache
class LayerAttention : public AnyLayerAttention {
   public:
    explicit LayerAttention(Heads heads) : heads_(heads) {}

    void run(ThreadPool& pool, const AttentionSpec& layer) override {
        const Rows& rows = layer.rows;
        const int parts = pool.parts();
        reserve(rows, parts);
        const std::vector<Chunk> chunks = Attention<Cached>::chunks(rows, heads_, parts);
        pool.run(2, [&](int phase, int part, int thread) {
            if (phase == STORE)
                for (int row = part; row < rows.count; row += parts) store(layer, row);
            else
                (*scratch_[thread])(rows, chunks, part, parts, layer.options, cache(layer), queries(layer), (T*)layer.out);
        });
    }

   private:
    enum { STORE, ATTEND };  // phases

    static constexpr bool QUANTISES = !std::is_same_v<T, Cached>;

    const QueryNumber<Cached>* queries(const AttentionSpec& layer) const {
        if constexpr (QUANTISES) return queries_.data();
        else return (const T*)layer.queries;
    }

    LayerCache<Cached> cache(const AttentionSpec& layer) const { return {heads_, (uint8_t*)layer.cache, (size_t)layer.slots}; }

    // Copies a row's keys and values to its slot, or quantises them and its queries.
    void store(const AttentionSpec& layer, int row) {
        const LayerCache<Cached> to = cache(layer);
        const int slot = layer.rows.own_slot(row);
        if constexpr (!QUANTISES) {
            const T *key = (const T*)layer.keys + (size_t)row * heads_.key_value * heads_.width;
            const T *value = (const T*)layer.values + (size_t)row * heads_.key_value * heads_.width;
            for (int k = 0; k < heads_.key_value; k++, key += heads_.width, value += heads_.width) {
                std::copy_n(key, heads_.width, to.key(k, slot));
                std::copy_n(value, heads_.width, to.value(k, slot));
            }
        } else {
            const int count = heads_.queries(), size = heads_.query_size<Cached>();
            for (int q = 0; q < count; q++)
                heads_.store_query<Cached>(floats(layer.queries, row * count + q), &queries_[((size_t)row * count + q) * size]);
            for (int k = 0; k < heads_.key_value; k++) {
                heads_.store_key(floats(layer.keys, row * heads_.key_value + k), to.key(k, slot));
                heads_.store_value(floats(layer.values, row * heads_.key_value + k), to.value(k, slot));
            }
        }
    }
    // Of a head: valid in this thread until the next call.
    const float* floats(const void* of, size_t head) const {
        thread_local std::vector<float> numbers;
        numbers.resize(heads_.width);
        for (int i = 0; i < heads_.width; i++) numbers[i] = Element<T>::widen_one(((const T*)of)[head * heads_.width + i]);
        return numbers.data();
    }

    void reserve(const Rows& rows, int parts) {
        if (QUANTISES) queries_.resize((size_t)rows.count * heads_.queries() * heads_.query_size<Cached>());
        int longest = 0;
        for (int row = 0; row < rows.count; row++) longest = std::max(longest, rows.length(row));
        if (longest <= longest_) return;
        longest_ = std::max(longest, 2 * longest_);  // paths get a position longer with each pass
        scratch_.clear();
        for (int part = 0; part < parts; part++) scratch_.push_back(std::make_unique<Attention<Cached>>(heads_, longest_));
    }

    const Heads heads_;
    int longest_ = 0;                                         // largest path length that `scratch_` fits
    std::vector<QueryNumber<Cached>> queries_;                 // [rows, query heads, query size], if it quantises
    std::vector<std::unique_ptr<Attention<Cached>>> scratch_;  // by thread
};

}  // namespace paceline
