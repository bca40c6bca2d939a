// States of recurrent layers (gated delta rule, Mamba) and their short convolutions, of all tokens of a pass.
//
// A state is a matrix [size, channels] per head: state = decay * state + key x change, and a token reads query * state. Its
// columns are independent, so heads and blocks of columns are shared among threads, and a block stays in the cache from
// token to token. Every sum has one order and every step one rounding: a token's numbers follow from its path alone.
#pragma once
#include <algorithm>
#include <vector>

#include "thread_pool.hpp"
#include "vectors.hpp"

namespace paceline {

// All structures are part of the C interface; see native_states.py.
struct TokenOrder {  // tokens, each after its parent
    int64_t count;
    const int64_t* parents;  // a token, or ~ the index of the state where a path begins
    const int64_t* sources;  // a row of the pass, or ~ an entry of what was kept of earlier ones
    int64_t save_count;
    const int64_t* saves;  // [saves, 2]: a token, in their order, and the index of the state that it replaces
};

struct StatePass {  // one pass through states
    TokenOrder order;
    int64_t fresh_count;
    const int64_t* fresh;  // states that are zero before the pass
    int64_t window;        // M: as many inputs before a state or a row are known to a convolution
    int64_t first_entry, first_row;  // in a convolution's memory: entries of guesses, and this pass' rows
    const int64_t* windows;          // [rows, M], indices into that memory
    int64_t tail_count;
    const int64_t *tail_states, *tails;  // [tails], [tails, M]: inputs that are before these states from now on
    int64_t guess_count;
    const int64_t *guesses, *entries;  // rows that are kept, and where

    bool is_fresh(int64_t state) const { return std::find(fresh, fresh + fresh_count, state) != fresh + fresh_count; }
};

struct ScanSpec {
    const StatePass* pass;
    int32_t heads, groups, size, channels;  // the heads of a group, which are neighbours, share keys and queries
    int32_t decays;      // of a head: 1, `size`, or, with rates, `channels`
    int32_t has_betas;   // a change is beta * (value - key * state), else the value
    int32_t is_tiled;    // the heads of a group are as far from each other as there are groups
    const float* rates;  // [size, channels] or null: a number's decay is exp(rate * decay of its channel)
    float* states;       // [states, heads, size, channels]
    const float* inputs;         // of each row: decays [heads, decays], keys [groups, size], values [heads, channels] and
    float* kept;                 // betas [heads]; the same of entries
    const float* queries;        // [rows, groups, size]
    float* out;                  // [rows, heads, channels]
};

// Where the state of each token is while a pass runs: where its parent's was, unless that has more children.
struct StateBuffers {
    std::vector<int> of_token;
    int count = 0;

    StateBuffers() = default;
    explicit StateBuffers(const TokenOrder& order) : of_token(order.count) {
        std::vector<int64_t> last_child(order.count, -1);
        for (int64_t t = 0; t < order.count; t++)
            if (order.parents[t] >= 0) last_child[order.parents[t]] = t;
        std::vector<int> free;
        auto take = [&] {
            if (free.empty()) return count++;
            const int buffer = free.back();
            free.pop_back();
            return buffer;
        };
        for (int64_t t = 0; t < order.count; t++)
            if (order.parents[t] < 0) of_token[t] = take();  // all are read before any state is replaced
        for (int64_t t = 0; t < order.count; t++) {
            const int64_t parent = order.parents[t];
            if (parent >= 0) of_token[t] = last_child[parent] == t ? of_token[parent] : take();
            if (last_child[t] < 0) free.push_back(of_token[t]);
        }
    }
};

class Scan {
   public:
    Scan(const ScanSpec& spec, const StateBuffers& buffers)
        : spec_(spec), pass_(*spec.pass), buffers_(buffers), blocks_((spec.channels + WIDTH - 1) / WIDTH),
          zeros_(std::max<int32_t>(spec.size, WIDTH)) {}

    void run(ThreadPool& pool) const {
        pool.run(2, [&](int phase, int part, int) {
            if (phase == 0) compute_part(part, pool.parts());
            else keep_part(part, pool.parts());
        });
    }
    // Heads and columns of a part.
    void compute_part(int part, int parts) const {
        thread_local std::vector<float> buffers;
        buffers.resize((size_t)(buffers_.count + 1) * block_size());
        for (int unit = part; unit < spec_.heads * blocks_; unit += parts)
            compute(unit / blocks_, unit % blocks_ * WIDTH, buffers.data());
    }
    // Keeps the inputs of guesses, after all parts have been computed: entries that were read may be among theirs.
    void keep_part(int part, int parts) const {
        const size_t count = input_size();
        for (int64_t i = part; i < pass_.guess_count; i += parts)
            std::copy_n(spec_.inputs + pass_.guesses[i] * count, count, spec_.kept + pass_.entries[i] * count);
    }

   private:
    static constexpr int WIDTH = 32;  // columns of a block: of 128 numbers each they fit the L1 cache
    static constexpr int BLOCK_PARTS = WIDTH / PART;

    size_t block_size() const { return (size_t)spec_.size * WIDTH; }
    size_t input_size() const {
        const size_t betas = spec_.has_betas ? spec_.heads : 0;
        return spec_.heads * spec_.decays + spec_.groups * spec_.size + spec_.heads * spec_.channels + betas;
    }

    // All tokens of a block of columns.
    void compute(int head, int column, float* buffers) const {
        const TokenOrder& order = pass_.order;
        const int width = std::min(WIDTH, spec_.channels - column);
        auto buffer = [&](int64_t token) { return buffers + buffers_.of_token[token] * block_size(); };
        auto state = [&](int64_t index) {
            return spec_.states + (index * spec_.heads + head) * spec_.size * spec_.channels + column;
        };
        auto copy = [&](const float* from, size_t from_stride, float* to, size_t to_stride) {
            for (int n = 0; n < spec_.size; n++) std::copy_n(from + n * from_stride, width, to + n * to_stride);
        };
        float* rates = buffers + buffers_.count * block_size();
        if (spec_.rates) copy(spec_.rates + column, spec_.channels, rates, WIDTH);
        for (int64_t t = 0; t < order.count; t++) {
            if (order.parents[t] >= 0) continue;
            if (pass_.is_fresh(~order.parents[t])) std::fill_n(buffer(t), block_size(), 0.0f);
            else copy(state(~order.parents[t]), spec_.channels, buffer(t), WIDTH);
        }
        const int64_t* saved = order.saves;
        for (int64_t t = 0; t < order.count; t++) {
            const int64_t parent = order.parents[t];
            if (parent >= 0 && buffer(parent) != buffer(t)) std::copy_n(buffer(parent), block_size(), buffer(t));
            if (spec_.has_betas) advance<true, false>(t, head, column, width, buffer(t), rates);
            else if (spec_.rates) advance<false, true>(t, head, column, width, buffer(t), rates);
            else advance<false, false>(t, head, column, width, buffer(t), rates);
            for (; saved < order.saves + 2 * order.save_count && saved[0] == t; saved += 2)
                copy(buffer(t), WIDTH, state(saved[1]), spec_.channels);
        }
    }

    // From the state before a token, a block [size, WIDTH], to the one after it, and what the token reads.
    template <bool BETAS, bool RATES>
    void advance(int64_t token, int head, int column, int width, float* state, const float* rates) const {
        const int size = spec_.size, group = spec_.is_tiled ? head % spec_.groups : head / (spec_.heads / spec_.groups);
        const int64_t source = pass_.order.sources[token];
        const size_t keys = spec_.heads * spec_.decays, values = keys + spec_.groups * size;
        const size_t betas = values + spec_.heads * spec_.channels, stride = input_size();
        const float* inputs = source >= 0 ? spec_.inputs + source * stride : spec_.kept + ~source * stride;
        const float* key = inputs + keys + group * size;
        const float* query = source >= 0 ? spec_.queries + (source * spec_.groups + group) * size : zeros_.data();
        const float* decays = inputs + head * spec_.decays;
        const int decay_step = spec_.decays > 1;
        alignas(64) float columns[WIDTH] = {};
        auto load_columns = [&](const float* from, PartFloats* to) {
            std::copy_n(from + column, width, columns);
            for (int p = 0; p < BLOCK_PARTS; p++) to[p] = load<PartFloats>(columns + p * PART);
        };
        PartFloats change[BLOCK_PARTS], read[BLOCK_PARTS] = {}, steps[BLOCK_PARTS];
        load_columns(inputs + values + head * spec_.channels, change);
        if constexpr (RATES) load_columns(decays, steps);
        if constexpr (BETAS) {
            PartFloats known[BLOCK_PARTS] = {};
            for (int n = 0; n < size; n++) {
                const PartFloats factor = all_of_part(decays[n * decay_step] * key[n]);
                for (int p = 0; p < BLOCK_PARTS; p++)
                    known[p] = fused(load<PartFloats>(state + n * WIDTH + p * PART), factor, known[p]);
            }
            for (int p = 0; p < BLOCK_PARTS; p++) change[p] = (change[p] - known[p]) * inputs[betas + head];
        }
        for (int n = 0; n < size; n++) {
            const PartFloats k = all_of_part(key[n]), q = all_of_part(query[n]);
            for (int p = 0; p < BLOCK_PARTS; p++) {
                float* at = state + n * WIDTH + p * PART;
                PartFloats decay;
                if constexpr (RATES) decay = exp_of_part(load<PartFloats>(rates + n * WIDTH + p * PART) * steps[p]);
                else decay = all_of_part(decays[n * decay_step]);
                const PartFloats after = fused(change[p], k, load<PartFloats>(at) * decay);
                store(at, after);
                read[p] = fused(after, q, read[p]);
            }
        }
        if (source < 0) return;
        for (int p = 0; p < BLOCK_PARTS; p++) store(columns + p * PART, read[p]);
        std::copy_n(columns, width, spec_.out + (source * spec_.heads + head) * spec_.channels + column);
    }

    const ScanSpec& spec_;
    const StatePass& pass_;
    const StateBuffers& buffers_;
    const int blocks_;
    const std::vector<float> zeros_;  // the query of a token that is no row
};

struct ConvolutionSpec {
    const StatePass* pass;
    int32_t is_bf16, is_silu, rows, channels, taps;  // M is at least taps - 1
    const float *weights, *bias;    // [taps, channels padded to LANES], [channels padded] or null
    void* memory;                   // [first row, channels]
    const void* inputs;             // [rows, channels], which indices from `first_row` on mean
    void* out;                      // [rows, channels]
};

template <class T>
class Convolution {
   public:
    explicit Convolution(const ConvolutionSpec& spec) : spec_(spec), pass_(*spec.pass) {}

    void run(ThreadPool& pool) const {
        const int blocks = (spec_.channels + LANES - 1) / LANES, parts = pool.parts();
        pool.run(1, [&](int, int part, int) {
            const int begin = blocks * part / parts * LANES;
            const int end = std::min(blocks * (part + 1) / parts * LANES, spec_.channels);
            if (begin < end) compute(begin, end);
        });
    }

    // Channels [begin, end) of all rows; `begin` is a multiple of LANES.
    void compute(int begin, int end) const {
        for (int row = 0; row < spec_.rows; row++)
            for (int c = begin; c < end; c += LANES) convolve(row, c, std::min(LANES, end - c));
        // Tails may be inputs of entries and of states, which are replaced now.
        const int width = end - begin, window = pass_.window;
        thread_local std::vector<T> tails;
        tails.resize(pass_.tail_count * window * width);
        for (int64_t i = 0; i < pass_.tail_count * window; i++) std::copy_n(input(pass_.tails[i]) + begin, width, &tails[i * width]);
        for (int64_t i = 0; i < pass_.tail_count * window; i++)
            std::copy_n(&tails[i * width], width, memory(1 + pass_.tail_states[i / window] * window + i % window) + begin);
        for (int64_t i = 0; i < pass_.guess_count; i++)
            std::copy_n(row_input(pass_.guesses[i]) + begin, width, memory(pass_.first_entry + pass_.entries[i]) + begin);
    }

   private:
    // A row's channels [c, c + width).
    void convolve(int row, int c, int width) const {
        const int taps = spec_.taps, stride = padded(spec_.channels, LANES);
        auto weights = [&](int tap) { return load<Floats>(spec_.weights + (size_t)tap * stride + c); };
        Floats sum = widened(row_input(row) + c, width) * weights(taps - 1);
        const int64_t* before = pass_.windows + (int64_t)(row + 1) * pass_.window - (taps - 1);
        for (int tap = 0; tap < taps - 1; tap++) sum = fused(widened(input(before[tap]) + c, width), weights(tap), sum);
        if (spec_.bias) sum += load<Floats>(spec_.bias + c);
        T out[LANES];
        Element<T>::narrow(out, sum);
        if (spec_.is_silu) Element<T>::narrow(out, silu(Element<T>::widen(out)));
        std::copy_n(out, width, (T*)spec_.out + (size_t)row * spec_.channels + c);
    }

    static Floats widened(const T* from, int count) {
        if (count == LANES) return Element<T>::widen(from);
        T some[LANES] = {};
        std::copy_n(from, count, some);
        return Element<T>::widen(some);
    }

    T* memory(int64_t index) const { return (T*)spec_.memory + index * spec_.channels; }
    const T* row_input(int64_t row) const { return (const T*)spec_.inputs + row * spec_.channels; }
    const T* input(int64_t index) const { return index < pass_.first_row ? memory(index) : row_input(index - pass_.first_row); }

    const ConvolutionSpec& spec_;
    const StatePass& pass_;
};

}  // namespace paceline
