// Llama decoder layers over rows as one pass, with an embedding before them and a final norm and a head after them.
//
//   x  = embedding of the token, or a function of it and a given state, see below
//   x += output( attention( heads of qkv( norm(x) ) ) )        in every layer; heads may be normed, and are rotated
//   x += down( silu(gate(norm(x))) * up(norm(x)) )
//   logits = head( norm(x) )                                    of the wanted rows
//
// Variants: the embedding is scaled; what is added to x is normed, or scaled; GELU in place of SiLU; a layer has rotary
// tables of its own; only the first elements of a head are rotated; scores are capped; attention's result is gated. A layer
// may keep a state in place of keys and values, see delta_layer.hpp.
//
// With a given state in each row, j = [norm(embedding); norm(state)]. Either x = projection(j), or x is the state, normed
// or not, and the first layer's attention takes j in place of norm(x).
//
// x is float. Inputs of products (normed x, heads, attention's result, the MLP's inner numbers) are rounded to T, or
// quantised where the weights are.
// Shapes: R rows, H hidden size. Widths of buffers are padded with zeros to multiples of 16.
#pragma once
#include <variant>

#include "attention.hpp"
#include "delta_layer.hpp"
#include "matrix.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct LayerSpec {  // part of the C interface; null for a missing one
    Weights query, key, value, output, gate, up, down;
    Weights output_gate;  // [query heads, H]: its sigmoid multiplies attention's result
    DeltaSpec delta;
    const float *input_norm, *query_bias, *key_bias, *value_bias, *query_norm, *key_norm;
    const float *output_bias, *inner_norm, *gate_bias, *up_bias, *down_bias;
    const float *attention_out_norm, *mlp_out_norm;  // of what is added to x
    const float *cosines, *sines;                    // [positions, rotary size / 2]
    int32_t cache_index;   // among the layers that have keys and values
    int32_t window;        // 0: none
    int32_t input_width;   // of attention: H, or twice H padded
};

struct NetworkSpec {  // part of the C interface
    int32_t is_bf16, layers, hidden, inner, query_heads, key_value_heads, head_size, head_width, positions, vocabulary;
    int32_t has_states, norms_residual;       // whether rows have states; whether x is the normed state
    int32_t is_int8_cache;                    // whether keys and values have 8 bits
    int32_t rotary_size, is_gelu;             // elements of a head that are rotated; whether GELU is in place of SiLU
    DeltaShape delta;                         // zeros if no layer keeps a state
    float eps, scale, softcap, embedding_scale, residual_scale;  // softcap: of scores, 0: none
    Weights embedding, head, projection;      // [vocabulary, H] each, [H, twice H padded]; null for a missing one
    const float *norm, *token_norm, *state_norm, *projection_bias;  // [H], or null
    void* cache;                              // [layers with keys and values], see `LayerCache`
    int64_t slots;
    void (*sum)(float* values, int64_t count);  // sums over the ranks that share the layers; null: one rank
    void (*layer_packed)();                     // called when a layer's weights have been copied
};

struct PassSpec {  // part of the C interface
    Rows rows;
    const int32_t* tokens;      // [R]
    const void* states;         // [R, H] if the network has states
    const int32_t* wanted;      // [wanted_count] rows whose logits are computed
    int32_t wanted_count;
    float* logits;              // [wanted_count, padded vocabulary]
    const int32_t* taps;        // [tap_count]: n is layer n's input; layers + 1 the final norm's output
    int32_t tap_count;
    void* tapped;               // [R, tap_count, H]
    const StatePass* through_states;  // null if no layer keeps a state
};

class AnyNetwork {
   public:
    virtual ~AnyNetwork() = default;
    virtual void run(ThreadPool& pool, const PassSpec& pass) = 0;
    // Logits [rows, padded vocabulary] of the final norm's outputs [rows, padded H].
    virtual void output(ThreadPool& pool, const void* final_states, int rows, float* logits) = 0;
};

template <class T>
class Network : public AnyNetwork {
   public:
    Network(const NetworkSpec& spec, const LayerSpec* layers, ThreadPool& pool)
        : spec_(spec),
          heads_{spec.key_value_heads, spec.query_heads / spec.key_value_heads, spec.head_width},
          hidden_(padded(spec.hidden, LANES)),
          inner_(padded(spec.inner, LANES)),
          attended_(spec.query_heads * spec.head_width),
          arenas_(pool.parts()) {
        // The largest matrix first: while it is copied it is in memory twice.
        if (spec.head.data) head_ = matrix(pool, spec.head, spec.vocabulary, nullptr, spec.hidden, hidden_);
        phases_.push_back({BEGIN, 0});
        for (int l = 0; l < spec.layers; l++) {
            add_phases(l, layers[l]);
            layers_.emplace_back(*this, pool, layers[l]);
            const Layer& layer = layers_[l];
            takes_quantised_ |= layer.output.takes_quantised() || layer.down.takes_quantised();
            is_gated_ |= layer.is_gated;
            if (layer.keeps_state) delta_columns_ = std::max(delta_columns_, layer.delta.projection().columns());
            spec.layer_packed();
        }
        phases_.push_back({FINISH, spec.layers});
        token_norm_ = vector_of(spec.token_norm, spec.hidden, hidden_);
        state_norm_ = vector_of(spec.state_norm, spec.hidden, hidden_);
        if (spec.projection.data)
            projection_ = matrix(pool, spec.projection, spec.hidden, spec.projection_bias, 2 * hidden_, 2 * hidden_);
        final_norm_ = vector_of(spec.norm, spec.hidden, hidden_);
        for (int t = 0; t < pool.parts(); t++) scratch_.push_back(std::make_unique<Scratch>(heads_, spec, hidden_));
    }

    void run(ThreadPool& pool, const PassSpec& pass) override {
        pass_ = &pass;
        reserve(pass.rows.count);
        chunks_ = Attention<T>::chunks(pass.rows, heads_, (int)arenas_.size());
        if (pass.through_states) delta_.states = StateBuffers(pass.through_states->order);
        for (auto& scratch : scratch_) scratch->normed = -1;
        const int phases = (int)phases_.size();
        if (!spec_.sum) return pool.run(phases, [&](int phase, int part, int thread) { step(phase, part, thread); });
        for (int phase = 0; phase < phases; phase++) {
            pool.run(1, [&](int, int part, int thread) { step(phase, part, thread); });
            const auto [kind, layer] = phases_[phase];
            if (kind == OUTPUT || kind == DOWN) add_sum(layers_[layer], kind);
        }
    }

    void output(ThreadPool& pool, const void* final_states, int rows, float* logits) override {
        QuantisedRows quantised;
        if (head_.takes_quantised()) {
            std::vector<float> row(hidden_);
            quantised.resize(rows, hidden_);
            for (int r = 0; r < rows; r++) {
                for (int i = 0; i < hidden_; i++) row[i] = Element<T>::widen_one(((const T*)final_states)[(size_t)r * hidden_ + i]);
                quantised.quantise(r, row.data(), 0, hidden_);
            }
        }
        const ProductInput<T> in{(const T*)final_states, &quantised, rows};
        pool.run(1, [&](int, int part, int) { head_.product(part, in, logits, head_.columns(), false); });
    }

   private:
    enum Kind { BEGIN, HEADS, ATTEND, PROJECT, PREPARE, SCAN, GATE, OUTPUT, ADD_OUTPUT, INNER, DOWN, ADD_DOWN, FINISH };
    struct Phase {
        Kind kind;
        int layer;
    };

    // Sums over ranks are added to x by `add_sum`, norms and scales in a phase of their own, all others by the product.
    void add_phases(int layer, const LayerSpec& s) {
        adds_apart_ |= s.attention_out_norm || s.mlp_out_norm || spec_.residual_scale != 1.0f;
        if (s.delta.mixed.data)
            for (Kind kind : {PROJECT, PREPARE, SCAN, GATE}) phases_.push_back({kind, layer});
        else
            for (Kind kind : {HEADS, ATTEND}) phases_.push_back({kind, layer});
        for (Kind kind : {OUTPUT, ADD_OUTPUT, INNER, DOWN, ADD_DOWN})
            if (adds_apart_ || (kind != ADD_OUTPUT && kind != ADD_DOWN)) phases_.push_back({kind, layer});
    }

    struct Layer {
        Layer(Network& n, ThreadPool& pool, const LayerSpec& s)
            : cosines(s.cosines), sines(s.sines), cache_index(s.cache_index), window(s.window), keeps_state(s.delta.mixed.data),
              is_gated(s.output_gate.data) {
            const NetworkSpec& spec = n.spec_;
            input_norm = vector_of(s.input_norm, spec.hidden, n.hidden_);
            inner_norm = vector_of(s.inner_norm, spec.hidden, n.hidden_);
            attention_out_norm = vector_of(s.attention_out_norm, spec.hidden, n.hidden_);
            mlp_out_norm = vector_of(s.mlp_out_norm, spec.hidden, n.hidden_);
            if (keeps_state) {
                delta = DeltaLayer<T>(pool, n.arenas_, spec.delta, s.delta, spec.hidden, spec.eps);
                output = n.matrix(pool, s.output, spec.hidden, s.output_bias, spec.delta.values(), spec.delta.values());
            } else {
                add_attention(n, pool, s);
            }
            const int unit = s.down.type == DENSE ? LANES : BLOCK;  // a part quantises the blocks that it computes
            gate = n.matrix(pool, s.gate, spec.inner, s.gate_bias, spec.hidden, n.hidden_, unit);
            up = n.matrix(pool, s.up, spec.inner, s.up_bias, spec.hidden, n.hidden_, unit);
            down = n.matrix(pool, s.down, spec.hidden, spec.sum ? nullptr : s.down_bias, spec.inner, n.inner_);
            if (spec.sum) {  // the bias is added once, to the sum
                output_bias_after = vector_of(s.output_bias, spec.hidden, n.hidden_);
                down_bias_after = vector_of(s.down_bias, spec.hidden, n.hidden_);
            }
        }
        void add_attention(Network& n, ThreadPool& pool, const LayerSpec& s) {
            const NetworkSpec& spec = n.spec_;
            const int head = spec.head_size, width = spec.head_width;
            query_norm = vector_of(s.query_norm, head, width);
            key_norm = vector_of(s.key_norm, head, width);
            if (spec.is_int8_cache && s.key_bias && !s.key_norm) key_units = n.units_of_keys(s.key_bias);
            std::vector<typename Matrix<T>::Source> sources;
            auto add_heads = [&](Weights weights, const float* bias, int count) {
                const size_t bytes = weights.type == DENSE ? s.input_width * sizeof(T) : file_bytes(weights.type, s.input_width);
                for (int i = 0; i < count; i++)
                    sources.push_back({(const uint8_t*)weights.data + i * head * bytes, weights.type, head,
                                       bias ? bias + i * head : nullptr});
            };
            add_heads(s.query, s.query_bias, spec.query_heads);
            add_heads(s.key, s.key_bias, spec.key_value_heads);
            add_heads(s.value, s.value_bias, spec.key_value_heads);
            if (is_gated) add_heads(s.output_gate, nullptr, spec.query_heads);
            qkv = Matrix<T>(pool, n.arenas_, sources, width, s.input_width, padded(s.input_width, LANES));
            const float* output_bias = spec.sum ? nullptr : s.output_bias;
            if (s.output.type == DENSE) {
                std::vector<T> spread = n.spread_heads((const T*)s.output.data);
                output = n.matrix(pool, {spread.data(), DENSE}, spec.hidden, output_bias, n.attended_, n.attended_);
            } else {  // heads have no padding
                output = n.matrix(pool, s.output, spec.hidden, output_bias, n.attended_, n.attended_);
            }
        }
        const float *cosines, *sines;
        int cache_index, window;
        bool keeps_state, is_gated;
        std::vector<float> input_norm, inner_norm, attention_out_norm, mlp_out_norm, query_norm, key_norm, key_units;
        std::vector<float> output_bias_after, down_bias_after;
        Matrix<T> qkv, output, gate, up, down;  // qkv: and the gate of attention's result
        DeltaLayer<T> delta;
    };

    struct Scratch {  // of one thread
        Scratch(Heads heads, const NetworkSpec& spec, int hidden) : row(hidden), both(2 * hidden) {
            if (spec.is_int8_cache) attention.template emplace<Attention<int8_t>>(heads, spec.positions);
            else attention.template emplace<Attention<T>>(heads, spec.positions);
        }
        std::variant<std::monostate, Attention<T>, Attention<int8_t>> attention;
        std::vector<float> row;  // an embedding, a state, or a normed row
        std::vector<float> both;  // a normed embedding and a normed state
        std::vector<T> input;    // normed rows
        QuantisedRows quantised;
        int normed = -1;         // in which phase
    };

    // One part of a phase.
    void step(int phase, int part, int thread) {
        const auto [kind, l] = phases_[phase];
        const int rows = pass_->rows.count;
        if (kind == BEGIN) return begin(phase, part, thread);
        if (kind == FINISH) return finish(phase, part, thread);
        const Layer& layer = layers_[l];
        const bool adds = !spec_.sum && !adds_apart_;
        float* residual = adds ? x_.data() : partial_.data();
        switch (kind) {
            case HEADS: {
                tap(l, part);
                bool joins = l == 0 && spec_.has_states && !spec_.projection.data;
                const auto in = joins ? joined(phase, thread, layer.qkv) : normed(phase, thread, layer.input_norm, layer.qkv);
                layer.qkv.product(part, in, projected_.data(), layer.qkv.columns(), false);
                for (int unit = layer.qkv.first_unit(part); unit < layer.qkv.first_unit(part + 1); unit++)
                    for (int row = 0; row < rows; row++) finish_head(layer, unit, row);
                break;
            }
            case ATTEND: attend(layer, part, thread); break;
            case PROJECT:
                tap(l, part);
                layer.delta.project(part, normed(phase, thread, layer.input_norm, layer.delta.projection()), *pass_->through_states, delta_);
                break;
            case PREPARE: for_rows(part, [&](int row) { layer.delta.prepare(row, delta_); }); break;
            case SCAN: layer.delta.scan(part, (int)arenas_.size(), *pass_->through_states, delta_); break;
            case GATE:
                layer.delta.keep(part, (int)arenas_.size(), *pass_->through_states, delta_);
                for_rows(part, [&](int row) { layer.delta.finish(row, layer.output, delta_); });
                break;
            case OUTPUT:
                layer.output.product(part, mixed(layer), residual, hidden_, adds);
                break;
            case ADD_OUTPUT: add_part(layer.attention_out_norm, part, thread); break;
            case INNER: {
                const auto in = normed(phase, thread, layer.inner_norm, layer.gate, layer.up);
                layer.gate.product(part, in, gate_.data(), inner_, false);
                layer.up.product(part, in, up_.data(), inner_, false);
                activate(layer, part);
                break;
            }
            case DOWN:
                layer.down.product(part, {activated_.data(), &quantised_activated_, rows}, residual, hidden_, adds);
                break;
            case ADD_DOWN: add_part(layer.mlp_out_norm, part, thread); break;
            default: break;
        }
    }

    // What attention or a state gave.
    ProductInput<T> mixed(const Layer& layer) const {
        const int rows = pass_->rows.count;
        if (layer.keeps_state) return {delta_.out.data(), &delta_.quantised, rows};
        return {attended_rows_.data(), &quantised_attended_, rows};
    }

    // Adds `partial_`, normed and scaled, to x: of a part's rows.
    void add_part(const std::vector<float>& norm, int part, int thread) {
        float* row_sum = scratch_[thread]->row.data();
        for_rows(part, [&](int row) {
            float* x = &x_[(size_t)row * hidden_];
            norm_row(&partial_[(size_t)row * hidden_], norm, row_sum);
            for (int i = 0; i < hidden_; i++) x[i] += spec_.residual_scale * row_sum[i];
        });
    }

    // activation(gate) * up of the part's columns, as the input of `down`.
    void activate(const Layer& layer, int part) {
        const int unit = layer.gate.columns() / layer.gate.first_unit((int)arenas_.size());
        const int begin = layer.gate.first_unit(part) * unit, end = std::min(layer.gate.first_unit(part + 1) * unit, inner_);
        for (int row = 0; row < pass_->rows.count; row++) {
            float *gate = &gate_[(size_t)row * inner_], *up = &up_[(size_t)row * inner_];
            T* to = &activated_[(size_t)row * inner_];
            for (int i = begin; i < end; i += LANES) {
                const Floats in = load<Floats>(gate + i), numbers = (spec_.is_gelu ? gelu(in) : silu(in)) * load<Floats>(up + i);
                if (layer.down.takes_dense()) Element<T>::narrow(to + i, numbers);
                else store(gate + i, numbers);
            }
            if (layer.down.takes_quantised()) quantised_activated_.quantise(row, gate, begin, end);
        }
    }

    // Computes the first layer's input.
    void begin(int phase, int part, int thread) {
        if (spec_.projection.data)
            return projection_.product(part, joined(phase, thread, projection_), x_.data(), hidden_, false);
        for_rows(part, [&](int row) {
            float* x = &x_[(size_t)row * hidden_];
            if (spec_.has_states)
                widen(state(row), x);
            else
                embed(row, x);
            if (spec_.norms_residual) norm_row(x, state_norm_, x);
        });
    }
    // The embedding of a row's token: to [H].
    void embed(int row, float* to) const {
        const auto [data, type] = spec_.embedding;
        const size_t token = pass_->tokens[row];
        if (type == DENSE) widen((const T*)data + token * spec_.hidden, to);
        else dequantise(type, (const uint8_t*)data + token * file_bytes(type, spec_.hidden), spec_.hidden, to);
        if (spec_.embedding_scale != 1.0f)
            for (int i = 0; i < spec_.hidden; i++) to[i] *= spec_.embedding_scale;
    }
    const T* state(int row) const { return (const T*)pass_->states + (size_t)row * spec_.hidden; }
    void widen(const T* from, float* to) const {
        for (int i = 0; i < spec_.hidden; i++) to[i] = Element<T>::widen_one(from[i]);
    }

    // Norms, rotates and rounds a head of a row; keys and values go to the row's slot.
    void finish_head(const Layer& layer, int unit, int row) {
        const int queries = spec_.query_heads, key_values = spec_.key_value_heads, width = spec_.head_width;
        if (unit >= queries + 2 * key_values) return;  // of a gate
        float* head = &projected_[(size_t)row * layer.qkv.columns() + (size_t)unit * width];
        if (unit < queries + key_values) {
            const std::vector<float>& norm = unit < queries ? layer.query_norm : layer.key_norm;
            if (!norm.empty()) {
                float factor = norm_factor(head, spec_.head_size, width);
                for (int i = 0; i < width; i++) head[i] *= factor * norm[i];
            }
            rotate(layer, head, pass_->rows.positions[row]);
            if (!layer.key_units.empty()) {
                const bool is_key = unit >= queries;
                const float* units = &layer.key_units[(size_t)(is_key ? unit - queries : unit / heads_.queries_per_key) * width];
                for (int i = 0; i < width; i++) head[i] = is_key ? head[i] / units[i] : head[i] * units[i];
            }
        }
        if (spec_.is_int8_cache) store_head<int8_t>(head, layer, unit, row, codes_.data());
        else store_head<T>(head, layer, unit, row, queries_.data());
    }
    template <class Cached>
    void store_head(const float* head, const Layer& layer, int unit, int row, QueryNumber<Cached>* queries) {
        const int count = spec_.query_heads, key = unit - count, value = key - spec_.key_value_heads;
        const int size = heads_.template query_size<Cached>();
        if (key < 0) return heads_.template store_query<Cached>(head, queries + ((size_t)row * count + unit) * size);
        const LayerCache<Cached> cache = layer_cache<Cached>(layer);
        const int slot = pass_->rows.own_slot(row);
        if (value < 0) heads_.store_key(head, cache.key(key, slot));
        else heads_.store_value(head, cache.value(value, slot));
    }
    template <class Cached>
    LayerCache<Cached> layer_cache(const Layer& layer) const {
        LayerCache<Cached> cache{heads_, (uint8_t*)spec_.cache, (size_t)spec_.slots};
        cache.data += layer.cache_index * cache.bytes();
        return cache;
    }

    // Rotary position embedding (Su et al. 2021), the halves of what is rotated as real and imaginary parts.
    void rotate(const Layer& layer, float* head, int position) {
        const int half = spec_.rotary_size / 2;
        const float *cosines = layer.cosines + (size_t)position * half, *sines = layer.sines + (size_t)position * half;
        for (int i = 0; i < half; i++) {
            float a = head[i], b = head[i + half];
            head[i] = a * cosines[i] - b * sines[i];
            head[i + half] = b * cosines[i] + a * sines[i];
        }
    }

    void attend(const Layer& layer, int part, int thread) {
        if (spec_.is_int8_cache) attend(layer, part, std::get<Attention<int8_t>>(scratch_[thread]->attention), codes_.data());
        else attend(layer, part, std::get<Attention<T>>(scratch_[thread]->attention), queries_.data());
    }
    template <class Cached>
    void attend(const Layer& layer, int part, Attention<Cached>& attention, const QueryNumber<Cached>* queries) {
        const LayerCache<Cached> cache = layer_cache<Cached>(layer);
        const AttentionOptions options = {.scale = spec_.scale, .softcap = spec_.softcap, .window = layer.window};
        const int parts = (int)arenas_.size();
        if (layer.output.takes_dense() && !layer.is_gated)
            return attention(pass_->rows, chunks_, part, parts, options, cache, queries, attended_rows_.data());
        attention(pass_->rows, chunks_, part, parts, options, cache, queries, attended_floats_.data());
        const int group = heads_.queries_per_key * heads_.width;
        attention.for_each_item(chunks_, part, parts, [&](Chunk chunk, int key_head) {
            for (int row = chunk.first; row < chunk.end; row++)
                finish_attended(layer, row, key_head * group, (key_head + 1) * group);
        });
    }
    // Gates what a row has attended to in [begin, end), and rounds or quantises it.
    void finish_attended(const Layer& layer, int row, int begin, int end) {
        float* attended = &attended_floats_[(size_t)row * attended_];
        const float* gate = &projected_[(size_t)row * layer.qkv.columns()] + attended_ + 2 * spec_.key_value_heads * spec_.head_width;
        if (layer.is_gated)
            for (int i = begin; i < end; i += LANES) store(attended + i, load<Floats>(attended + i) * sigmoid(load<Floats>(gate + i)));
        if (layer.output.takes_quantised()) return quantised_attended_.quantise(row, attended, begin, end);
        for (int i = begin; i < end; i += LANES)
            Element<T>::narrow(&attended_rows_[(size_t)row * attended_ + i], load<Floats>(attended + i));
    }

    // The final norm, of all rows if it is tapped, and the head, of the wanted rows.
    void finish(int phase, int part, int thread) {
        tap(spec_.layers, part);
        for (int i = 0; i < pass_->tap_count; i++)
            if (pass_->taps[i] == spec_.layers + 1) {
                const T* all_rows = normed(phase, thread, final_norm_).dense;
                for_rows(part, [&](int row) {
                    memcpy(tapped(row, i), all_rows + (size_t)row * hidden_, spec_.hidden * sizeof(T));
                });
            }
        const int wanted = pass_->wanted_count;
        if (!spec_.head.data || !wanted) return;
        Scratch& mine = *scratch_[thread];
        if (head_.takes_quantised()) mine.quantised.resize(wanted, hidden_);
        for (int i = 0; i < wanted; i++) norm_input(mine, &x_[(size_t)pass_->wanted[i] * hidden_], final_norm_, i, head_);
        mine.normed = -1;
        head_.product(part, {mine.input.data(), &mine.quantised, wanted}, pass_->logits, head_.columns(), false);
    }

    // Copies layer n's input if it is tapped. x does not change in the phases that call this.
    void tap(int n, int part) {
        for (int i = 0; i < pass_->tap_count; i++) {
            if (pass_->taps[i] != n) continue;
            for_rows(part, [&](int row) {
                T rounded[LANES];
                for (int h = 0; h < spec_.hidden; h += LANES) {
                    Element<T>::narrow(rounded, load<Floats>(&x_[(size_t)row * hidden_ + h]));
                    memcpy(tapped(row, i) + h, rounded, std::min(LANES, spec_.hidden - h) * sizeof(T));
                }
            });
        }
    }
    T* tapped(int row, int i) { return (T*)pass_->tapped + ((size_t)row * pass_->tap_count + i) * spec_.hidden; }

    // All rows, normed, as inputs of these matrices, or in T if there are none. Every thread computes its own copy, which is
    // cheaper than another phase.
    template <class... Matrices>
    ProductInput<T> normed(int phase, int thread, const std::vector<float>& norm, const Matrices&... matrices) {
        Scratch& mine = *scratch_[thread];
        const int rows = pass_->rows.count;
        if (mine.normed != phase) {
            if ((matrices.takes_quantised() || ...)) mine.quantised.resize(rows, hidden_);
            for (int row = 0; row < rows; row++) norm_input(mine, &x_[(size_t)row * hidden_], norm, row, matrices...);
        }
        mine.normed = phase;
        return {mine.input.data(), &mine.quantised, rows};
    }
    // Norms x [H] as row `to` of the inputs that these matrices need.
    template <class... Matrices>
    void norm_input(Scratch& mine, const float* x, const std::vector<float>& norm, int to, const Matrices&... matrices) {
        if ((matrices.takes_quantised() || ...)) {
            norm_row(x, norm, mine.row.data());
            mine.quantised.quantise(to, mine.row.data(), 0, hidden_);
        }
        if (sizeof...(matrices) == 0 || (matrices.takes_dense() || ...)) norm_row(x, norm, &mine.input[(size_t)to * hidden_]);
    }
    // The normed embeddings and states of all rows, concatenated: [R, 2 * H], as inputs of this matrix.
    ProductInput<T> joined(int phase, int thread, const Matrix<T>& matrix) {
        Scratch& mine = *scratch_[thread];
        const int rows = pass_->rows.count;
        auto join = [&](int row, auto* to) {
            embed(row, mine.row.data());
            norm_row(mine.row.data(), token_norm_, to);
            widen(state(row), mine.row.data());
            norm_row(mine.row.data(), state_norm_, to + hidden_);
        };
        if (mine.normed != phase) {
            if (matrix.takes_quantised()) mine.quantised.resize(rows, 2 * hidden_);
            for (int row = 0; row < rows; row++) {
                if (matrix.takes_dense()) join(row, &mine.input[(size_t)row * 2 * hidden_]);
                if (!matrix.takes_quantised()) continue;
                join(row, mine.both.data());
                mine.quantised.quantise(row, mine.both.data(), 0, 2 * hidden_);
            }
        }
        mine.normed = phase;
        return {mine.input.data(), &mine.quantised, rows};
    }
    // x and `to` are [H] and may be the same.
    template <class To>
    void norm_row(const float* x, const std::vector<float>& norm, To* to) const {
        const float factor = norm.empty() ? 1.0f : norm_factor(x, spec_.hidden, hidden_);
        for (int i = 0; i < hidden_; i += LANES) {
            Floats scaled = load<Floats>(x + i) * factor;
            Element<To>::narrow(to + i, norm.empty() ? scaled : scaled * load<Floats>(&norm[i]));
        }
    }

    // RMSNorm's factor of a vector (Zhang and Sennrich 2019). Padding is 0.
    float norm_factor(const float* x, int size, int padded_size) const {
        Floats squares = {};
        for (int i = 0; i < padded_size; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
        return 1.0f / std::sqrt(sum_of(squares) / size + spec_.eps);
    }

    // Adds the sum over ranks of `partial_` to x.
    void add_sum(const Layer& layer, Kind kind) {
        const size_t count = (size_t)pass_->rows.count * hidden_;
        spec_.sum(partial_.data(), (int64_t)count);
        const std::vector<float>& bias = kind == OUTPUT ? layer.output_bias_after : layer.down_bias_after;
        for (size_t i = 0; i < count; i++) x_[i] += bias.empty() ? partial_[i] : partial_[i] + bias[i % hidden_];
    }

    // Calls f with each row of a part.
    template <class F>
    void for_rows(int part, F f) const {
        const int64_t rows = pass_->rows.count, parts = (int64_t)arenas_.size();
        for (int row = (int)(rows * part / parts); row < (int)(rows * (part + 1) / parts); row++) f(row);
    }

    void reserve(int rows) {
        if (takes_quantised_) {
            quantised_attended_.resize(rows, attended_);
            quantised_activated_.resize(rows, inner_);
            delta_.quantised.resize(rows, spec_.delta.values());
        }
        if (rows <= reserved_) return;
        reserved_ = rows;
        x_.resize((size_t)rows * hidden_);
        if (spec_.sum || adds_apart_) partial_.resize((size_t)rows * hidden_);
        projected_.resize((size_t)rows * ((is_gated_ ? 2 : 1) * attended_ + 2 * spec_.key_value_heads * spec_.head_width));
        if (spec_.is_int8_cache) codes_.resize((size_t)rows * spec_.query_heads * heads_.template query_size<int8_t>());
        else queries_.resize((size_t)rows * attended_);
        attended_rows_.resize((size_t)rows * attended_);
        if (takes_quantised_ || is_gated_) attended_floats_.resize((size_t)rows * attended_);
        delta_.reserve(spec_.delta, delta_columns_, rows);
        gate_.resize((size_t)rows * inner_);
        up_.resize((size_t)rows * inner_);
        activated_.resize((size_t)rows * inner_);
        for (auto& scratch : scratch_) scratch->input.resize((size_t)rows * hidden_ * (spec_.has_states ? 2 : 1));
    }

    Matrix<T> matrix(ThreadPool& pool, Weights weights, int count, const float* bias, int in, int padded_in, int unit = LANES) {
        return Matrix<T>(pool, arenas_, {{weights.data, weights.type, count, bias}}, unit, in, padded_in);
    }

    // A vector padded with zeros to `width`; empty for null.
    static std::vector<float> vector_of(const float* from, int size, int width) {
        if (!from) return {};
        std::vector<float> vector(from, from + size);
        vector.resize(width);
        return vector;
    }

    // By what keys of 8 bits are divided, and queries multiplied: a power of two for each rotary pair, [key-value heads,
    // head width]. A bias of 100 in one pair, as Qwen2.5 has, would leave the others of its KEY_BLOCK few integers.
    std::vector<float> units_of_keys(const float* bias) const {
        constexpr float TYPICAL = 4;  // magnitude of a pair
        const int half = spec_.rotary_size / 2;
        std::vector<float> units((size_t)spec_.key_value_heads * spec_.head_width, 1.0f);
        for (int head = 0; head < spec_.key_value_heads; head++, bias += spec_.head_size)
            for (int i = 0; i < half; i++) {
                int exponent;
                std::frexp(std::hypot(bias[i], bias[i + half]) / TYPICAL, &exponent);
                float* pair = &units[(size_t)head * spec_.head_width + i];
                pair[0] = pair[half] = std::ldexp(1.0f, std::max(exponent, 0));
            }
        return units;
    }

    // The matrix after attention, with zero columns for the padding of heads.
    std::vector<T> spread_heads(const T* from) const {
        const int size = spec_.head_size, heads = spec_.query_heads;
        std::vector<T> spread((size_t)spec_.hidden * attended_);
        for (size_t i = 0; i < (size_t)spec_.hidden * heads; i++)
            memcpy(&spread[i * spec_.head_width], from + i * size, size * sizeof(T));
        return spread;
    }

    const NetworkSpec spec_;
    const Heads heads_;
    const int hidden_, inner_, attended_;  // padded widths
    bool adds_apart_ = false;              // whether what is added to x is normed or scaled
    bool takes_quantised_ = false;         // whether a matrix after attention or in the MLP's end does
    bool is_gated_ = false;                // whether attention's result is, in some layer
    int delta_columns_ = 0;                // of the products of a layer that keeps a state
    std::vector<Phase> phases_;            // of a pass
    std::vector<Arena> arenas_;            // by part
    std::vector<Layer> layers_;
    std::vector<float> token_norm_, state_norm_, final_norm_;
    Matrix<T> projection_, head_;
    std::vector<std::unique_ptr<Scratch>> scratch_;  // by thread

    // State of the current pass.
    const PassSpec* pass_ = nullptr;
    std::vector<Chunk> chunks_;
    int reserved_ = 0;                       // rows
    std::vector<float> x_, partial_;         // [R, H]
    std::vector<float> projected_;           // [R, heads of queries, keys and values]
    std::vector<T> queries_, attended_rows_;  // [R, query heads]
    std::vector<int16_t> codes_;              // the queries for keys of 8 bits
    std::vector<float> attended_floats_;      // the same, before they are quantised
    QuantisedRows quantised_attended_, quantised_activated_;
    DeltaBuffers<T> delta_;
    std::vector<float> gate_, up_;           // [R, inner]
    std::vector<T> activated_;               // [R, inner]
};

}  // namespace paceline
