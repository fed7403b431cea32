// Prefill attention: chunks of queries, a tile of queries against a tile of keys at a time.

#pragma once

#include "attention/code_tiles.h"

// An item is some queries of a sequence and all query heads of a kv head: rows. It reads the keys before
// its last query once, and transposes them, so more rows a time cost less a row. But what a thread keeps
// of them (queries, scores, two states of sums) should stay in a second-level cache of 512 KiB, no thread
// should end long after the others, and an item computes scores of its last keys for all its queries.
constexpr int64_t LEAST_ROWS = 72;
constexpr int64_t ITEM_FLOATS = 72 * 256;  // head dimensions of all rows, at most
constexpr int64_t ITEMS_A_THREAD = 4;      // at least, where that leaves LEAST_ROWS
constexpr int64_t KEYS_A_QUERY = 32;       // of the context, at least, where that leaves LEAST_ROWS

// K of one tile transposed to [dim][KEY_TILE], V as [KEY_TILE][padded].
template <class Row>
INLINE void load_tile(const KeyRows<Row>& tile, int64_t dim, int64_t padded, float* keys,
                      float* values) {
    for (int64_t j = 0; j < tile.count; j += W)
        transpose_keys(tile.keys + j, dim, padded, keys + j, KEY_TILE);
    for (int64_t j = 0; j < tile.count; ++j)
        for (int64_t d = 0; d < padded; d += W)
            store(values + j * padded + d,
                  tile.values[j].up_to(d, tile.values[j].place(d), dim - d));
}

// Compiled once, for rows of any format.
inline __attribute__((noinline)) void add_tile(const float* scores, const float* values,
                                               int64_t padded, int64_t rows, int64_t count,
                                               const float* keep, float* out) {
    multiply_tile(scores, KEY_TILE, values, padded, rows, count, padded, keep, out, padded);
}

// The queries of an item, and the products of some of its rows with a tile.
template <class Row>
struct ItemWork {
    std::vector<float> queries, keys, values;
    const int64_t dim, padded;
    ItemWork(const Cache& c, int64_t rows, int64_t padded)
        : queries(rows * padded), keys(padded * KEY_TILE), values(KEY_TILE * padded), dim(c.dim),
          padded(padded) {}

    template <class T>
    INLINE void take(int64_t row, const T* from) {
        widen(from, &queries[row * padded], dim, padded);
    }
    void load(const KeyRows<Row>& tile) { load_tile(tile, dim, padded, keys.data(), values.data()); }
    void score(const KeyRows<Row>&, int64_t first, int64_t rows, int64_t width, float* scores) {
        score_tile(&queries[first * padded], padded, keys.data(), KEY_TILE, rows, dim, width, scores);
    }
    void add(const KeyRows<Row>& tile, const Cache&, const float* scores, int64_t rows,
             const float* keep, float* out) {
        add_tile(scores, values.data(), padded, rows, tile.count, keep, out);
    }
};

// The same of int8 codes, by integers.
template <>
struct ItemWork<CodeRow> {
    CodedQueries queries;
    CodeTile codes;
    std::vector<float> wide;
    const int64_t dim;
    ItemWork(const Cache& c, int64_t rows, int64_t padded)
        : queries(c, rows, padded), codes(c, rows, padded), wide(padded), dim(c.dim) {}

    template <class T>
    INLINE void take(int64_t row, const T* from) {
        widen(from, wide.data(), dim, wide.size());
        queries.take(row, wide.data());
    }
    void load(const KeyRows<CodeRow>& tile) {
        codes.load_keys(tile);
        codes.load_values(tile);
    }
    void score(const KeyRows<CodeRow>& tile, int64_t first, int64_t rows, int64_t, float* scores) {
        codes.score(queries, first, rows, tile, scores);
    }
    void add(const KeyRows<CodeRow>& tile, const Cache& cache, const float* scores, int64_t rows,
             const float* keep, float* out) {
        codes.add_values(scores, rows, tile, tile.value_scales(cache), keep, out);
    }
};

template <class Row>
struct Workspace {  // of one thread
    ItemWork<Row> work;
    std::vector<float> scales, scores, keep, pieces;
    std::vector<Range> seen;  // a query
    Partial all, piece;       // the pieces merged so far, and the one at hand
    KeyRows<Row> found;
    Workspace(const Cache& c, int64_t rows, int64_t padded)
        : work(c, rows, padded), scales(KeyRows<Row>::room(c, 1)), scores(rows * KEY_TILE),
          keep(rows), pieces(2 * Partial::size(rows, padded)), seen(rows),
          all(pieces.data(), rows, padded),
          piece(pieces.data() + Partial::size(rows, padded), rows, padded) {
        found.scales = scales.data();
    }
};

// Queries before the first and after the last that see a key of the tile at `tile` are left out.
INLINE Range seeing(const Range* seen, int64_t queries, int64_t tile) {
    Range found{0, queries};
    while (found.begin < found.end && seen[found.begin].end <= tile) ++found.begin;
    while (found.begin < found.end && seen[found.end - 1].begin >= tile + KEY_TILE) --found.end;
    return found;
}

// One piece of the context: the queries in `ws` over the keys [begin, end) of sequence b. Keys before
// `begin` may be gone: their block may serve another sequence by now.
template <class Row>
void attend(const AttentionArgs& a, int64_t b, int64_t head, int64_t queries, int64_t begin,
            int64_t end, int64_t padded, bool is_first, Workspace<Row>& ws) {
    const int64_t group = a.group();
    const Partial& piece = is_first ? ws.all : ws.piece;
    piece.clear(queries * group, padded);
    for (int64_t tile = begin / KEY_TILE * KEY_TILE; tile < end; tile += KEY_TILE) {
        const Range see = seeing(ws.seen.data(), queries, tile);
        if (see.begin == see.end) continue;
        ws.found.find(a, b, head, tile, begin, end);
        ws.found.prepare(a.cache);
        ws.work.load(ws.found);
        const int64_t first = see.begin * group, rows = (see.end - see.begin) * group;
        const int64_t width = (ws.found.count + W - 1) / W * W;
        float *scores = &ws.scores[first * KEY_TILE], *keep = &ws.keep[first];
        const Partial part = piece.after(first, padded);
        ws.work.score(ws.found, first, rows, width, scores);
        soften_rows(scores, rows, group, &ws.seen[see.begin], tile, width, (float)a.scale,
                    (float)(a.softcap / a.scale), part, keep);
        ws.work.add(ws.found, a.cache, scores, rows, keep, part.out);
    }
    if (!is_first) merge(ws.all, ws.piece, queries * group, padded);
}

// All query heads of one kv head for `queries` rows of q [*, heads, dim].
template <class T, class Row>
INLINE void take_queries(const AttentionArgs& a, const void* q, int64_t stride, int64_t row,
                         int64_t head, int64_t queries, ItemWork<Row>& work) {
    const int64_t group = a.group(), dim = a.cache.dim;
    const T* from = (const T*)q + row * stride + head * group * dim;
    for (int64_t r = 0; r < queries * group; ++r)
        work.take(r, from + r / group * stride + r % group * dim);
}

// Queries [first, last) of sequence b, all query heads of one kv head: the sinks, then the window.
// Query i stands at absolute position `offset + i`; its row in the flat batch is `row0 + i`.
template <class T, class Row>
void prefill_item(const AttentionArgs& a, int64_t b, int64_t head, int64_t row0, int64_t offset,
                  int64_t first, int64_t last, int64_t padded, Workspace<Row>& ws) {
    const int64_t group = a.group(), dim = a.cache.dim;
    const int64_t queries = last - first, rows = queries * group, row = row0 + first;
    bool is_first = true;
    if (a.sink_ends) {
        int64_t end = 0;
        for (int64_t i = 0; i < queries; ++i) {
            ws.seen[i] = {0, std::min<int64_t>(a.sink_ends[row + i], offset + first + i + 1)};
            end = std::max(end, ws.seen[i].end);
        }
        if (end > 0) {
            take_queries<T>(a, a.q_sink, a.q_sink_stride, row, head, queries, ws.work);
            attend<Row>(a, b, head, queries, 0, end, padded, is_first, ws);
            is_first = false;
        }
    }
    const int64_t end = offset + last;  // the last query sees itself
    int64_t oldest = end;
    for (int64_t i = 0; i < queries; ++i) {
        const int64_t at = offset + first + i, start = a.window_starts ? a.window_starts[row + i] : 0;
        ws.seen[i] = {std::max(start, a.window ? at - a.window + 1 : 0), at + 1};
        oldest = std::min(oldest, ws.seen[i].begin);
    }
    if (oldest < end)
        take_queries<T>(a, a.q, a.q_stride, row, head, queries, ws.work);
    for (int64_t begin = oldest, next; begin < end; begin = next, is_first = false) {
        next = std::min(end, (begin / SPLIT + 1) * SPLIT);
        attend<Row>(a, b, head, queries, begin, next, padded, is_first, ws);
    }
    if (is_first) ws.all.clear(rows, padded);  // no query saw a key
    T* out = (T*)a.out + (row * a.heads + head * group) * dim;
    const float* sink = a.sink_scores ? a.sink_scores + head * group : nullptr;
    for (int64_t r = 0; r < rows; ++r)
        finish(ws.all, r, padded, sink ? sink + r % group : nullptr,
               out + (r / group * a.heads + r % group) * dim, dim);
}

// Queries [first, last) of sequence b.
struct Item {
    int64_t b, first, last;
};

// The chunks of all sequences in items, the longest contexts of a chunk first. A row has the same bits in
// any item.
inline std::vector<Item> cut_into_items(const AttentionArgs& a, int64_t padded) {
    const int64_t group = a.group(), total = a.starts[a.batch] - a.starts[0];
    const int64_t least = std::max<int64_t>(1, LEAST_ROWS / group);
    int64_t most = std::max(least, ITEM_FLOATS / padded / group);
    if (a.threads > 1)
        most = std::clamp(total * a.cache.kv_heads / (ITEMS_A_THREAD * a.threads), least, most);
    std::vector<Item> items;
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t size = std::clamp(a.lens[b] / KEYS_A_QUERY, least, most);
        for (int64_t last = a.starts[b + 1] - a.starts[b]; last > 0; last -= size)
            items.push_back({b, std::max<int64_t>(0, last - size), last});
    }
    return items;
}

template <class T, class Row>
void prefill_rows(const AttentionArgs& a) {
    const int64_t group = a.group(), kv_heads = a.cache.kv_heads;
    const int64_t padded = (a.cache.dim + W - 1) / W * W;
    const std::vector<Item> items = cut_into_items(a, padded);
    int64_t most = 0;
    for (const Item& item : items) most = std::max(most, item.last - item.first);
    const int64_t count = (int64_t)items.size() * kv_heads;
#pragma omp parallel num_threads((int)a.threads) if (count > 1)
    {
        Workspace<Row> ws(a.cache, most * group, padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[i / kv_heads];
            const int64_t offset = a.lens[item.b] - (a.starts[item.b + 1] - a.starts[item.b]);
            prefill_item<T, Row>(a, item.b, i % kv_heads, a.starts[item.b], offset, item.first,
                                 item.last, padded, ws);
        }
    }
}

template <class T>
void prefill(const AttentionArgs& a) {
    with_rows<T>(a.cache, [&](auto row) { prefill_rows<T, decltype(row)>(a); });
}
