// The C interface. native_network.py, native_attention.py, native_states.py and packed_rows.py mirror its structures.
#include "layer_attention.hpp"
#include "network.hpp"
#include "draw_candidates.hpp"

using namespace paceline;

namespace {

// A matrix alone, for the products of draft heads.
struct AnyProduct {
    virtual ~AnyProduct() = default;
    virtual void run(ThreadPool& pool, const void* x, int rows, float* y) const = 0;
};

template <class T>
struct Product : AnyProduct {
    std::vector<Arena> arenas;
    Matrix<T> matrix;
    int in;
    Product(ThreadPool& pool, Weights weights, const float* bias, int out, int in) : arenas(pool.parts()), in(padded(in, LANES)) {
        matrix = Matrix<T>(pool, arenas, {{weights.data, weights.type, out, bias}}, LANES, in, this->in);
    }
    void run(ThreadPool& pool, const void* x, int rows, float* y) const override {
        QuantisedRows quantised;
        if constexpr (std::is_same_v<T, float>)  // quantised weights take float rows
            if (matrix.takes_quantised()) {
                quantised.resize(rows, in);
                for (int r = 0; r < rows; r++) quantised.quantise(r, (const float*)x + (size_t)r * in, 0, in);
            }
        const ProductInput<T> input{(const T*)x, &quantised, rows};
        pool.run(1, [&](int, int part, int) { matrix.product(part, input, y, matrix.columns(), false); });
    }
};

}  // namespace

extern "C" {

// A pool of `parts` threads, with as many parts per phase.
void* paceline_thread_pool_create(int32_t parts) { return new ThreadPool(parts); }
void paceline_thread_pool_destroy(void* pool) { delete (ThreadPool*)pool; }

// Weights are copied; tables, embedding and cache must outlive the network.
void* paceline_network_create(const NetworkSpec* spec, const LayerSpec* layers, void* pool) {
    ThreadPool& threads = *(ThreadPool*)pool;
    if (spec->is_bf16) return (AnyNetwork*)new Network<bf16>(*spec, layers, threads);
    return (AnyNetwork*)new Network<float>(*spec, layers, threads);
}
void paceline_network_run(void* network, void* pool, const PassSpec* pass) {
    ((AnyNetwork*)network)->run(*(ThreadPool*)pool, *pass);
}
void paceline_network_output(void* network, void* pool, const void* final_states, int32_t rows, float* logits) {
    ((AnyNetwork*)network)->output(*(ThreadPool*)pool, final_states, rows, logits);
}
void paceline_network_destroy(void* network) { delete (AnyNetwork*)network; }

// weights [out, in] of the dtype, or, with float rows, of a block type; bias float [out] or null. x [rows, in padded to 16],
// y [rows, columns].
void* paceline_product_create(int32_t is_bf16, const void* weights, int32_t type, const float* bias, int32_t out, int32_t in,
                              void* pool) {
    ThreadPool& threads = *(ThreadPool*)pool;
    const Weights matrix{weights, (BlockType)type};
    if (is_bf16) return (AnyProduct*)new Product<bf16>(threads, matrix, bias, out, in);
    return (AnyProduct*)new Product<float>(threads, matrix, bias, out, in);
}
void paceline_product_run(void* product, void* pool, const void* x, int32_t rows, float* y) {
    ((AnyProduct*)product)->run(*(ThreadPool*)pool, x, rows, y);
}
void paceline_product_destroy(void* product) { delete (AnyProduct*)product; }

// The numbers of `rows` rows of a block type in the file's layout: out float [rows, in].
void paceline_dequantise(int32_t type, const void* blocks, int64_t rows, int32_t in, float* out) {
    const size_t bytes = file_bytes((BlockType)type, in);
    for (int64_t r = 0; r < rows; r++) dequantise((BlockType)type, (const uint8_t*)blocks + r * bytes, in, out + r * in);
}

// Attention alone.
void* paceline_attention_create(int32_t is_bf16, int32_t is_int8_cache, int32_t key_value_heads, int32_t queries_per_key,
                                int32_t width) {
    Heads heads{key_value_heads, queries_per_key, width};
    auto make = [&]<class T>() -> AnyLayerAttention* {
        if (is_int8_cache) return new LayerAttention<T, int8_t>(heads);
        return new LayerAttention<T, T>(heads);
    };
    return is_bf16 ? make.template operator()<bf16>() : make.template operator()<float>();
}
void paceline_attention_run(void* attention, void* pool, const AttentionSpec* layer) {
    ((AnyLayerAttention*)attention)->run(*(ThreadPool*)pool, *layer);
}
void paceline_attention_destroy(void* attention) { delete (AnyLayerAttention*)attention; }

void paceline_scan(const ScanSpec* spec, void* pool) {
    const StateBuffers buffers(spec->pass->order);
    Scan(*spec, buffers).run(*(ThreadPool*)pool);
}
void paceline_convolution(const ConvolutionSpec* spec, void* pool) {
    if (spec->is_bf16) Convolution<bf16>(*spec).run(*(ThreadPool*)pool);
    else Convolution<float>(*spec).run(*(ThreadPool*)pool);
}

// Writes the tokens that can win each row's draw, as indices into x [rows, vocabulary], and their integers; returns their
// number. keys [rows, 2]; indices and integers [rows * vocabulary].
int64_t paceline_draw_candidates(const float* x, int32_t rows, int32_t vocabulary, const uint32_t* keys, const int64_t* largest,
                                 double leniency, int64_t* indices, uint32_t* integers) {
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t more = draw_candidates_of(x + row * vocabulary, vocabulary, (int)largest[row], keys[2 * row], keys[2 * row + 1],
                                          leniency, indices + count, integers + count);
        for (; more; more--) indices[count++] += row * vocabulary;
    }
    return count;
}
}
