// Decode attention: one query a sequence, its context cut into pieces that stand at absolute positions.

#pragma once

#include "attention/order.h"

constexpr int MAX_HEADS = 8;  // query heads whose sums are in registers together
constexpr int64_t SPLITS_A_THREAD = 4;  // at least, or heads are shared among threads, too

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
                                           bool announces, int64_t dim, float* scores) {
    constexpr int P = vectors_at_once(G), COUNT = P * SHARES;
    for (int64_t j = tile.skip / COUNT * COUNT; j < tile.count; j += COUNT)
        score_keys<G, P>(queries, ldq, tile.keys + j, announces ? tile.values + j : nullptr, dim,
                         scores + j);
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

// Values of one tile, added to the sums of `heads` queries; `next`: the tile after it.
template <class Row>
void add_values(int heads, const float* scores, const KeyRows<Row>& tile, const KeyRows<Row>& next,
                const float* keep, float* out, int64_t ldo, int64_t dim) {
    const int64_t first = tile.skip, count = tile.count - first;
    const Row* ahead = next.is_empty() ? nullptr : next.keys + first;
    const auto weigh = [&](auto n, int g) {
        weigh_heads<n.value, Row>(scores + g * KEY_TILE + first, tile.values + first,
                                  g ? nullptr : ahead, count, keep + g, out + g * ldo, ldo, dim);
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
    KeyRows<Row> tiles[2];  // this one and the next
    DecodeScratch(const Cache& c, int64_t heads, int64_t group, int64_t padded)
        : queries(heads * padded * SHARES), scores(group * KEY_TILE), keep(group),
          scales(KeyRows<Row>::room(c, 2)) {
        tiles[0].scales = scales.data();
        tiles[1].scales = scales.data() + KeyRows<Row>::room(c, 1);
    }
};

struct Split {
    int64_t b, begin, end, index, num_splits;
    bool sinks;  // the keys before the sink end, which are scored with `q_sink`
};

// One step of the queries in `at` over the keys of `tile`; `next`: the tile that is read after it.
template <class Row>
void decode_tile(const AttentionArgs& a, const KeyRows<Row>& tile, const KeyRows<Row>& next,
                 int64_t padded, const float* queries, DecodeScratch<Row>& at, const Partial& mine) {
    const int64_t group = a.group(), dim = a.cache.dim;
    for (int64_t g = 0; g < group; g += MAX_HEADS)
        with_constant<MAX_HEADS>((int)std::min<int64_t>(MAX_HEADS, group - g), [&](auto n) {
            score_heads<n.value>(queries + g * padded * SHARES, padded * SHARES, tile, g == 0, dim,
                                 &at.scores[g * KEY_TILE]);
        });
    const int64_t width = (tile.count + W - 1) / W * W;
    for (int64_t g = 0; g < group; ++g) {
        float* scores = &at.scores[g * KEY_TILE];
        if (a.softcap) cap_scores(scores, width, (float)(a.softcap / a.scale));
        at.keep[g] = soften(scores, width, tile.skip, tile.count, (float)a.scale, mine.top[g],
                            mine.total[g]);
    }
    for (int64_t g = 0; g < group; g += MAX_HEADS)
        add_values((int)std::min<int64_t>(MAX_HEADS, group - g), &at.scores[g * KEY_TILE], tile, next,
                   &at.keep[g], mine.out + g * padded, padded, dim);
}

// Some kv heads of a split.
struct Piece {
    const Split* split;
    int64_t first, last;

    template <class Row>
    void find(KeyRows<Row>& tile, const AttentionArgs& a, int64_t head, int64_t start) const {
        tile.find(a, split->b, head, start, split->begin, split->end);
    }
    int64_t first_tile() const { return split->begin / KEY_TILE * KEY_TILE; }
};

// The queries of `piece`, which are in `at`: a tile of all its heads, then the next tile, as the keys of
// a block lie side by side. `after`: what is likely to be computed next, or of no split.
template <class Row>
void decode_piece(const AttentionArgs& a, const Piece& piece, const Piece& after, int64_t padded,
                  DecodeScratch<Row>& at, float* parts) {
    const Split& split = *piece.split;
    if (split.begin >= split.end) return;
    const int64_t group = a.group(), first = piece.first, last = piece.last;
    int64_t start = piece.first_tile();
    piece.find(at.tiles[0], a, first, start);
    for (int turn = 0; start < split.end; start += KEY_TILE) {
        for (int64_t head = first; head < last; ++head, turn ^= 1) {
            KeyRows<Row>&tile = at.tiles[turn], &next = at.tiles[turn ^ 1];
            const bool is_last = head + 1 == last;
            if (is_last && start + KEY_TILE >= split.end && after.split)
                after.find(next, a, after.first, after.first_tile());
            else
                piece.find(next, a, is_last ? first : head + 1, start + is_last * KEY_TILE);
            tile.prepare(a.cache);
            decode_tile(a, tile, next, padded, &at.queries[(head - first) * group * padded * SHARES], at,
                        Partial(parts + head * Partial::size(group, padded), group, padded));
        }
    }
}

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
    const int64_t group = a.group(), kv_heads = a.cache.kv_heads;
    const int64_t dim = a.cache.dim, padded = (dim + W - 1) / W * W, part = Partial::size(group, padded);
    const int64_t pairs = cut_contexts(a, all_splits);
    const int64_t num_splits = all_splits.size(), items = num_splits * kv_heads;
    const bool shares_heads = a.threads > 1 && num_splits < SPLITS_A_THREAD * a.threads;
    const int64_t taken = shares_heads ? 1 : kv_heads, turns = kv_heads / taken;  // of a split
    if ((int64_t)scratch.size() < items * part) scratch.resize(items * part);
    const Split* splits = all_splits.data();  // the caller's, for all threads
    float* parts = scratch.data();
    const auto piece_at = [&](int64_t i) {
        return Piece{splits + i / turns, i % turns * taken, (i % turns + 1) * taken};
    };
#pragma omp parallel num_threads((int)a.threads) if (pairs * dim > GRAIN)
    {
        DecodeScratch<Row> own(a.cache, taken * group, group, padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_splits * turns; ++i) {
            const bool is_last = i + 1 == num_splits * turns;
            const Piece piece = piece_at(i), after = is_last ? Piece{} : piece_at(i + 1);
            const Split& split = *piece.split;
            const int64_t first = piece.first;
            const T* rows = split.sinks ? (const T*)a.q_sink + split.b * a.q_sink_stride
                                        : (const T*)a.q + split.b * a.q_stride;
            float* mine = parts + (piece.split - splits) * kv_heads * part;
            for (int64_t g = 0; g < taken * group; ++g)
                take_query(rows + (first * group + g) * dim, &own.queries[g * padded * SHARES], dim);
            for (int64_t head = first; head < piece.last; ++head)
                Partial(mine + head * part, group, padded).clear(group, padded);
            decode_piece(a, piece, after, padded, own, mine);
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
