// One tile of decode attention over keys and values that are read as floats (order.h): the scores of some
// heads with its keys, and their weighted values.

#pragma once

#include "attention/order.h"

constexpr int MAX_HEADS = 8;  // query heads whose sums are in registers together

constexpr int SHARES = W / CHAINS;  // keys that share a vector, each with one lane a chain

// v[i], CHAINS dimensions after the other of key i -> v[j], the j-th CHAINS dimensions of all keys.
template <int S = CHAINS>
INLINE void share_vectors(vf* v) {
    if constexpr (S < W) {
        UNROLL for (int i = 0; i < SHARES; ++i)
            if (!(i & (S / CHAINS))) {
                const vf a = v[i], b = v[i + S / CHAINS];
                v[i] = low<S>(a, b);
                v[i + S / CHAINS] = high<S>(a, b);
            }
        share_vectors<2 * S>(v);
    }
}

// Vectors of keys that G heads take at once: as many sums as the registers hold beside the keys.
constexpr int vectors_at_once(int heads) {
    return heads == 1 ? 8 : heads == 2 ? 4 : heads <= 3 || W == 16 ? 2 : 1;
}

// scores[g][j] for G heads and P SHARES keys. `queries` [dim / CHAINS] has each CHAINS dimensions SHARES
// times. `ahead`: values that are needed soon, or null.
template <int G, int P, class Row>
INLINE void score_keys(const float* queries, int64_t ldq, const Row* keys, const Row* ahead, int64_t dim,
                       float* scores) {
    constexpr int LINE = 64 / sizeof(typename Row::Element);  // dimensions in a cache line
    constexpr int M = G > 2 ? P : 1;  // vectors that lie ready at a time: with few heads, sums do
    vf acc[(G * P + 3) / 4 * 4] = {};
    for (int64_t d = 0; d < dim; d += W) {
        const int64_t at = keys[0].place(d);
        if (ahead && d % LINE == 0)
            UNROLL for (int i = 0; i < P * SHARES; ++i) ahead[i].announce(d, 1);
        UNROLL for (int p = 0; p < P; p += M) {
            vf shared[M][SHARES];
            UNROLL for (int m = 0; m < M; ++m) {
                UNROLL for (int i = 0; i < SHARES; ++i)
                    shared[m][i] = keys[i * P + p + m].up_to(d, at, dim - d);
                share_vectors(shared[m]);
            }
            UNROLL for (int i = 0; i < SHARES; ++i)
                UNROLL for (int g = 0; g < G; ++g) {
                    const vf query = load(queries + g * ldq + (d + i * CHAINS) * SHARES);
                    UNROLL for (int m = 0; m < M; ++m) {
                        vf& sum = acc[g * P + p + m];
                        sum = multiply_add(query, shared[m][i], sum);
                    }
                }
        }
    }
    UNROLL for (int a = 0; a < G * P; a += 4) {
        const vf even = low<1>(acc[a], acc[a + 1]), more_even = low<1>(acc[a + 2], acc[a + 3]);
        const vf odd = high<1>(acc[a], acc[a + 1]), more_odd = high<1>(acc[a + 2], acc[a + 3]);
        const vf first = low<2>(even, more_even) + low<2>(odd, more_odd);
        float sums[W];
        store(sums, first + high<2>(even, more_even) + high<2>(odd, more_odd));
        UNROLL for (int i = 0; i < 4; ++i)
            if (a + i < G * P)
                UNROLL for (int s = 0; s < SHARES; ++s)
                    scores[(a + i) / P * KEY_TILE + s * P + (a + i) % P] = sums[s * 4 + i];
    }
}

// Scores of G heads and the keys of one tile.
template <int G, class Row>
__attribute__((noinline)) void score_heads(const float* queries, int64_t ldq, const KeyRows<Row>& tile,
                                           const Row* ahead, int64_t dim, float* scores) {
    constexpr int P = vectors_at_once(G), COUNT = P * SHARES;
    for (int64_t j = tile.skip / COUNT * COUNT; j < tile.count; j += COUNT)
        score_keys<G, P>(queries, ldq, tile.keys + j, ahead ? ahead + j : nullptr, dim, scores + j);
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
            UNROLL for (int n = 0; n < N; ++n)
                acc[g][n] = multiply_add(weight, value[n], acc[g][n]);
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

// Call body(std::integral_constant<int, n>, at) for pieces of n = 1, 2, 3, 4 and MAX that make up
// `count`, the largest first.
template <int MAX, class Body>
INLINE void in_pieces(int count, Body&& body) {
    int at = 0;
    for (; at + MAX <= count; at += MAX) body(std::integral_constant<int, MAX>{}, at);
    if constexpr (MAX > 1)
        if (at < count)
            in_pieces<(MAX > 4 ? 4 : MAX - 1)>(count - at,
                                               [&](auto n, int more) { body(n, at + more); });
}

// Values of one tile, added to the sums of `heads` queries. `ahead`: rows that are needed soon, or null.
template <class Row>
void add_values(int heads, const float* scores, const KeyRows<Row>& tile, const Row* ahead,
                const float* keep, float* out, int64_t ldo, int64_t dim) {
    const int64_t first = tile.skip, count = tile.count - first;
    const auto weigh = [&](auto n, int g) {
        weigh_heads<n.value, Row>(scores + g * KEY_TILE + first, tile.values + first,
                                  g || !ahead ? nullptr : ahead + first, count, keep + g,
                                  out + g * ldo, ldo, dim);
    };
    if constexpr (sizeof(typename Row::Element) == 1)
        in_pieces<MAX_HEADS>(heads, weigh);  // half as many copies; codes are cheap to read again
    else
        with_constant<MAX_HEADS>(heads, [&](auto n) { weigh(n, 0); });
}

// As `score_keys` takes it.
template <class T>
INLINE void take_query(const T* from, float* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += W) {
        vf repeated[SHARES];
        UNROLL for (int i = 0; i < SHARES; ++i) repeated[i] = load_up_to(from + d, dim - d);
        share_vectors(repeated);
        UNROLL for (int i = 0; i < SHARES; ++i) store(to + d * SHARES + i * W, repeated[i]);
    }
}

// The queries of a piece, and what one thread computes of a tile with `group` of them.
template <class Row>
struct TileWork {
    std::vector<float> queries;
    const int64_t padded;
    TileWork(const Cache&, int64_t heads, int64_t, int64_t padded)
        : queries(heads * padded * SHARES), padded(padded) {}

    template <class T>
    INLINE void take(int64_t at, const T* from, int64_t dim) {
        take_query(from, &queries[at * padded * SHARES], dim);
    }
    void score(const KeyRows<Row>& tile, const Row* ahead, int64_t first, int64_t group, int64_t dim,
               float* scores) {
        const float* from = &queries[first * padded * SHARES];
        for (int64_t g = 0; g < group; g += MAX_HEADS)
            with_constant<MAX_HEADS>((int)std::min<int64_t>(MAX_HEADS, group - g), [&](auto n) {
                score_heads<n.value>(from + g * padded * SHARES, padded * SHARES, tile,
                                     g ? nullptr : ahead, dim, scores + g * KEY_TILE);
            });
    }
    void add(const float* scores, const KeyRows<Row>& tile, const Row* ahead, int64_t group,
             const Cache& cache, const float* keep, float* out) {
        for (int64_t g = 0; g < group; g += MAX_HEADS)
            add_values((int)std::min<int64_t>(MAX_HEADS, group - g), scores + g * KEY_TILE, tile, ahead,
                       keep + g, out + g * padded, padded, cache.dim);
    }
};
