// Decode attention: one query a sequence, its context cut into splits that stand at absolute positions.

#pragma once

#include "cpu_attention.h"

constexpr int SPLIT = 256;    // keys of one split; a multiple of KEY_TILE
constexpr int MAX_HEADS = 8;  // query heads handled together

// scores[g][j] = q[g] . keys[j] for G heads and W / G keys.
template <int G, class T>
INLINE void dot_tile(const float* q, int64_t ldq, const T* const* keys, int64_t dim, float* scores) {
    constexpr int J = W / G;
    vf acc[W] = {};
    for (int64_t d = 0; d < dim; d += W) {
        vf key[J];
        UNROLL for (int j = 0; j < J; ++j) key[j] = load_up_to(keys[j] + d, dim - d);
        UNROLL for (int g = 0; g < G; ++g) {
            const vf query = load(q + g * ldq + d);
            UNROLL for (int j = 0; j < J; ++j) acc[g * J + j] += query * key[j];
        }
    }
    float lanes[W];
    store(lanes, sum_each(acc));
    for (int g = 0; g < G; ++g) std::memcpy(scores + g * KEY_TILE, lanes + g * J, J * sizeof(float));
}

#if HAVE_DPBF16
// The same on stored bf16 pairs: products are exact, sums fp32.
template <int G>
INLINE void dot_tile(const bf16* q, int64_t ldq, const bf16* const* keys, int64_t dim,
                     float* scores) {
    constexpr int J = W / G;
    __m512 acc[W] = {};
    for (int64_t d = 0; d < dim; d += 2 * W) {
        const __mmask32 some = dim - d >= 2 * W ? ~0u : (1u << (dim - d)) - 1;
        __m512bh key[J];
        UNROLL for (int j = 0; j < J; ++j)
            key[j] = (__m512bh)_mm512_maskz_loadu_epi16(some, keys[j] + d);
        UNROLL for (int g = 0; g < G; ++g) {
            const __m512bh query = (__m512bh)_mm512_loadu_si512(q + g * ldq + d);
            UNROLL for (int j = 0; j < J; ++j)
                acc[g * J + j] = _mm512_dpbf16_ps(acc[g * J + j], query, key[j]);
        }
    }
    vf sums[W];
    UNROLL for (int i = 0; i < W; ++i) sums[i] = (vf)acc[i];
    float lanes[W];
    store(lanes, sum_each(sums));
    for (int g = 0; g < G; ++g) std::memcpy(scores + g * KEY_TILE, lanes + g * J, J * sizeof(float));
}
template <class T>
using Query = std::conditional_t<sizeof(T) == 2, bf16, float>;
#else
template <class T>
using Query = float;
#endif

INLINE void take_query(const float* from, float* to, int64_t dim, int64_t padded) {
    widen(from, to, dim, padded);
}
INLINE void take_query(const bf16* from, float* to, int64_t dim, int64_t padded) {
    widen(from, to, dim, padded);
}
INLINE void take_query(const bf16* from, bf16* to, int64_t dim, int64_t padded) {
    std::memcpy(to, from, dim * sizeof(bf16));
    std::memset(to + dim, 0, (padded - dim) * sizeof(bf16));
}

// A row that is needed soon. Blocks lie scattered, so the processor cannot foresee them.
template <class T>
INLINE void announce(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// scores[g][j] for G heads and `count` keys; `keys` may be read up to W entries further.
template <int G, bool FIRST, class T>
INLINE void dot_heads(const Query<T>* q, int64_t ldq, const T* const* keys, const T* const* ahead,
                      int64_t count, int64_t dim, float* scores) {
    constexpr int part = G >= 4 ? 4 : G >= 2 ? 2 : 1, J = W / part;
    for (int64_t j = 0; j < count; j += J) {
        if constexpr (FIRST)
            for (int64_t i = j; i < std::min(count, j + J); ++i) announce(ahead[i], dim);
        dot_tile<part>(q, ldq, keys + j, dim, scores + j);
    }
    if constexpr (G > part)
        dot_heads<G - part, false, T>(q + part * ldq, ldq, keys, ahead, count, dim,
                                      scores + part * KEY_TILE);
}

// out[g][d...] = out * keep[g] + sum_j weights[g][j] * values[j][d...], j ascending, N vectors wide.
template <int G, int N, class T>
INLINE void weigh_columns(const float* weights, const T* const* values, const T* const* ahead,
                          int64_t count, const float* keep, float* out, int64_t ldo, int64_t d,
                          int64_t left) {
    vf acc[G][N];
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < N; ++n) acc[g][n] = keep[g] * load(out + g * ldo + d + n * W);
    for (int64_t j = 0; j < count; ++j) {
        if (ahead) announce(ahead[j] + d, std::min<int64_t>(N * W, left));
        vf value[N];
        UNROLL for (int n = 0; n < N; ++n)
            value[n] = N == 1 ? load_up_to(values[j] + d, left) : load(values[j] + d + n * W);
        UNROLL for (int g = 0; g < G; ++g) {
            const float weight = weights[g * KEY_TILE + j];
            UNROLL for (int n = 0; n < N; ++n) acc[g][n] += weight * value[n];
        }
    }
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < N; ++n) store(out + g * ldo + d + n * W, acc[g][n]);
}

template <int G, class T>
INLINE void weigh_heads(const float* weights, const T* const* values, const T* const* ahead,
                        int64_t count, const float* keep, float* out, int64_t ldo, int64_t dim) {
    constexpr int N = W < 16 || G > 4 ? 2 : 4;  // accumulators that the registers hold
    int64_t d = 0;
    for (; d + N * W <= dim; d += N * W)
        weigh_columns<G, N>(weights, values, ahead, count, keep, out, ldo, d, N * W);
    for (; d < dim; d += W)
        weigh_columns<G, 1>(weights, values, ahead, count, keep, out, ldo, d, dim - d);
}

// Query heads [0, G) of one group over the keys of one tile; `next` are the keys of the one after.
template <int G, class T>
void decode_tile(const Query<T>* q, int64_t ldq, const T* const* keys, const T* const* values,
                 const T* const* next, int64_t count, int64_t dim, float scale, float* out,
                 int64_t ldo, float* top, float* total) {
    float scores[G * KEY_TILE], keep[G];
    dot_heads<G, true, T>(q, ldq, keys, values, count, dim, scores);
    const int64_t width = (count + W - 1) / W * W;
    for (int g = 0; g < G; ++g)
        keep[g] = soften(scores + g * KEY_TILE, width, 0, count, scale, top[g], total[g]);
    weigh_heads<G>(scores, values, next, count, keep, out, ldo, dim);
}

// What one (sequence, kv head, split) leaves behind: unnormalised sums and softmax statistics.
struct Partial {
    float *out, *top, *total;  // [group][padded], [group], [group]
    static int64_t size(int64_t group, int64_t padded) { return group * (padded + 2); }
    Partial(float* at, int64_t group, int64_t padded)
        : out(at), top(at + group * padded), total(at + group * (padded + 1)) {}
};

// Keys from `start` to the end of its tile, or to `end`.
INLINE int64_t tile_count(int64_t start, int64_t end) {
    return std::max<int64_t>(0, std::min(end, (start / KEY_TILE + 1) * KEY_TILE) - start);
}

template <class T>
void decode_split(const AttentionArgs& a, int64_t b, int64_t head, const Query<T>* q, int64_t ldq,
                  int64_t begin, int64_t end, const Partial& mine) {
    const int64_t group = a.heads / a.kv_heads, padded = (a.dim + W - 1) / W * W;
    const T *rows[2][2][KEY_TILE + W];  // of this tile and the next: keys, values
    std::fill_n(mine.out, group * padded, 0.0f);
    std::fill_n(mine.top, group, HIDDEN);
    std::fill_n(mine.total, group, 0.0f);
    int64_t start = begin, count = tile_count(start, end), next_count;
    find_rows(a, b, head, start, count, rows[0][0], rows[0][1]);
    for (int turn = 0; count; turn ^= 1, start += count, count = next_count) {
        const T **keys = rows[turn][0], **values = rows[turn][1], **next = rows[turn ^ 1][0];
        next_count = tile_count(start + count, end);
        find_rows(a, b, head, start + count, next_count, next, rows[turn ^ 1][1]);
        std::fill(next + next_count, next + KEY_TILE, keys[0]);
        std::fill_n(keys + count, W, keys[0]);  // dot_tile takes W / G keys at a time
        for (int64_t g = 0; g < group; g += MAX_HEADS)
            with_constant<MAX_HEADS>((int)std::min<int64_t>(MAX_HEADS, group - g), [&](auto heads) {
                decode_tile<heads.value>(q + g * ldq, ldq, keys, values, g ? nullptr : next, count,
                                         a.dim, (float)a.scale, mine.out + g * padded, padded,
                                         mine.top + g, mine.total + g);
            });
    }
}

struct Split {
    int64_t b, begin, end, index, num_splits;
    bool sinks;  // the keys before the sink end, which `q_sink` asks
};

// Fills `splits`, those of a sequence in order; returns the number of (key, query head) pairs, the work.
INLINE int64_t cut_contexts(const AttentionArgs& a, std::vector<Split>& splits) {
    int64_t pairs = 0;
    splits.clear();
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t len = a.lens[b], start = a.window_starts ? a.window_starts[b] : 0;
        const int64_t begin = std::max(start, a.window ? len - a.window : 0), first = begin / SPLIT;
        const int64_t sinks = a.sink_ends ? std::min<int64_t>(a.sink_ends[b], len) : 0;
        const int64_t ahead = sinks > 0;  // splits before those of the window
        // A row without any key has one empty split, which makes its result 0.
        const int64_t count = begin < len ? (len - 1) / SPLIT - first + 1 : 1 - ahead;
        if (ahead) splits.push_back({b, 0, sinks, 0, count + 1, true});
        for (int64_t s = 0; s < count; ++s)
            splits.push_back({b, std::max(begin, (first + s) * SPLIT),
                              std::min(len, (first + s + 1) * SPLIT), ahead + s, ahead + count, false});
        pairs += (sinks + std::max<int64_t>(len - begin, 0)) * a.heads;
    }
    return pairs;
}

template <class T>
void decode(const AttentionArgs& a) {
    static thread_local std::vector<Split> all_splits;
    static thread_local std::vector<float> scratch;
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, padded = (dim + W - 1) / W * W;
    const int64_t ldq = (dim + 2 * W - 1) / (2 * W) * (2 * W), part = Partial::size(group, padded);
    const int64_t pairs = cut_contexts(a, all_splits);
    const int64_t items = (int64_t)all_splits.size() * a.kv_heads;
    if ((int64_t)scratch.size() < items * part) scratch.resize(items * part);
    const Split* splits = all_splits.data();
    float* parts = scratch.data();
#pragma omp parallel num_threads((int)a.threads) if (pairs * dim > GRAIN)
    {
        std::vector<Query<T>> queries(group * ldq);
        std::vector<float> merged(padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const Split& split = splits[item / a.kv_heads];
            const int64_t head = item % a.kv_heads;
            const T* rows = split.sinks ? (const T*)a.q_sink + split.b * a.q_sink_stride
                                        : (const T*)a.q + split.b * a.q_stride;
            for (int64_t g = 0; g < group; ++g)
                take_query(rows + (head * group + g) * dim, &queries[g * ldq], dim, ldq);
            decode_split<T>(a, split.b, head, queries.data(), ldq, split.begin, split.end,
                            Partial(parts + item * part, group, padded));
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < items; ++item) {  // merge, once a (sequence, kv head)
            const Split& split = splits[item / a.kv_heads];
            if (split.index) continue;
            const auto piece = [&](int64_t s) {
                return Partial(parts + (item + s * a.kv_heads) * part, group, padded);
            };
            for (int64_t g = 0; g < group; ++g) {
                float best = HIDDEN, total = 0;
                for (int64_t s = 0; s < split.num_splits; ++s)
                    best = std::max(best, piece(s).top[g]);
                std::fill(merged.begin(), merged.end(), 0.0f);
                for (int64_t s = 0; s < split.num_splits; ++s) {
                    const float weight = best == HIDDEN ? 0.0f : std::exp(piece(s).top[g] - best);
                    const float* from = piece(s).out + g * padded;
                    total += weight * piece(s).total[g];
                    for (int64_t d = 0; d < padded; d += W)
                        store(&merged[d], load(&merged[d]) + weight * load(from + d));
                }
                const float norm = best == HIDDEN ? 0.0f : 1.0f / total;  // no key, no answer
                const int64_t head = (item % a.kv_heads) * group + g;
                narrow(merged.data(), norm, (T*)a.out + (split.b * a.heads + head) * dim, dim);
            }
        }
    }
}
