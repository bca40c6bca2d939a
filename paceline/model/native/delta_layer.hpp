// The gated delta rule in place of attention, as layers of Qwen3.5 have it (Gated DeltaNet, Yang et al. 2025).
//
//   m = silu(convolution(mixed(x))), of which each head's group has a query and a key, and each head a value
//   state = decay * state + key x beta * (value - key * decay * state),  y = query * state
//   out = rms norm(y) * silu(gate(x)), of each head
//
// beta is a sigmoid, decay is exp(rate * softplus(a + offset)), and queries and keys have the length 1. Sizes and channels
// of a head are multiples of LANES.
#pragma once
#include <cmath>

#include "matrix.hpp"
#include "states.hpp"

namespace paceline {

struct Weights {  // a matrix [out, in] of type T, or GGUF's blocks; part of the C interface
    const void* data;
    BlockType type;
};

struct DeltaShape {  // of all such layers of a network; part of the C interface
    int32_t heads, groups, size, channels, taps, tiled;

    int keys() const { return groups * size; }
    int values() const { return heads * channels; }
    int mixed() const { return 2 * keys() + values(); }
    int inputs() const { return heads + keys() + values() + heads; }  // of a scan
};

struct DeltaSpec {  // part of the C interface
    Weights mixed, gate, beta, decay;  // [queries, keys and values, H], [values, H], twice [heads, H]; null: attention
    const float *convolution, *rates, *offsets, *norm;  // [mixed, taps], twice [heads], [channels]
    void* memory;           // of the convolution, see `ConvolutionSpec`
    float *states, *kept;   // see `ScanSpec`
};

template <class T>
struct DeltaBuffers {  // of a pass
    std::vector<float> projected, inputs, queries, read;  // [R, ...]: all products, of the scan, what states gave
    std::vector<T> mixed, convolved, out;
    QuantisedRows quantised;  // the same as `out`
    StateBuffers states;

    void reserve(const DeltaShape& shape, int columns, int rows) {
        projected.resize((size_t)rows * columns);
        inputs.resize((size_t)rows * shape.inputs());
        queries.resize((size_t)rows * shape.keys());
        read.resize((size_t)rows * shape.values());
        mixed.resize((size_t)rows * shape.mixed());
        convolved.resize((size_t)rows * shape.mixed());
        out.resize((size_t)rows * shape.values());
    }
};

// The steps of a layer, each of which begins when the one before has ended in all parts.
template <class T>
class DeltaLayer {
   public:
    DeltaLayer() = default;
    DeltaLayer(ThreadPool& pool, std::vector<Arena>& arenas, const DeltaShape& shape, const DeltaSpec& s, int hidden, float eps)
        : shape_(shape), eps_(eps), memory_(s.memory), states_(s.states), kept_(s.kept),
          rates_(s.rates, s.rates + shape.heads), offsets_(s.offsets, s.offsets + shape.heads), norm_(s.norm, s.norm + shape.channels) {
        const std::vector<typename Matrix<T>::Source> sources = {
            {s.mixed.data, s.mixed.type, shape.mixed(), nullptr},
            {s.gate.data, s.gate.type, shape.values(), nullptr},
            {s.beta.data, s.beta.type, shape.heads, nullptr},
            {s.decay.data, s.decay.type, shape.heads, nullptr},
        };
        projection_ = Matrix<T>(pool, arenas, sources, LANES, hidden, padded(hidden, LANES));
        convolution_.resize((size_t)shape.taps * shape.mixed());
        for (int c = 0; c < shape.mixed(); c++)
            for (int tap = 0; tap < shape.taps; tap++) convolution_[(size_t)tap * shape.mixed() + c] = s.convolution[c * shape.taps + tap];
    }

    const Matrix<T>& projection() const { return projection_; }

    // The products of normed rows, and the convolution of a part's columns of them.
    void project(int part, const ProductInput<T>& in, const StatePass& pass, DeltaBuffers<T>& b) const {
        projection_.product(part, in, b.projected.data(), projection_.columns(), false);
        const int begin = projection_.first_unit(part) * LANES, end = std::min(projection_.first_unit(part + 1) * LANES, shape_.mixed());
        if (begin >= end) return;
        for (int row = 0; row < in.rows; row++)
            for (int c = begin; c < end; c += LANES)
                Element<T>::narrow(&b.mixed[(size_t)row * shape_.mixed() + c], load<Floats>(&b.projected[(size_t)row * projection_.columns() + c]));
        const ConvolutionSpec spec = {
            .pass = &pass, .is_silu = true, .rows = in.rows, .channels = shape_.mixed(), .taps = shape_.taps,
            .weights = convolution_.data(), .bias = nullptr, .memory = memory_, .inputs = b.mixed.data(), .out = b.convolved.data()};
        Convolution<T>(spec).compute(begin, end);
    }

    // What changes and reads states, of a row.
    void prepare(int row, DeltaBuffers<T>& b) const {
        const int keys = shape_.keys(), heads = shape_.heads;
        const T* from = &b.convolved[(size_t)row * shape_.mixed()];
        float* inputs = &b.inputs[(size_t)row * shape_.inputs()];
        const float* betas = &b.projected[(size_t)row * projection_.columns()] + shape_.mixed() + shape_.values();
        const float* decays = betas + padded(heads, LANES);
        for (int h = 0; h < heads; h++) {
            const double a = decays[h] + offsets_[h];
            inputs[h] = (float)std::exp(rates_[h] * (a > 20 ? a : std::log1p(std::exp(a))));
            inputs[heads + keys + shape_.values() + h] = (float)(1 / (1 + std::exp(-(double)betas[h])));
        }
        const float scale = 1 / std::sqrt((float)shape_.size);
        for (int g = 0; g < shape_.groups; g++) {
            unit(from + g * shape_.size, scale, &b.queries[(size_t)row * keys + g * shape_.size]);
            unit(from + keys + g * shape_.size, 1.0f, inputs + heads + g * shape_.size);
        }
        for (int i = 0; i < shape_.values(); i += LANES) store(inputs + heads + keys + i, Element<T>::widen(from + 2 * keys + i));
    }

    void scan(int part, int parts, const StatePass& pass, DeltaBuffers<T>& b) const {
        const ScanSpec spec = scan_of(pass, b);
        Scan(spec, b.states).compute_part(part, parts);
    }

    // Keeps the inputs of a part's guesses.
    void keep(int part, int parts, const StatePass& pass, DeltaBuffers<T>& b) const {
        const ScanSpec spec = scan_of(pass, b);
        Scan(spec, b.states).keep_part(part, parts);
    }

    // What a row's states gave, normed and gated, in the forms that this matrix takes.
    void finish(int row, const Matrix<T>& output, DeltaBuffers<T>& b) const {
        const float* gate = &b.projected[(size_t)row * projection_.columns()] + shape_.mixed();
        float* read = &b.read[(size_t)row * shape_.values()];
        T* out = &b.out[(size_t)row * shape_.values()];
        for (int h = 0; h < shape_.heads; h++, read += shape_.channels, gate += shape_.channels, out += shape_.channels) {
            Floats squares = {};
            for (int c = 0; c < shape_.channels; c += LANES) squares += load<Floats>(read + c) * load<Floats>(read + c);
            const float factor = 1 / std::sqrt(sum_of(squares) / shape_.channels + eps_);
            for (int c = 0; c < shape_.channels; c += LANES) {
                const Floats numbers = load<Floats>(read + c) * factor * load<Floats>(&norm_[c]) * silu(load<Floats>(gate + c));
                if (output.takes_dense()) Element<T>::narrow(out + c, numbers);
                else store(read + c, numbers);
            }
        }
        if (output.takes_quantised()) b.quantised.quantise(row, &b.read[(size_t)row * shape_.values()], 0, shape_.values());
    }

   private:
    ScanSpec scan_of(const StatePass& pass, DeltaBuffers<T>& b) const {
        return {.pass = &pass, .heads = shape_.heads, .groups = shape_.groups, .size = shape_.size, .channels = shape_.channels,
                .decays = 1, .has_betas = true, .is_tiled = shape_.tiled, .rates = nullptr, .states = states_, .inputs = b.inputs.data(), .kept = kept_,
                .queries = b.queries.data(), .out = b.read.data()};
    }
    // A vector of a group, as long as `length`.
    void unit(const T* from, float length, float* to) const {
        Floats squares = {};
        for (int i = 0; i < shape_.size; i += LANES) squares += Element<T>::widen(from + i) * Element<T>::widen(from + i);
        const float factor = length / std::sqrt(sum_of(squares) + LEAST_SQUARE);
        for (int i = 0; i < shape_.size; i += LANES) store(to + i, Element<T>::widen(from + i) * factor);
    }

    static constexpr float LEAST_SQUARE = 1e-6f;  // of lengths, as in transformers

    DeltaShape shape_;
    float eps_ = 0;
    void* memory_ = nullptr;
    float *states_ = nullptr, *kept_ = nullptr;
    std::vector<float> rates_, offsets_, norm_, convolution_;
    Matrix<T> projection_;
};

}  // namespace paceline
