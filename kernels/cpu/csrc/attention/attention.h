// The arguments that decode and prefill share, and the way from a position to its row in the blocks of
// a paged KV cache. What they compute with these rows, and in which order, is in order.h.

#pragma once

#include "export.h"
#include "attention/kv_codes.h"

constexpr int KEY_TILE = 64;  // keys that share one softmax step

// A side of the cache, K or V: where its blocks lie, and their scales if it is quantised. Blocks with
// ids from `Cache::num_blocks` on lie in scratch, laid out as those of the cache. Block strides are in
// elements of the cache, or in scales.
struct Side {
    char* blocks;
    int64_t stride;
    uint16_t* scales;
    int64_t scale_stride;
    char* scratch;
    int64_t scratch_stride;
    uint16_t* scratch_scales;
    int64_t scratch_scale_stride;

    template <class C>
    C* row(int64_t block, int64_t num_blocks, int64_t at) const {
        return block < num_blocks ? (C*)blocks + block * stride + at
                                  : (C*)scratch + (block - num_blocks) * scratch_stride + at;
    }
    uint16_t* row_scales(int64_t block, int64_t num_blocks, int64_t at) const {
        return block < num_blocks
                   ? scales + block * scale_stride + at
                   : scratch_scales + (block - num_blocks) * scratch_scale_stride + at;
    }
};

struct Cache {
    Side k, v;
    int64_t num_blocks, block_size, kv_heads, dim;
    int64_t format;  // 0: as q, k and v; 1: int8; 2: fp8
    int64_t group;   // dimensions that share a scale

    int64_t groups() const { return dim / group; }
};
#define SIDE_FIELDS(side)                                                                     \
    FIELD(side.blocks) FIELD(side.stride) FIELD(side.scales) FIELD(side.scale_stride)         \
    FIELD(side.scratch) FIELD(side.scratch_stride) FIELD(side.scratch_scales)                 \
    FIELD(side.scratch_scale_stride)
#define CACHE_FIELDS(cache)                                                                   \
    SIDE_FIELDS(cache.k) SIDE_FIELDS(cache.v) FIELD(cache.num_blocks) FIELD(cache.block_size) \
    FIELD(cache.kv_heads) FIELD(cache.dim) FIELD(cache.format) FIELD(cache.group)

struct AttentionArgs {
    int64_t dtype;
    const void* q;
    int64_t q_stride;
    Cache cache;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t *starts, *lens;  // starts: prefill only
    void* out;
    int64_t batch, heads;
    double scale;
    double softcap;           // of a score, after `scale`; 0: none
    int64_t window, threads;  // window 0: all that went before
    // All null: no sequence is rolled.
    const void* q_sink;  // the queries of keys before their sink end
    int64_t q_sink_stride;
    const int32_t *sink_ends, *window_starts;  // a query row
    const int32_t *sink_blocks, *bases;        // a sequence
    const float* sink_scores;  // [heads], a score in each softmax that has no value; or null

    int64_t group() const { return heads / cache.kv_heads; }  // query heads of a kv head
};
LAYOUT(AttentionArgs,
       FIELD(dtype) FIELD(q) FIELD(q_stride) CACHE_FIELDS(cache) FIELD(tables) FIELD(table_stride)
       FIELD(starts) FIELD(lens) FIELD(out) FIELD(batch) FIELD(heads) FIELD(scale) FIELD(softcap) FIELD(window)
       FIELD(threads) FIELD(q_sink) FIELD(q_sink_stride) FIELD(sink_ends) FIELD(window_starts)
       FIELD(sink_blocks) FIELD(bases) FIELD(sink_scores))

// A row of the cache that lies there as it is.
template <class T>
struct PlainRow {
    using Element = T;
    const T* values;

    INLINE int64_t place(int64_t) const { return 0; }
    INLINE vf whole(int64_t d, int64_t) const { return load(values + d); }
    INLINE vf up_to(int64_t d, int64_t, int64_t left) const { return load_up_to(values + d, left); }
    // A row that is needed soon. Blocks lie scattered, so the processor cannot foresee them.
    INLINE void announce(int64_t d, int64_t count) const {
        for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(values + d + i, 0, 2);
    }
};

// A row of codes with fp32 scales; SPAN lanes of a vector share one: all W, or half of them.
template <class C, int SPAN>
struct CodedRow {
    using Element = C;
    const C* codes;
    const float* scales;
    int64_t shift;  // log2 of the group, or so much that all is one

    INLINE int64_t place(int64_t d) const { return d >> shift; }
    INLINE vf scale(int64_t at) const {
        if constexpr (SPAN == W) return splat(scales[at]);
        else return select(lower_half(), splat(scales[at]), splat(scales[at + 1]));
    }
    INLINE vf whole(int64_t d, int64_t at) const { return load(codes + d) * scale(at); }
    INLINE vf up_to(int64_t d, int64_t at, int64_t left) const {
        return left >= W ? whole(d, at) : end(d, at, left);
    }
    RARELY vf end(int64_t d, int64_t at, int64_t left) const {
        // No scale past those of the row: it could be NaN.
        return load_partial(codes + d, left) * (left <= SPAN ? splat(scales[at]) : scale(at));
    }
    INLINE void announce(int64_t d, int64_t count) const {
        for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(codes + d + i, 0, 2);
    }
    static INLINE vi lower_half() {
        vi mask = {};
        UNROLL for (int i = 0; i < SPAN; ++i) mask[i] = -1;
        return mask;
    }
};

// Keys of a tile that lie in one block, one after the other.
struct Run {
    int64_t first, count;
    const uint16_t *k_scales, *v_scales;
};

// K and V rows of the keys of one tile, found first and read later: entries [skip, count) of the tile.
template <class Row>
struct KeyRows {
    Row keys[KEY_TILE], values[KEY_TILE];
    int64_t skip, count;
    Run runs[KEY_TILE];
    int64_t num_runs;
    float* scales;  // [2][KEY_TILE][groups], of K and of V; only for a CodedRow

    // Of sequence b, kv head `head`: those of [begin, end) in the tile at `start`. The other entries repeat
    // one of these, so that they can be read with them.
    void find(const AttentionArgs& a, int64_t b, int64_t head, int64_t start, int64_t begin,
              int64_t end) {
        const Cache& c = a.cache;
        const int32_t* table = a.tables + b * a.table_stride;
        const int64_t sink_blocks = a.bases ? a.sink_blocks[b] : 0, base = a.bases ? a.bases[b] : 0;
        skip = std::max<int64_t>(0, begin - start);
        count = std::min<int64_t>(KEY_TILE, end - start);
        num_runs = 0;
        for (int64_t j = skip; j < count;) {
            const int64_t page = (start + j) / c.block_size, offset = (start + j) % c.block_size;
            const int64_t block = table[page < sink_blocks ? page : page - base];
            const int64_t run = std::min(c.block_size - offset, count - j);
            place(c, block, head * c.block_size + offset, j, run);
            j += run;
        }
        if (is_empty()) return;
        std::fill_n(keys, skip, keys[skip]);
        std::fill_n(values, skip, values[skip]);
        std::fill(keys + count, keys + KEY_TILE, keys[skip]);
        std::fill(values + count, values + KEY_TILE, values[skip]);
    }
    bool is_empty() const { return skip >= count; }
    void clear() { skip = count = 0; }
    // Before a row is read.
    void prepare(const Cache& c) {
        if constexpr (is_coded) {
            const int64_t groups = c.groups();
            for (const Run* run = runs; run < runs + num_runs; ++run) {
                float *k = scales + run->first * groups, *v = k + KEY_TILE * groups;
                widen_scales<typename Row::Element>(run->k_scales, k, run->count * groups);
                widen_scales<typename Row::Element>(run->v_scales, v, run->count * groups);
            }
        }
    }
    // Scales that `count` tiles of this cache need.
    static int64_t room(const Cache& c, int64_t count) {
        return is_coded ? count * 2 * KEY_TILE * c.groups() + 1 : 0;
    }

   private:
    static constexpr bool is_coded = sizeof(typename Row::Element) == 1;

    void place(const Cache& c, int64_t block, int64_t at, int64_t j, int64_t count) {
        using C = typename Row::Element;
        const C *key = c.k.row<C>(block, c.num_blocks, at * c.dim),
                *value = c.v.row<C>(block, c.num_blocks, at * c.dim);
        if constexpr (is_coded) {
            const int64_t groups = c.groups(), shift = groups == 1 ? 62 : __builtin_ctzll(c.group);
            const Run run = {j, count, c.k.row_scales(block, c.num_blocks, at * groups),
                             c.v.row_scales(block, c.num_blocks, at * groups)};
            runs[num_runs++] = run;
            for (int64_t i = 0; i < count * groups; i += 32) {
                __builtin_prefetch(run.k_scales + i, 0, 2);
                __builtin_prefetch(run.v_scales + i, 0, 2);
            }
            float *k = scales + j * groups, *v = k + KEY_TILE * groups;
            for (int64_t i = 0; i < count; ++i) {
                keys[j + i] = {key + i * c.dim, k + i * groups, shift};
                values[j + i] = {value + i * c.dim, v + i * groups, shift};
            }
        } else {
            for (int64_t i = 0; i < count; ++i) {
                keys[j + i] = {key + i * c.dim};
                values[j + i] = {value + i * c.dim};
            }
        }
    }
};

// Call body(row) with the kind of row that the cache holds.
template <class T, class Body>
INLINE void with_rows(const Cache& c, Body&& body) {
    const auto coded = [&](auto code) {
        using C = decltype(code);
        if constexpr (W > 8)
            if (c.groups() > 1 && c.group == W / 2) return body(CodedRow<C, W / 2>{});
        body(CodedRow<C, W>{});
    };
    if (c.format == 0)
        body(PlainRow<T>{});
    else if (c.format == 1)
        coded(int8{});
    else
        coded(fp8{});
}
