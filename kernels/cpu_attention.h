// Attention straight over the blocks of a paged KV cache: write, decode, prefill.
//
// A row of queries has one order of summation: over the head dimension by lanes, over keys by tiles of
// 64 that stand at absolute positions of the context; decode cuts longer contexts every 256 positions
// and merges the pieces in order. Batch, chunking and threads change nothing.

#pragma once

#include "cpu_vectors.h"

constexpr int KEY_TILE = 64;      // keys that share one softmax step
constexpr int SPLIT = 256;        // keys of one decode split; a multiple of KEY_TILE
constexpr int ROW_TILE = 72;      // (query, head) rows of one prefill item, about
constexpr int MAX_HEADS = 8;      // query heads that decode handles together
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

struct AttentionArgs {
    int64_t dtype;
    const void* q;
    int64_t q_stride;
    const void *k, *v;
    int64_t k_block_stride, v_block_stride, block_size, dim;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t *starts, *lens;  // starts: prefill only
    void* out;
    int64_t batch, heads, kv_heads;
    double scale;
    int64_t window, threads;  // window 0: all that went before
};

struct WriteArgs {
    int64_t dtype;
    const void* k;
    int64_t k_stride;
    const void* v;
    int64_t v_stride;
    void *k_cache, *v_cache;
    int64_t k_block_stride, v_block_stride, block_size, dim;
    const int64_t* slots;
    int64_t tokens, kv_heads, threads;
};

template <class T>
void write_kv(const WriteArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.kv_heads * a.dim > GRAIN)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t slot = a.slots[t];
        if (slot < 0) continue;
        const int64_t block = slot / a.block_size, offset = slot % a.block_size;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t at = (h * a.block_size + offset) * a.dim;
            std::memcpy((T*)a.k_cache + block * a.k_block_stride + at,
                        (const T*)a.k + t * a.k_stride + h * a.dim, a.dim * sizeof(T));
            std::memcpy((T*)a.v_cache + block * a.v_block_stride + at,
                        (const T*)a.v + t * a.v_stride + h * a.dim, a.dim * sizeof(T));
        }
    }
}

// Addresses of the K and V rows of sequence b, kv head `head`, positions [start, start + count).
template <class T>
INLINE void find_rows(const AttentionArgs& a, int64_t b, int64_t head, int64_t start, int64_t count,
                      const T** keys, const T** values) {
    const int32_t* table = a.tables + b * a.table_stride;
    for (int64_t j = 0; j < count;) {
        const int64_t block = table[(start + j) / a.block_size];
        const int64_t offset = (start + j) % a.block_size;
        const int64_t at = (head * a.block_size + offset) * a.dim;
        const T* key = (const T*)a.k + block * a.k_block_stride + at;
        const T* value = (const T*)a.v + block * a.v_block_stride + at;
        const int64_t run = std::min(a.block_size - offset, count - j);
        for (int64_t i = 0; i < run; ++i) {
            keys[j + i] = key + i * a.dim;
            values[j + i] = value + i * a.dim;
        }
        j += run;
    }
}

// One step of the online softmax on a row of scores. Entries outside [begin, end) count as -inf.
// Returns the factor for what was accumulated before.
INLINE float soften(float* scores, int64_t width, int64_t begin, int64_t end, float scale,
                    float& top, float& total) {
    for (int64_t j = 0; j < begin; ++j) scores[j] = HIDDEN;
    for (int64_t j = end; j < width; ++j) scores[j] = HIDDEN;
    vf best = splat(HIDDEN);
    for (int64_t j = 0; j < width; j += W) {
        const vf scaled = load(scores + j) * scale;
        store(scores + j, scaled);
        best = vmax(scaled, best);
    }
    const float new_top = std::max(top, max_lanes(best));
    if (new_top == HIDDEN) {  // nothing seen so far
        std::memset(scores, 0, width * sizeof(float));
        return 1.0f;
    }
    const float keep = std::exp(top - new_top);
    vf sums = {};
    for (int64_t j = 0; j < width; j += W) {
        const vf weight = vexp(load(scores + j) - new_top);
        store(scores + j, weight);
        sums += weight;
    }
    top = new_top;
    total = total * keep + sum_lanes(sums);
    return keep;
}

template <class T>
INLINE void widen(const T* from, float* to, int64_t count, int64_t padded) {
    for (int64_t d = 0; d < count; d += W) store(to + d, load_up_to(from + d, count - d));
    for (int64_t d = (count + W - 1) / W * W; d < padded; ++d) to[d] = 0;
}
template <class T>
INLINE void narrow(const float* from, float scale, T* to, int64_t count) {
    for (int64_t d = 0; d < count; d += W)
        store_up_to(to + d, load(from + d) * scale, count - d);
}

// ---- decode --------------------------------------------------------------------------------------

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
};

// Fills `splits`; returns the number of (key, query head) pairs, the work.
INLINE int64_t cut_contexts(const AttentionArgs& a, std::vector<Split>& splits) {
    int64_t pairs = 0;
    splits.clear();
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t len = a.lens[b], begin = a.window ? std::max<int64_t>(0, len - a.window) : 0;
        const int64_t first = begin / SPLIT, last = len > 0 ? (len - 1) / SPLIT : first;
        for (int64_t s = first; s <= last; ++s)
            splits.push_back({b, std::max(begin, s * SPLIT), std::min(len, (s + 1) * SPLIT),
                              s - first, last - first + 1});
        pairs += std::max<int64_t>(len - begin, 0) * a.heads;
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
            const T* rows = (const T*)a.q + split.b * a.q_stride + head * group * dim;
            for (int64_t g = 0; g < group; ++g)
                take_query(rows + g * dim, &queries[g * ldq], dim, ldq);
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
                    const float weight = std::exp(piece(s).top[g] - best);
                    const float* from = piece(s).out + g * padded;
                    total += weight * piece(s).total[g];
                    for (int64_t d = 0; d < padded; d += W)
                        store(&merged[d], load(&merged[d]) + weight * load(from + d));
                }
                const float norm = split.end > split.begin ? 1.0f / total : 0.0f;
                const int64_t head = (item % a.kv_heads) * group + g;
                narrow(merged.data(), norm, (T*)a.out + (split.b * a.heads + head) * dim, dim);
            }
        }
    }
}

// ---- prefill -------------------------------------------------------------------------------------

struct Workspace {  // one thread's tiles, all fp32
    std::vector<float> queries, keys, values, scores, out, top, total, keep;
    Workspace(int64_t rows, int64_t padded)
        : queries(rows * padded), keys(padded * KEY_TILE), values(KEY_TILE * padded),
          scores(rows * KEY_TILE), out(rows * padded), top(rows), total(rows), keep(rows) {}
};

// K of one tile transposed to [dim][KEY_TILE], V as [KEY_TILE][padded]; zeros past `count`.
template <class T>
INLINE void load_tile(const T** keys, const T** values, int64_t count, int64_t dim, int64_t padded,
                      Workspace& ws) {
    for (int64_t j = 0; j < count; j += W)
        for (int64_t d = 0; d < padded; d += W) {
            vf square[W];
            UNROLL for (int i = 0; i < W; ++i)
                square[i] = j + i < count ? load_up_to(keys[j + i] + d, dim - d) : vf{};
            transpose(square);
            UNROLL for (int i = 0; i < W; ++i) store(&ws.keys[(d + i) * KEY_TILE + j], square[i]);
        }
    for (int64_t j = 0; j < count; ++j) widen(values[j], &ws.values[j * padded], dim, padded);
}

// Queries [first, last) of sequence b, all query heads of one kv head. Query i stands at absolute
// position `offset + i`; its row in the flat batch is `row0 + i`.
template <class T>
void prefill_item(const AttentionArgs& a, int64_t b, int64_t head, int64_t row0, int64_t offset,
                  int64_t first, int64_t last, Workspace& ws) {
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, padded = (dim + W - 1) / W * W;
    const int64_t rows = (last - first) * group;
    const T *keys[KEY_TILE], *values[KEY_TILE];
    const T* q = (const T*)a.q + row0 * a.q_stride + head * group * dim;
    for (int64_t r = 0; r < rows; ++r)
        widen(q + (first + r / group) * a.q_stride + r % group * dim, &ws.queries[r * padded], dim,
              padded);
    std::fill_n(ws.out.begin(), rows * padded, 0.0f);
    std::fill_n(ws.top.begin(), rows, HIDDEN);
    std::fill_n(ws.total.begin(), rows, 0.0f);
    const int64_t oldest = a.window ? std::max<int64_t>(0, offset + first - a.window + 1) : 0;
    const int64_t end = offset + last;  // the last query sees itself
    for (int64_t tile = oldest / KEY_TILE * KEY_TILE; tile < end; tile += KEY_TILE) {
        // Keys before `oldest` may be gone: their block may serve another sequence by now.
        const int64_t skip = std::max<int64_t>(0, oldest - tile);
        const int64_t count = std::min(end - tile, (int64_t)KEY_TILE);
        find_rows(a, b, head, tile + skip, count - skip, keys + skip, values + skip);
        std::fill_n(keys, skip, keys[skip]);
        std::fill_n(values, skip, values[skip]);
        load_tile(keys, values, count, dim, padded, ws);
        const int64_t width = (count + W - 1) / W * W;
        multiply_tile(ws.queries.data(), padded, ws.keys.data(), KEY_TILE, rows, dim, width, nullptr,
                      ws.scores.data(), KEY_TILE);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = offset + first + r / group - tile;  // relative to the tile
            const int64_t begin = a.window ? std::clamp<int64_t>(at - a.window + 1, 0, width) : 0;
            ws.keep[r] = soften(&ws.scores[r * KEY_TILE], width, begin,
                                std::clamp<int64_t>(at + 1, 0, width), (float)a.scale, ws.top[r],
                                ws.total[r]);
        }
        multiply_tile(ws.scores.data(), KEY_TILE, ws.values.data(), padded, rows, count, padded,
                      ws.keep.data(), ws.out.data(), padded);
    }
    T* out = (T*)a.out + (row0 * a.heads + head * group) * dim;
    for (int64_t r = 0; r < rows; ++r)
        narrow(&ws.out[r * padded], 1.0f / ws.total[r],
               out + ((first + r / group) * a.heads + r % group) * dim, dim);
}

template <class T>
void prefill(const AttentionArgs& a) {
    struct Item {
        int64_t b, first, last;
    };
    const int64_t group = a.heads / a.kv_heads, padded = (a.dim + W - 1) / W * W;
    const int64_t tile = std::max<int64_t>(1, ROW_TILE / group);
    std::vector<Item> items;
    for (int64_t b = 0; b < a.batch; ++b)  // the longest contexts of a chunk first
        for (int64_t last = a.starts[b + 1] - a.starts[b]; last > 0; last -= tile)
            items.push_back({b, std::max<int64_t>(0, last - tile), last});
    const int64_t count = (int64_t)items.size() * a.kv_heads;
#pragma omp parallel num_threads((int)a.threads) if (count > 1)
    {
        Workspace ws(tile * group, padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[i / a.kv_heads];
            const int64_t offset = a.lens[item.b] - (a.starts[item.b + 1] - a.starts[item.b]);
            prefill_item<T>(a, item.b, i % a.kv_heads, a.starts[item.b], offset, item.first,
                            item.last, ws);
        }
    }
}
