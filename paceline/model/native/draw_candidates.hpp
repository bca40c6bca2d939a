// The tokens that can win a draw: see `_draw_on_cpu` in sampling.py, which draws among them.
//
// Noise is -log E, so the winner has the smallest E / exp(x), where E = -log(1 - u) and u is a hash of key and token. x is
// relative to the row's largest logit, so at most 0: a token wins only with E <= exp(x) * E of the largest. Since u <= E,
// its integer is below a limit. Two or three tokens of a row remain.
#pragma once
#include <cmath>

#include "vectors.hpp"

namespace paceline {

// The mixer lowbias32, as in noise.py, of a number or a vector.
template <class W>
inline W mixed(W x, uint32_t first, uint32_t second) {
    x ^= first;
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x ^= second;
    x *= 0x735a2d97u;
    return x ^ x >> 15;
}

// Writes the tokens that can win and their integers; returns their number. x [vocabulary]; x[largest] is 0. `leniency`: a
// factor of the limit, for rounding errors.
inline int64_t draw_candidates_of(const float* x, int vocabulary, int largest, uint32_t first, uint32_t second, double leniency,
                                  int64_t* tokens, uint32_t* integers) {
    const double exponential = -std::log1p((mixed((uint32_t)largest, first, second) + 0.5) * -0x1p-32);
    const float limit = (float)(exponential * leniency * 0x1p32);
    static const Uint32s numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t count = 0;
    for (int token = 0; token < vocabulary; token += LANES) {
        Floats some = all(-INFINITY);
        memcpy(&some, x + token, std::min(LANES, vocabulary - token) * sizeof(float));
        const Uint32s bits = mixed(numbers + (uint32_t)token, first, second);
        const Ints can_win = __builtin_convertvector(bits, Floats) <= exp_of(some) * limit;
        uint64_t lanes[LANES / 2], any = 0;
        store(lanes, can_win);
        for (uint64_t two : lanes) any |= two;
        for (int i = 0; any && i < LANES && token + i < vocabulary; i++)
            if (can_win[i]) {
                tokens[count] = token + i;
                integers[count++] = bits[i];
            }
    }
    return count;
}

}  // namespace paceline
