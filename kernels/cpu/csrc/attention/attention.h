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
    // log2 of `group`, or so much that a row is all one group.
    int64_t group_shift() const { return groups() == 1 ? 62 : __builtin_ctzll(group); }
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

// Head dimensions that share a scale, at least, or sums of integers are too short to pay.
constexpr int64_t LEAST_CODE_GROUP = 16;

// A row of int8 codes for integer instructions (code_tiles.h): the scales of a tile lie by group.
struct CodeRow {
    using Element = int8;
    const int8* codes;

    INLINE void announce(int64_t d, int64_t count) const {
        for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(codes + d + i, 0, 2);
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
    Row keys[KEY_TILE + 8], values[KEY_TILE + 8];  // eight are written at a time
    int64_t skip, count;
    Run runs[KEY_TILE];
    int64_t num_runs;
    // Of K and of V, only for codes: [2][KEY_TILE][groups]; of a CodeRow [2][groups][KEY_TILE], 0 outside
    // [skip, count).
    float* scales;

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
        int64_t page = (start + skip) / c.block_size, offset = start + skip - page * c.block_size;
        for (int64_t j = skip; j < count; ++page, offset = 0) {
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
            float *k = scales, *v = scales + KEY_TILE * groups;
            for (const Run* run = runs; run < runs + num_runs; ++run) {
                widen(run->k_scales, k, run->first, run->count, groups);
                widen(run->v_scales, v, run->first, run->count, groups);
            }
            if (by_group && count - skip < KEY_TILE)
                for (int64_t g = 0; g < 2 * groups; ++g) {
                    std::fill_n(scales + g * KEY_TILE, skip, 0.0f);
                    std::fill_n(scales + g * KEY_TILE + count, KEY_TILE - count, 0.0f);
                }
        }
    }
    const float* key_scales() const { return scales; }
    const float* value_scales(const Cache& c) const { return scales + KEY_TILE * c.groups(); }
    // Scales that `count` tiles of this cache need.
    static int64_t room(const Cache& c, int64_t count) {
        return is_coded ? count * 2 * KEY_TILE * c.groups() + 1 : 0;
    }

   private:
    // `count` rows of `dim` values from `first` on; up to seven more are overwritten later, or never read.
    template <class C>
    static INLINE void place_rows(const C* first, int64_t dim, int64_t count, Row* to) {
        typedef int64_t v8l __attribute__((vector_size(64)));
        static_assert(sizeof(Row) == sizeof(int64_t));
        const int64_t step = dim * sizeof(C);
        v8l at = (int64_t)first + (v8l){0, 1, 2, 3, 4, 5, 6, 7} * step;
        for (int64_t i = 0; i < count; i += 8, at += 8 * step) std::memcpy(to + i, &at, sizeof at);
    }
    static constexpr bool is_coded = sizeof(typename Row::Element) == 1;
    static constexpr bool by_group = std::is_same_v<Row, CodeRow>;

    static void widen(const uint16_t* from, float* to, int64_t first, int64_t count, int64_t groups) {
        using C = typename Row::Element;
        if constexpr (by_group) widen_by_group(from, to + first, count, groups, KEY_TILE);
        else widen_scales<C>(from, to + first * groups, count * groups);
    }

    void place(const Cache& c, int64_t block, int64_t at, int64_t j, int64_t count) {
        using C = typename Row::Element;
        const C *key = c.k.row<C>(block, c.num_blocks, at * c.dim),
                *value = c.v.row<C>(block, c.num_blocks, at * c.dim);
        if constexpr (is_coded) {
            const int64_t groups = c.groups(), shift = c.group_shift();
            const Run run = {j, count, c.k.row_scales(block, c.num_blocks, at * groups),
                             c.v.row_scales(block, c.num_blocks, at * groups)};
            runs[num_runs++] = run;
            for (int64_t i = 0; i < count * groups; i += 32) {
                __builtin_prefetch(run.k_scales + i, 0, 2);
                __builtin_prefetch(run.v_scales + i, 0, 2);
            }
            if constexpr (!by_group) {
                float *k = scales + j * groups, *v = k + KEY_TILE * groups;
                for (int64_t i = 0; i < count; ++i) {
                    keys[j + i] = {key + i * c.dim, k + i * groups, shift};
                    values[j + i] = {value + i * c.dim, v + i * groups, shift};
                }
                return;
            }
        }
        if constexpr (!is_coded || by_group) {
            place_rows(key, c.dim, count, keys + j);
            place_rows(value, c.dim, count, values + j);
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
    if (c.format == 0) return body(PlainRow<T>{});
    if (c.format == 2) return coded(fp8{});
    if constexpr (sizeof(T) == 2)
        if (c.groups() == 1 || c.group >= LEAST_CODE_GROUP) return body(CodeRow{});
    coded(int8{});
}
