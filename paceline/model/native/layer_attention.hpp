// Attention of one layer as one call, for models whose other operators are not native.
#pragma once
#include "attention.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct AttentionSpec {  // part of the C interface
    Rows rows;
    AttentionOptions options;
    const void *queries, *keys, *values;  // [rows, query heads, width], twice [rows, key-value heads, width]
    void* cache;                          // of the layer: [slots, 2 * key-value heads, width]
    void* out;                            // [rows, query heads, width]
};

struct AnyLayerAttention {
    virtual ~AnyLayerAttention() = default;
    virtual void run(ThreadPool& pool, const AttentionSpec& layer) = 0;
};

template <class T>
class LayerAttention : public AnyLayerAttention {
   public:
    explicit LayerAttention(Heads heads) : heads_(heads) {}

    void run(ThreadPool& pool, const AttentionSpec& layer) override {
        const Rows& rows = layer.rows;
        const int parts = pool.parts();
        reserve(rows, parts);
        const std::vector<Chunk> chunks = chunks_of(rows, Attention<T>::most_rows(heads_));
        pool.run(2, [&](int phase, int part, int thread) {
            if (phase == STORE)
                for (int row = part; row < rows.count; row += parts) store(layer, row);
            else
                (*scratch_[thread])(rows, chunks, part, parts, layer.options, (const T*)layer.cache,
                                    (const T*)layer.queries, (T*)layer.out);
        });
    }

   private:
    enum { STORE, ATTEND };  // phases

    // Copies a row's keys and values to its slot.
    void store(const AttentionSpec& layer, int row) const {
        const size_t count = heads_.key_row();
        T* to = (T*)layer.cache + layer.rows.own_slot(row) * 2 * count;
        memcpy(to, (const T*)layer.keys + row * count, count * sizeof(T));
        memcpy(to + count, (const T*)layer.values + row * count, count * sizeof(T));
    }

    void reserve(const Rows& rows, int parts) {
        int longest = 0;
        for (int row = 0; row < rows.count; row++) longest = std::max(longest, rows.length(row));
        if (longest <= longest_) return;
        longest_ = std::max(longest, 2 * longest_);  // paths get a position longer with each pass
        scratch_.clear();
        for (int part = 0; part < parts; part++) scratch_.push_back(std::make_unique<Attention<T>>(heads_, longest_));
    }

    const Heads heads_;
    int longest_ = 0;                                    // largest path length that `scratch_` fits
    std::vector<std::unique_ptr<Attention<T>>> scratch_;  // by thread
};

}  // namespace paceline
