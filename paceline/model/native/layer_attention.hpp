// Attention of one layer as one call, for models whose other operators are not native.
#pragma once
#include "attention.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct AttentionSpec {  // part of the C interface
    Rows rows;
    AttentionOptions options;
    const void *queries, *keys, *values;  // [rows, query heads, width], twice [rows, key-value heads, width]
    void* cache;                          // of the layer: slots, see `Heads`
    void* out;                            // [rows, query heads, width]
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
        const std::vector<Chunk> chunks = chunks_of(rows, Attention<Cached>::most_rows(heads_));
        pool.run(2, [&](int phase, int part, int thread) {
            if (phase == STORE)
                for (int row = part; row < rows.count; row += parts) store(layer, row);
            else
                (*scratch_[thread])(rows, chunks, part, parts, layer.options, (const uint8_t*)layer.cache, queries(layer),
                                    (T*)layer.out);
        });
    }

   private:
    enum { STORE, ATTEND };  // phases

    static constexpr bool QUANTISES = !std::is_same_v<T, Cached>;

    const QueryNumber<Cached>* queries(const AttentionSpec& layer) const {
        if constexpr (QUANTISES) return queries_.data();
        else return (const T*)layer.queries;
    }

    // Copies a row's keys and values to its slot, or quantises them and its queries.
    void store(const AttentionSpec& layer, int row) {
        uint8_t* slot = (uint8_t*)layer.cache + layer.rows.own_slot(row) * heads_.slot_bytes<Cached>();
        if constexpr (!QUANTISES) {
            const size_t bytes = heads_.key_value * heads_.key_bytes<Cached>();
            memcpy(slot, (const char*)layer.keys + row * bytes, bytes);
            memcpy(slot + bytes, (const char*)layer.values + row * bytes, bytes);
        } else {
            const int count = heads_.queries(), size = heads_.query_size<Cached>();
            for (int q = 0; q < count; q++)
                heads_.store_query<Cached>(floats(layer.queries, row * count + q), &queries_[((size_t)row * count + q) * size]);
            for (int k = 0; k < heads_.key_value; k++) {
                heads_.store_key<Cached>(floats(layer.keys, row * heads_.key_value + k), k, slot);
                heads_.store_value<Cached>(floats(layer.values, row * heads_.key_value + k), k, slot);
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
