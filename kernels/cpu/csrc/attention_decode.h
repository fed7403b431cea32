// Decode attention: one query a sequence, its context cut into splits that stand at absolute positions.

#pragma once

#include "attention.h"

constexpr int SPLIT = 256;    // keys of one split; a multiple of KEY_TILE
constexpr int MAX_HEADS = 8;  // query heads handled together

// scores[g][j] = q[g] . keys[j] for G heads and W / G keys.
template <int G, class Row>
INLINE void dot_tile(const float* q, int64_t ldq, const Row* keys, int64_t dim, float* scores) {
    constexpr int J = W / G;
    vf acc[W] = {};
    for (int64_t d = 0; d < dim; d += W) {
        const int64_t at = keys[0].place(d);
        vf key[J];
        UNROLL for (int j = 0; j < J; ++j) key[j] = keys[j].up_to(d, at, dim - d);
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
INLINE void dot_tile(const bf16* q, int64_t ldq, const PlainRow<bf16>* keys, int64_t dim,
                     float* scores) {
    constexpr int J = W / G;
    __m512 acc[W] = {};
    for (int64_t d = 0; d < dim; d += 2 * W) {
        const __mmask32 some = dim - d >= 2 * W ? ~0u : (1u << (dim - d)) - 1;
        __m512bh key[J];
        UNROLL for (int j = 0; j < J; ++j)
            key[j] = (__m512bh)_mm512_maskz_loadu_epi16(some, keys[j].values + d);
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

// scores[g][j] for G heads and `count` keys; `keys` may be read up to W entries further. Not inlined,
// like `weigh_heads`: else there would be a copy for each number of heads.
template <int G, class Row>
__attribute__((noinline)) void dot_heads(const typename Row::Query* q, int64_t ldq, const Row* keys,
                                         const Row* ahead, int64_t count, int64_t dim,
                                         float* scores) {
    for (int64_t j = 0; j < count; j += W / G) {
        if (ahead)
            for (int64_t i = j; i < std::min<int64_t>(count, j + W / G); ++i)
                ahead[i].announce(0, dim);
        dot_tile<G>(q, ldq, keys + j, dim, scores + j);
    }
}

// out[g][d...] = out * keep[g] + sum_j weights[g][j] * values[j][d...], j ascending, N vectors wide.
template <int G, int N, class Row>
INLINE void weigh_columns(const float* weights, const Row* values, const Row* ahead, int64_t count,
                          const float* keep, float* out, int64_t ldo, int64_t d, int64_t left) {
    vf acc[G][N];
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < N; ++n) acc[g][n] = keep[g] * load(out + g * ldo + d + n * W);
    int64_t at[N];
    UNROLL for (int n = 0; n < N; ++n) at[n] = values[0].place(d + n * W);
    for (int64_t j = 0; j < count; ++j) {
        if (ahead) ahead[j].announce(d, std::min<int64_t>(N * W, left));
        vf value[N];
        UNROLL for (int n = 0; n < N; ++n)
            value[n] = N == 1 ? values[j].up_to(d, at[n], left) : values[j].whole(d + n * W, at[n]);
        UNROLL for (int g = 0; g < G; ++g) {
            const float weight = weights[g * KEY_TILE + j];
            UNROLL for (int n = 0; n < N; ++n) acc[g][n] += weight * value[n];
        }
    }
    UNROLL for (int g = 0; g < G; ++g)
        UNROLL for (int n = 0; n < N; ++n) store(out + g * ldo + d + n * W, acc[g][n]);
}

template <int G, class Row>
__attribute__((noinline)) void weigh_heads(const float* weights, const Row* values, const Row* ahead,
                                           int64_t count, const float* keep, float* out, int64_t ldo,
                                           int64_t dim) {
    constexpr int N = W < 16 || G > 4 ? 2 : 4;  // accumulators that the registers hold
    int64_t d = 0;
    for (; d + N * W <= dim; d += N * W)
        weigh_columns<G, N>(weights, values, ahead, count, keep, out, ldo, d, N * W);
    for (; d < dim; d += W)
        weigh_columns<G, 1>(weights, values, ahead, count, keep, out, ldo, d, dim - d);
}

// Call body(std::integral_constant<int, n>, at) for pieces of n = 1, 2, 4 and up to MAX that make up
// `count`, the largest first.
template <int MAX, class Body>
INLINE void in_pieces(int count, Body&& body) {
    int at = 0;
    for (; at + MAX <= count; at += MAX) body(std::integral_constant<int, MAX>{}, at);
    if constexpr (MAX > 1)
        if (at < count)
            in_pieces<MAX / 2>(count - at, [&](auto n, int more) { body(n, at + more); });
}

// `heads` (at most MAX_HEADS) query heads of one group over the keys of one tile; `next` are the keys
// of the one after.
template <class Row>
void decode_tile(int heads, const typename Row::Query* q, int64_t ldq, const Row* keys,
                 const Row* values, const Row* next, int64_t count, int64_t dim, float scale,
                 float* out, int64_t ldo, float* top, float* total) {
    float scores[MAX_HEADS * KEY_TILE], keep[MAX_HEADS];
    in_pieces<4>(heads, [&](auto n, int g) {
        dot_heads<n.value, Row>(q + g * ldq, ldq, keys, g ? nullptr : values, count, dim,
                           scores + g * KEY_TILE);
    });
    const int64_t width = (count + W - 1) / W * W;
    for (int g = 0; g < heads; ++g)
        keep[g] = soften(scores + g * KEY_TILE, width, 0, count, scale, top[g], total[g]);
    const auto weigh = [&](auto n, int g) {
        weigh_heads<n.value, Row>(scores + g * KEY_TILE, values, g ? nullptr : next, count, keep + g,
                             out + g * ldo, ldo, dim);
    };
    if constexpr (sizeof(typename Row::Element) == 1)
        in_pieces<MAX_HEADS>(heads, weigh);  // half as many copies; codes are cheap to read again
    else
        with_constant<MAX_HEADS>(heads, [&](auto n) { weigh(n, 0); });
}

// The result of one (sequence, kv head, split): unnormalised sums and softmax statistics.
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

template <class Row>
void decode_split(const AttentionArgs& a, int64_t b, int64_t head, const typename Row::Query* q,
                  int64_t ldq, int64_t begin, int64_t end, float* scales, const Partial& mine) {
    const int64_t group = a.group(), dim = a.cache.dim, padded = (dim + W - 1) / W * W;
    KeyRows<Row> tiles[2];  // this one and the next
    tiles[0].scales = scales;
    tiles[1].scales = scales + KeyRows<Row>::room(a.cache, 1);
    std::fill_n(mine.out, group * padded, 0.0f);
    std::fill_n(mine.top, group, HIDDEN);
    std::fill_n(mine.total, group, 0.0f);
    int64_t start = begin, count = tile_count(start, end), next_count;
    tiles[0].find(a, b, head, start, count);
    for (int turn = 0; count; turn ^= 1, start += count, count = next_count) {
        KeyRows<Row>&tile = tiles[turn], &next = tiles[turn ^ 1];
        next_count = tile_count(start + count, end);
        next.find(a, b, head, start + count, next_count);
        std::fill(next.keys + next_count, next.keys + KEY_TILE, tile.keys[0]);
        std::fill_n(tile.keys + count, W, tile.keys[0]);  // dot_tile takes W / G keys at a time
        tile.prepare(a.cache);
        for (int64_t g = 0; g < group; g += MAX_HEADS)
            decode_tile((int)std::min<int64_t>(MAX_HEADS, group - g), q + g * ldq, ldq, tile.keys,
                        tile.values, g ? nullptr : next.keys, count, dim, (float)a.scale,
                        mine.out + g * padded, padded, mine.top + g, mine.total + g);
    }
}

struct Split {
    int64_t b, begin, end, index, num_splits;
    bool sinks;  // the keys before the sink end, which are scored with `q_sink`
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

template <class T, class Row>
void decode_rows(const AttentionArgs& a) {
    static thread_local std::vector<Split> all_splits;
    static thread_local std::vector<float> scratch;
    using Query = typename Row::Query;
    const int64_t group = a.group(), kv_heads = a.cache.kv_heads;
    const int64_t dim = a.cache.dim, padded = (dim + W - 1) / W * W;
    const int64_t ldq = (dim + 2 * W - 1) / (2 * W) * (2 * W), part = Partial::size(group, padded);
    const int64_t pairs = cut_contexts(a, all_splits);
    const int64_t items = (int64_t)all_splits.size() * kv_heads;
    if ((int64_t)scratch.size() < items * part) scratch.resize(items * part);
    const Split* splits = all_splits.data();
    float* parts = scratch.data();
#pragma omp parallel num_threads((int)a.threads) if (pairs * dim > GRAIN)
    {
        std::vector<Query> queries(group * ldq);
        std::vector<float> scales(KeyRows<Row>::room(a.cache, 2));
        std::vector<float> merged(padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const Split& split = splits[item / kv_heads];
            const int64_t head = item % kv_heads;
            const T* rows = split.sinks ? (const T*)a.q_sink + split.b * a.q_sink_stride
                                        : (const T*)a.q + split.b * a.q_stride;
            for (int64_t g = 0; g < group; ++g)
                take_query(rows + (head * group + g) * dim, &queries[g * ldq], dim, ldq);
            decode_split<Row>(a, split.b, head, queries.data(), ldq, split.begin, split.end,
                              scales.data(), Partial(parts + item * part, group, padded));
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < items; ++item) {  // merge, once a (sequence, kv head)
            const Split& split = splits[item / kv_heads];
            if (split.index) continue;
            const auto piece = [&](int64_t s) {
                return Partial(parts + (item + s * kv_heads) * part, group, padded);
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
                const int64_t head = (item % kv_heads) * group + g;
                narrow(merged.data(), norm, (T*)a.out + (split.b * a.heads + head) * dim, dim);
            }
        }
    }
}

template <class T>
void decode(const AttentionArgs& a) {
    with_rows<T>(a.cache, [&](auto row) { decode_rows<T, decltype(row)>(a); });
}
