// Queries in 16 bits, as int8 keys are multiplied by (code_tiles.h).

#pragma once

#include "attention/numbers.h"

constexpr int64_t CHUNK = 4 * W;  // head dimensions of a vector of codes

// Rows of queries: of each a scale, its numbers, and what the offset of key codes by 128 adds to the sum of
// a part, which is the head dimensions of one scale of a key, or CHUNK of them.
struct CodedQueries {
    int64_t quads, part, parts, shift;
    std::vector<int32_t> numbers, extra;
    std::vector<float> scales;

    CodedQueries(const Cache& c, int64_t rows, int64_t padded)
        : quads(padded / 4), part(std::min(c.group, CHUNK)), parts((c.dim + part - 1) / part),
          shift(c.group_shift()), numbers(rows * 2 * quads), extra(rows * padded / 8), scales(rows) {}

    int64_t last_quad(int64_t p) const { return std::min((p + 1) * part / 4, quads); }

    // Row `row` of `x` [padded], which is 0 past the head dimension.
    __attribute__((noinline)) void take(int64_t row, const float* x) {
        const int64_t padded = 4 * quads;
        vi largest = {};
        for (int64_t d = 0; d < padded; d += W) largest = max_bits(largest, load(x + d));
        const vf size = splat(largest_size(largest));
        const float factor = factor_to(size, QUERY_TOP)[0];
        scales[row] = unit_of(size, QUERY_TOP)[0];
        int32_t *to = &numbers[row * 2 * quads], *more = &extra[row * padded / 8];
        std::fill_n(more, padded / 8, 0);
        if (factor == 0) return (void)std::fill_n(to, 2 * quads, 0);
        for (int64_t d = 0; d < padded; d += W) {
            const vi made = rounded(load(x + d), factor);
            store_numbers<true>(made, to, quads, d);
            if constexpr (!BY_PAIRS) {
                const vi sums = sums_of_eight(made);
                UNROLL for (int i = 0; i < W; i += 8) more[(d + i) / part] += 128 * sums[i];
            }
        }
    }

   private:
    // Lane i: the sum of the lanes from i to i + 7, or so many that there are.
    static INLINE vi sums_of_eight(vi v) {
        constexpr auto lanes = std::make_index_sequence<W>{};
        v += (vi)turned<4>((vf)v, lanes);
        v += (vi)turned<2>((vf)v, lanes);
        return v + (vi)turned<1>((vf)v, lanes);
    }
};
