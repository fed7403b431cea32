// Rounds a weight to 4-bit codes as kernels/int4_search.py defines it (sums may differ in their last
// bits), W rows at a time: a lane is a row.

#pragma once

#include <omp.h>

#include "export.h"
#include "matmul/tiling.h"
#include "quantize_rows.h"

struct Int4SearchArgs {
    const float* weight;  // [rows][stride]
    int64_t stride;
    const float* scales;  // [rows]: a weight divided by it is within +-127
    uint8_t *codes, *steps, *offsets;  // [rows][depth], [rows][groups], the same
    int64_t rows, depth, group, threads;
};
LAYOUT(Int4SearchArgs,
       FIELD(weight) FIELD(stride) FIELD(scales) FIELD(codes) FIELD(steps) FIELD(offsets) FIELD(rows)
       FIELD(depth) FIELD(group) FIELD(threads))

INLINE vf rounded(vf v) { return (v + ROUND) - ROUND; }  // half to even; small numbers only

struct Int4Lattice {
    vf step, offset;

    INLINE vf code(vf y) const {
        return vmin(splat(15.0f), vmax(splat(0.0f), rounded((y - offset) / step)));
    }
};

// The best of W groups of `count` weights, y[count][W].
INLINE Int4Lattice search_int4(const float* y, int64_t count) {
    constexpr float NARROWEST = 0.8f;
    constexpr int STEPS = 5, STARTS = 5, ROUNDS = 3;
    vf low = load(y), high = low;
    for (int64_t k = 1; k < count; ++k) {
        low = vmin(low, load(y + k * W));
        high = vmax(high, load(y + k * W));
    }
    const vf narrow = NARROWEST / 15.0f * (high - low), near = rounded(narrow);
    const vf first = near - select((vi)(near > narrow), splat(1.0f), vf{});
    Int4Lattice best = {splat(1.0f), vf{}};
    vf least = splat(std::numeric_limits<float>::infinity());
    for (int attempt = 0; attempt < STEPS * STARTS; ++attempt) {
        Int4Lattice tried;
        tried.step = vmin(splat(17.0f), vmax(splat(1.0f), first + (float)(attempt / STARTS)));
        const vf cut = high - low - 15.0f * tried.step;
        tried.offset = rounded(low + cut * ((float)(attempt % STARTS) / (STARTS - 1)));
        for (int round = 0; round < ROUNDS; ++round) {
            tried.offset = vmin(127.0f - 15.0f * tried.step, vmax(splat(-128.0f), tried.offset));
            vf error = {}, sum = {};
            for (int64_t k = 0; k < count; ++k) {
                const vf each = load(y + k * W);
                const vf off = each - (tried.code(each) * tried.step + tried.offset);
                error += off * off;
                sum += off;
            }
            const vi better = (vi)(error < least);
            least = select(better, error, least);
            best.step = select(better, tried.step, best.step);
            best.offset = select(better, tried.offset, best.offset);
            tried.offset += rounded(sum / (float)count);
        }
    }
    return best;
}

INLINE void search_int4(const Int4SearchArgs& a) {
    const int64_t groups = (a.depth + a.group - 1) / a.group;
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
    for (int64_t first = 0; first < a.rows; first += W) {
        static thread_local std::vector<float> own;
        grow(own, a.group * W);
        const int64_t rows = std::min<int64_t>(W, a.rows - first);
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t start = g * a.group, count = std::min(a.group, a.depth - start);
            float* y = own.data();
            std::memset(y, 0, count * W * sizeof(float));
            for (int64_t r = 0; r < rows; ++r) {
                const float* from = a.weight + (first + r) * a.stride + start;
                for (int64_t k = 0; k < count; ++k) {
                    const float value = from[k] / a.scales[first + r];
                    y[k * W + r] = value == value ? value : 0.0f;
                }
            }
            const Int4Lattice best = search_int4(y, count);
            for (int64_t k = 0; k < count; ++k) store(y + k * W, best.code(load(y + k * W)));
            for (int64_t r = 0; r < rows; ++r) {
                uint8_t* to = a.codes + (first + r) * a.depth + start;
                for (int64_t k = 0; k < count; ++k) to[k] = (uint8_t)y[k * W + r];
                a.steps[(first + r) * groups + g] = (uint8_t)best.step[r];
                a.offsets[(first + r) * groups + g] = (uint8_t)(int)best.offset[r];
            }
        }
    }
}
