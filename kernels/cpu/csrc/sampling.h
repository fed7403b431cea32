// Sampling: one token id a row of fp32 logits, by inverting the cumulative distribution in
// vocabulary order. Filters are thresholds on the weight exp((x - max) / T), found by radix
// selection over the bits of the weights instead of a sort.

#pragma once

#include "export.h"
#include "vectors.h"

struct SampleArgs {
    int64_t dtype;
    const float* logits;  // [rows, vocab]
    int64_t stride, rows, vocab;
    const double *inverse_temperature, *top_k, *top_p, *min_p, *uniform;  // [rows]
    float* scratch;  // [threads, vocab]
    int64_t* ids;    // [rows]
    int64_t threads;
};
LAYOUT(SampleArgs,
       FIELD(dtype) FIELD(logits) FIELD(stride) FIELD(rows) FIELD(vocab) FIELD(inverse_temperature)
       FIELD(top_k) FIELD(top_p) FIELD(min_p) FIELD(uniform) FIELD(scratch) FIELD(ids) FIELD(threads))

constexpr int64_t SPAN = 256;  // weights that are summed before the sum is widened to fp64

// The largest of x, or NaN if there is a NaN in x.
INLINE float largest(const float* x, int64_t n) {
    vf top = splat(-std::numeric_limits<float>::infinity());
    vi is_nan = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const vf v = load(x + i);
        is_nan |= (vi)(v != v);
        top = vmax(top, v);
    }
    float best = max_lanes(top);
    bool bad = false;
    for (int lane = 0; lane < W; ++lane) bad |= is_nan[lane] != 0;
    for (; i < n; ++i) {
        bad |= x[i] != x[i];
        best = std::max(best, x[i]);
    }
    return bad ? std::numeric_limits<float>::quiet_NaN() : best;
}

// The sum of the weights of at least `edge` in w[0, n), n <= SPAN.
INLINE double mass_of(const float* w, int64_t n, float edge) {
    vf sum = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const vf v = load(w + i);
        sum += select((vi)(v >= edge), v, vf{});
    }
    double total = sum_lanes(sum);
    for (; i < n; ++i) total += w[i] >= edge ? w[i] : 0.0f;
    return total;
}

INLINE double total_mass(const float* w, int64_t n, float edge) {
    double total = 0;
    for (int64_t i = 0; i < n; i += SPAN) total += mass_of(w + i, std::min(SPAN, n - i), edge);
    return total;
}

// The largest weight such that those at or above it are `need` in number (or in mass). Weights lie
// in [0, 1], so their bits order as they do; 10 of the 30 bits in question are settled a pass.
template <bool BY_MASS>
float edge_of(const float* w, int64_t n, float floor, double need) {
    uint32_t found = 0, settled = 0;
    double above = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        double bins[1024] = {};
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, w + i, sizeof bits);
            if ((bits & settled) == found && w[i] >= floor)
                bins[(bits >> shift) & 1023] += BY_MASS ? (double)w[i] : 1.0;
        }
        int bin = 1023, lowest = 0;
        for (; bin >= 0; --bin) {
            if (bins[bin] == 0) continue;
            lowest = bin;
            if (above + bins[bin] >= need) break;
            above += bins[bin];
        }
        if (bin < 0) {  // rounding left the sum a hair short: everything stays
            bin = lowest;
            above -= bins[lowest];
        }
        found |= (uint32_t)bin << shift;
        settled |= 1023u << shift;
    }
    float edge;
    std::memcpy(&edge, &found, sizeof edge);
    return edge;
}

INLINE int64_t draw(const float* w, int64_t n, float edge, double uniform) {
    const double target = uniform * total_mass(w, n, edge);
    double before = 0;
    int64_t last = -1;
    for (int64_t i = 0; i < n; i += SPAN) {
        const int64_t count = std::min(SPAN, n - i);
        const double mass = mass_of(w + i, count, edge);
        if (mass == 0) continue;
        const bool is_here = before + mass > target;
        double reached = before;
        for (int64_t j = i; j < i + count; ++j) {
            if (!(w[j] >= edge) || w[j] == 0) continue;
            last = j;
            reached += w[j];
            if (is_here && reached > target) return j;
        }
        before += mass;
    }
    return last;  // rounding: the target lies a hair above the sum
}

INLINE int64_t sample_row(const SampleArgs& a, int64_t row, float* w) {
    const float* x = a.logits + row * a.stride;
    const int64_t n = a.vocab;
    const float top = largest(x, n);
    if (!(std::fabs(top) < std::numeric_limits<float>::infinity())) return -1;
    if (a.inverse_temperature[row] == 0) {
        int64_t i = 0;
        while (x[i] != top) ++i;
        return i;
    }
    const float scale = (float)a.inverse_temperature[row];
    for (int64_t i = 0; i < n; i += W)
        store_up_to(w + i, vexp((load_up_to(x + i, n - i) - top) * scale), n - i);
    float edge = 0;
    if (a.top_k[row] > 0 && a.top_k[row] < (double)n)
        edge = edge_of<false>(w, n, 0, a.top_k[row]);
    if (a.top_p[row] < 1) edge = edge_of<true>(w, n, edge, a.top_p[row] * total_mass(w, n, edge));
    return draw(w, n, std::max(edge, (float)a.min_p[row]), a.uniform[row]);
}

INLINE void sample(const SampleArgs& a) {
    const int64_t share = (a.rows + a.threads - 1) / a.threads;
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * a.vocab > GRAIN) schedule(static, 1)
    for (int64_t thread = 0; thread < a.threads; ++thread)
        for (int64_t row = thread * share; row < std::min(a.rows, (thread + 1) * share); ++row)
            a.ids[row] = sample_row(a, row, a.scratch + thread * a.vocab);
}
