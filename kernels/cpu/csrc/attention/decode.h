// Decode attention: one query a sequence, its context cut into pieces that stand at absolute positions.

#pragma once

#include "attention/order.h"
#include "attention/pieces.h"

constexpr int MAX_HEADS = 8;  // query heads whose sums are in registers together
constexpr int64_t SPLITS_A_THREAD = 4;  // at least, or heads are shared among threads, too
// Steps between asking memory for a tile and reading it. With one, memory answers too late (Zen 4); three
// gain nothing.
constexpr int AHEAD = 2;

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

// What one thread works with.
template <class Row>
struct DecodeScratch {
    std::vector<float> queries, scores, keep, scales;
    KeyRows<Row> tiles[AHEAD + 1];  // of the step at hand, and of those that are likely to follow
    Step held[AHEAD + 1];
    int64_t turn = 0;
    DecodeScratch(const Cache& c, int64_t heads, int64_t group, int64_t padded)
        : queries(heads * padded * SHARES), scores(group * KEY_TILE), keep(group),
          scales(KeyRows<Row>::room(c, AHEAD + 1)) {
        for (int i = 0; i <= AHEAD; ++i) {
            tiles[i].scales = scales.data() + KeyRows<Row>::room(c, i);
            held[i] = {-1, 0};
        }
    }

    // The tile of `step`, which stands `ahead` steps after the one at hand.
    KeyRows<Row>& find(const AttentionArgs& a, const Pieces& pieces, Step step, int ahead) {
        const int64_t place = (turn + ahead) % (AHEAD + 1);
        KeyRows<Row>& tile = tiles[place];
        if (held[place] == step) return tile;
        held[place] = step;
        tile.clear();
        if (step.piece < pieces.count) {
            const Piece piece = pieces.at(step.piece);
            const Split& split = *piece.split;
            tile.find(a, split.b, piece.head(step.step), piece.tile(step.step), split.begin, split.end);
        }
        return tile;
    }
};

// One step of the queries in `at` over the keys of `tile`; `next`: the tile that is read AHEAD steps later.
// A row of `tile` asks for one of `next`, key for key and value for value: so memory is asked at the pace
// at which it is read, and has the time of whole steps to answer. (What `next` has more rows is left to the
// processor's own foresight: asking for all of them at once gained nothing.)
template <class Row>
void decode_tile(const AttentionArgs& a, const KeyRows<Row>& tile, const KeyRows<Row>& next,
                 int64_t padded, const float* queries, DecodeScratch<Row>& at, const Partial& mine) {
    const int64_t group = a.group(), dim = a.cache.dim;
    const bool none = next.is_empty();
    for (int64_t g = 0; g < group; g += MAX_HEADS)
        with_constant<MAX_HEADS>((int)std::min<int64_t>(MAX_HEADS, group - g), [&](auto n) {
            score_heads<n.value>(queries + g * padded * SHARES, padded * SHARES, tile,
                                 g || none ? nullptr : next.keys, dim, &at.scores[g * KEY_TILE]);
        });
    const int64_t width = (tile.count + W - 1) / W * W;
    for (int64_t g = 0; g < group; ++g) {
        float* scores = &at.scores[g * KEY_TILE];
        if (a.softcap) cap_scores(scores, width, (float)(a.softcap / a.scale));
        at.keep[g] = soften(scores, width, tile.skip, tile.count, (float)a.scale, mine.top[g],
                            mine.total[g]);
    }
    for (int64_t g = 0; g < group; g += MAX_HEADS)
        add_values((int)std::min<int64_t>(MAX_HEADS, group - g), &at.scores[g * KEY_TILE], tile,
                   none ? nullptr : next.values, &at.keep[g], mine.out + g * padded, padded, dim);
}

// The queries of piece `i`, which are in `at`.
template <class Row>
void decode_piece(const AttentionArgs& a, const Pieces& pieces, int64_t i, int64_t padded,
                  DecodeScratch<Row>& at, float* parts) {
    const Piece piece = pieces.at(i);
    const int64_t group = a.group(), steps = piece.steps();
    for (int64_t step = 0; step < steps; ++step, ++at.turn) {
        Step found = {i, step};
        KeyRows<Row>* tiles[AHEAD + 1] = {&at.find(a, pieces, found, 0)};
        for (int ahead = 1; ahead <= AHEAD; ++ahead)
            tiles[ahead] = &at.find(a, pieces, found = pieces.after(found), ahead);
        const int64_t head = piece.head(step);
        tiles[0]->prepare(a.cache);
        decode_tile(a, *tiles[0], *tiles[AHEAD], padded,
                    &at.queries[(head - piece.first) * group * padded * SHARES], at,
                    Partial(parts + head * Partial::size(group, padded), group, padded));
    }
}

template <class T, class Row>
void decode_rows(const AttentionArgs& a) {
    static thread_local std::vector<Split> all_splits;
    static thread_local std::vector<float> scratch;
    const int64_t group = a.group(), kv_heads = a.cache.kv_heads;
    const int64_t dim = a.cache.dim, padded = (dim + W - 1) / W * W, part = Partial::size(group, padded);
    const int64_t pairs = cut_contexts(a, all_splits);
    const int64_t num_splits = all_splits.size(), items = num_splits * kv_heads;
    const bool shares_heads = a.threads > 1 && num_splits < SPLITS_A_THREAD * a.threads;
    const int64_t taken = shares_heads ? 1 : kv_heads, turns = kv_heads / taken;  // of a split
    if ((int64_t)scratch.size() < items * part) scratch.resize(items * part);
    const Split* splits = all_splits.data();  // the caller's, for all threads
    float* parts = scratch.data();
    const int64_t threads = pairs * dim > GRAIN ? a.threads : 1;
    const Pieces pieces{splits, taken, turns, num_splits * turns, threads};
#pragma omp parallel num_threads((int)threads)
    {
        DecodeScratch<Row> own(a.cache, taken * group, group, padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces.count; ++i) {
            const Piece piece = pieces.at(i);
            const Split& split = *piece.split;
            const int64_t first = piece.first;
            const T* rows = split.sinks ? (const T*)a.q_sink + split.b * a.q_sink_stride
                                        : (const T*)a.q + split.b * a.q_stride;
            float* mine = parts + (piece.split - splits) * kv_heads * part;
            for (int64_t g = 0; g < taken * group; ++g)
                take_query(rows + (first * group + g) * dim, &own.queries[g * padded * SHARES], dim);
            for (int64_t head = first; head < piece.last; ++head)
                Partial(mine + head * part, group, padded).clear(group, padded);
            decode_piece(a, pieces, i, padded, own, mine);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < items; ++item) {  // merge, once a (sequence, kv head)
            const Split& split = splits[item / kv_heads];
            if (split.index) continue;
            const Partial all(parts + item * part, group, padded);
            for (int64_t s = 1; s < split.num_splits; ++s)
                merge(all, Partial(parts + (item + s * kv_heads) * part, group, padded), group, padded);
            T* out = (T*)a.out + (split.b * a.heads + item % kv_heads * group) * dim;
            const float* sink = a.sink_scores ? a.sink_scores + item % kv_heads * group : nullptr;
            for (int64_t g = 0; g < group; ++g)
                finish(all, g, padded, sink ? sink + g : nullptr, out + g * dim, dim);
        }
    }
}

template <class T>
void decode(const AttentionArgs& a) {
    with_rows<T>(a.cache, [&](auto row) { decode_rows<T, decltype(row)>(a); });
}
