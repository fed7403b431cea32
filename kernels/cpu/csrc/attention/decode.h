// Decode attention: one query a sequence, its context cut into pieces that stand at absolute positions.

#pragma once

#include "attention/code_tiles.h"
#include "attention/decode_rows.h"
#include "attention/pieces.h"

constexpr int64_t SPLITS_A_THREAD = 4;  // at least, or heads are shared among threads, too
// Steps between asking memory for a tile and reading it. With one, memory answers too late (Zen 4); three
// gain nothing.
constexpr int AHEAD = 2;

// The same of int8 codes, by integers.
template <>
struct TileWork<CodeRow> {
    CodedQueries queries;
    CodeTile codes;
    std::vector<float> wide;
    TileWork(const Cache& c, int64_t heads, int64_t group, int64_t padded)
        : queries(c, heads, padded), codes(c, group, padded), wide(padded) {}

    template <class T>
    INLINE void take(int64_t at, const T* from, int64_t dim) {
        widen(from, wide.data(), dim, wide.size());
        queries.take(at, wide.data());
    }
    void score(const KeyRows<CodeRow>& tile, const CodeRow* ahead, int64_t first, int64_t group,
               int64_t, float* scores) {
        codes.read_and_score(queries, first, group, tile, ahead, scores);
    }
    void add(const float* scores, const KeyRows<CodeRow>& tile, const CodeRow* ahead, int64_t group,
             const Cache& cache, const float* keep, float* out) {
        codes.read_and_add(scores, group, tile, tile.value_scales(cache), ahead, keep, out);
    }
};

// What one thread works with.
template <class Row>
struct DecodeScratch {
    TileWork<Row> work;
    std::vector<float> scores, keep, scales;
    KeyRows<Row> tiles[AHEAD + 1];  // of the step at hand, and of those that are likely to follow
    Step held[AHEAD + 1];
    int64_t turn = 0;
    DecodeScratch(const Cache& c, int64_t heads, int64_t group, int64_t padded)
        : work(c, heads, group, padded), scores(group * KEY_TILE), keep(group),
          scales(KeyRows<Row>::room(c, AHEAD + 1)) {
        for (int i = 0; i <= AHEAD; ++i) {
            tiles[i].scales = scales.data() + KeyRows<Row>::room(c, i);
            held[i] = {-1, 0};
        }
    }

    KeyRows<Row>& ahead(int64_t steps) { return tiles[(turn + steps) % (AHEAD + 1)]; }

    // Finds the tiles of `now` and of the AHEAD steps that are likely to follow, as far as they are not here.
    void find(const AttentionArgs& a, const Pieces& pieces, Step now) {
        int64_t known = held[turn % (AHEAD + 1)] == now ? AHEAD : 0;  // so are those that follow it
        Step next = known ? pieces.after(held[(turn + AHEAD - 1) % (AHEAD + 1)]) : now;
        for (;; next = pieces.after(next)) {
            KeyRows<Row>& tile = ahead(known);
            held[(turn + known) % (AHEAD + 1)] = next;
            tile.clear();
            if (next.piece < pieces.count) {
                const Piece piece = pieces.at(next.piece);
                const Split& split = *piece.split;
                tile.find(a, split.b, piece.head(next.step), piece.tile(next.step), split.begin,
                          split.end);
            }
            if (++known > AHEAD) return;
        }
    }
};

// One step of the `group` queries from `first` on over the keys of `tile`; `next`: the tile that is read
// AHEAD steps later.
// A row of `tile` asks for one of `next`, key for key and value for value: so memory is asked at the pace
// at which it is read, and has the time of whole steps to answer. (What `next` has more rows is left to the
// processor's own foresight: asking for all of them at once gained nothing.)
template <class Row>
void decode_tile(const AttentionArgs& a, const KeyRows<Row>& tile, const KeyRows<Row>& next,
                 int64_t first, DecodeScratch<Row>& at, const Partial& mine) {
    const int64_t group = a.group();
    const bool none = next.is_empty();
    at.work.score(tile, none ? nullptr : next.keys, first, group, a.cache.dim, at.scores.data());
    const Range seen = {tile.skip, tile.count};
    soften_rows(at.scores.data(), group, group, &seen, 0, (tile.count + W - 1) / W * W, (float)a.scale,
                (float)(a.softcap / a.scale), mine, at.keep.data());
    at.work.add(at.scores.data(), tile, none ? nullptr : next.values, group, a.cache, at.keep.data(),
                mine.out);
}

// The queries of piece `i`, which are in `at`.
template <class Row>
void decode_piece(const AttentionArgs& a, const Pieces& pieces, int64_t i, int64_t padded,
                  DecodeScratch<Row>& at, float* parts) {
    const Piece piece = pieces.at(i);
    const int64_t group = a.group(), steps = piece.steps();
    for (int64_t step = 0; step < steps; ++step, ++at.turn) {
        at.find(a, pieces, {i, step});
        const int64_t head = piece.head(step);
        at.ahead(0).prepare(a.cache);
        decode_tile(a, at.ahead(0), at.ahead(AHEAD), (head - piece.first) * group, at,
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
                own.work.take(g, rows + (first * group + g) * dim, dim);
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
