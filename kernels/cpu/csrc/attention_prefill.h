// Prefill attention: chunks of queries, a tile of queries against a tile of keys at a time.

#pragma once

#include "attention.h"

constexpr int ROW_TILE = 72;  // (query, head) rows of one item, about

struct Range {  // of absolute positions
    int64_t begin, end;
};

struct Workspace {  // one thread's tiles, all fp32
    std::vector<float> queries, keys, values, scales, scores, out, top, total, keep;
    std::vector<Range> seen;  // a query
    Workspace(int64_t rows, int64_t padded, int64_t num_scales)
        : queries(rows * padded), keys(padded * KEY_TILE), values(KEY_TILE * padded),
          scales(num_scales), scores(rows * KEY_TILE), out(rows * padded), top(rows), total(rows),
          keep(rows), seen(rows) {}
};

// K of one tile transposed to [dim][KEY_TILE], V as [KEY_TILE][padded]; zeros past `count`.
template <class Row>
INLINE void load_tile(const Row* keys, const Row* values, int64_t count, int64_t dim, int64_t padded,
                      Workspace& ws) {
    for (int64_t j = 0; j < count; j += W)
        for (int64_t d = 0; d < padded; d += W) {
            const int64_t at = keys[j].place(d);
            vf square[W];
            UNROLL for (int i = 0; i < W; ++i)
                square[i] = j + i < count ? keys[j + i].up_to(d, at, dim - d) : vf{};
            transpose(square);
            UNROLL for (int i = 0; i < W; ++i) store(&ws.keys[(d + i) * KEY_TILE + j], square[i]);
        }
    for (int64_t j = 0; j < count; ++j)
        for (int64_t d = 0; d < padded; d += W)
            store(&ws.values[j * padded + d], values[j].up_to(d, values[j].place(d), dim - d));
}

// All query heads of one kv head for `queries` rows of q [*, heads, dim], widened into `ws`.
template <class T>
INLINE void take_queries(const AttentionArgs& a, const void* q, int64_t stride, int64_t row,
                         int64_t head, int64_t queries, int64_t padded, Workspace& ws) {
    const int64_t group = a.group(), dim = a.cache.dim;
    const T* from = (const T*)q + row * stride + head * group * dim;
    for (int64_t r = 0; r < queries * group; ++r)
        widen(from + r / group * stride + r % group * dim, &ws.queries[r * padded], dim, padded);
}

// The `rows` queries in `ws` over `count` keys there, of which the first has position `tile`; query i
// of `group` rows sees those in ws.seen[i]. No number format appears here, so that it is compiled only once.
inline __attribute__((noinline)) void attend_tile(Workspace& ws, int64_t rows, int64_t group,
                                                  int64_t tile, int64_t count, int64_t dim,
                                                  int64_t padded, float scale) {
    const int64_t width = (count + W - 1) / W * W;
    multiply_tile(ws.queries.data(), padded, ws.keys.data(), KEY_TILE, rows, dim, width, nullptr,
                  ws.scores.data(), KEY_TILE);
    for (int64_t r = 0; r < rows; ++r) {
        const Range& seen = ws.seen[r / group];
        ws.keep[r] = soften(&ws.scores[r * KEY_TILE], width,
                            std::clamp<int64_t>(seen.begin - tile, 0, width),
                            std::clamp<int64_t>(seen.end - tile, 0, width), scale, ws.top[r],
                            ws.total[r]);
    }
    multiply_tile(ws.scores.data(), KEY_TILE, ws.values.data(), padded, rows, count, padded,
                  ws.keep.data(), ws.out.data(), padded);
}

// The queries in `ws` over the keys [oldest, end) of sequence b. Keys before `oldest` may be gone:
// their block may serve another sequence by now.
template <class Row>
void attend(const AttentionArgs& a, int64_t b, int64_t head, int64_t queries, int64_t oldest,
            int64_t end, int64_t padded, Workspace& ws) {
    const int64_t group = a.group(), dim = a.cache.dim;
    KeyRows<Row> found;
    found.scales = ws.scales.data();
    for (int64_t tile = oldest / KEY_TILE * KEY_TILE; tile < end; tile += KEY_TILE) {
        const int64_t skip = std::max<int64_t>(0, oldest - tile);
        const int64_t count = std::min(end - tile, (int64_t)KEY_TILE);
        found.find(a, b, head, tile + skip, count - skip, skip);
        found.prepare(a.cache);
        std::fill_n(found.keys, skip, found.keys[skip]);
        std::fill_n(found.values, skip, found.values[skip]);
        load_tile(found.keys, found.values, count, dim, padded, ws);
        attend_tile(ws, queries * group, group, tile, count, dim, padded, (float)a.scale);
    }
}

// Queries [first, last) of sequence b, all query heads of one kv head: the sinks, then the window.
// Query i stands at absolute position `offset + i`; its row in the flat batch is `row0 + i`.
template <class T, class Row>
void prefill_item(const AttentionArgs& a, int64_t b, int64_t head, int64_t row0, int64_t offset,
                  int64_t first, int64_t last, Workspace& ws) {
    const int64_t group = a.group(), dim = a.cache.dim, padded = (dim + W - 1) / W * W;
    const int64_t queries = last - first, rows = queries * group, row = row0 + first;
    std::fill_n(ws.out.begin(), rows * padded, 0.0f);
    std::fill_n(ws.top.begin(), rows, HIDDEN);
    std::fill_n(ws.total.begin(), rows, 0.0f);
    if (a.sink_ends) {
        int64_t end = 0;
        for (int64_t i = 0; i < queries; ++i) {
            ws.seen[i] = {0, std::min<int64_t>(a.sink_ends[row + i], offset + first + i + 1)};
            end = std::max(end, ws.seen[i].end);
        }
        if (end > 0) {
            take_queries<T>(a, a.q_sink, a.q_sink_stride, row, head, queries, padded, ws);
            attend<Row>(a, b, head, queries, 0, end, padded, ws);
        }
    }
    const int64_t end = offset + last;  // the last query sees itself
    int64_t oldest = end;
    for (int64_t i = 0; i < queries; ++i) {
        const int64_t at = offset + first + i, start = a.window_starts ? a.window_starts[row + i] : 0;
        ws.seen[i] = {std::max(start, a.window ? at - a.window + 1 : 0), at + 1};
        oldest = std::min(oldest, ws.seen[i].begin);
    }
    if (oldest < end) {
        take_queries<T>(a, a.q, a.q_stride, row, head, queries, padded, ws);
        attend<Row>(a, b, head, queries, oldest, end, padded, ws);
    }
    T* out = (T*)a.out + (row * a.heads + head * group) * dim;
    for (int64_t r = 0; r < rows; ++r)
        narrow(&ws.out[r * padded], ws.top[r] == HIDDEN ? 0.0f : 1.0f / ws.total[r],
               out + (r / group * a.heads + r % group) * dim, dim);
}

template <class T, class Row>
void prefill_rows(const AttentionArgs& a) {
    struct Item {
        int64_t b, first, last;
    };
    const int64_t group = a.group(), kv_heads = a.cache.kv_heads;
    const int64_t padded = (a.cache.dim + W - 1) / W * W;
    const int64_t tile = std::max<int64_t>(1, ROW_TILE / group);
    std::vector<Item> items;
    for (int64_t b = 0; b < a.batch; ++b)  // the longest contexts of a chunk first
        for (int64_t last = a.starts[b + 1] - a.starts[b]; last > 0; last -= tile)
            items.push_back({b, std::max<int64_t>(0, last - tile), last});
    const int64_t count = (int64_t)items.size() * kv_heads;
#pragma omp parallel num_threads((int)a.threads) if (count > 1)
    {
        Workspace ws(tile * group, padded, KeyRows<Row>::room(a.cache, 1));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[i / kv_heads];
            const int64_t offset = a.lens[item.b] - (a.starts[item.b + 1] - a.starts[item.b]);
            prefill_item<T, Row>(a, item.b, i % kv_heads, a.starts[item.b], offset, item.first,
                                 item.last, ws);
        }
    }
}

template <class T>
void prefill(const AttentionArgs& a) {
    with_rows<T>(a.cache, [&](auto row) { prefill_rows<T, decltype(row)>(a); });
}
