// What decode and prefill share: their arguments, the way from a position to its row in the blocks of
// a paged KV cache, one step of the online softmax; and the write.
//
// A row of queries has one order of summation: over the head dimension by lanes, over keys by tiles of
// 64 that stand at absolute positions of the context; decode cuts longer contexts every 256 positions
// and merges the pieces in order. Where a context is rolled, its sinks come first, as tiles and as a
// piece of their own. Batch, chunking and threads change nothing.

#pragma once

#include "cpu_vectors.h"

constexpr int KEY_TILE = 64;  // keys that share one softmax step
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Blocks with ids from `first_id` on lie here, not in the cache. Laid out as those of the cache.
struct Scratch {
    int64_t first_id;
    void *k, *v;
    int64_t k_block_stride, v_block_stride;
};

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
    // All null: no sequence is rolled.
    const void* q_sink;  // the queries of keys before their sink end
    int64_t q_sink_stride;
    const int32_t *sink_ends, *window_starts;  // a query row
    const int32_t *sink_blocks, *bases;        // a sequence
    Scratch scratch;
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
    Scratch scratch;
};

template <class T>
void write_kv(const WriteArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.kv_heads * a.dim > GRAIN)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t slot = a.slots[t];
        if (slot < 0) continue;
        const int64_t block = slot / a.block_size, offset = slot % a.block_size;
        const int64_t apart = block - a.scratch.first_id;
        T* keys = apart < 0 ? (T*)a.k_cache + block * a.k_block_stride
                            : (T*)a.scratch.k + apart * a.scratch.k_block_stride;
        T* values = apart < 0 ? (T*)a.v_cache + block * a.v_block_stride
                              : (T*)a.scratch.v + apart * a.scratch.v_block_stride;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t at = (h * a.block_size + offset) * a.dim;
            std::memcpy(keys + at, (const T*)a.k + t * a.k_stride + h * a.dim, a.dim * sizeof(T));
            std::memcpy(values + at, (const T*)a.v + t * a.v_stride + h * a.dim, a.dim * sizeof(T));
        }
    }
}

// Addresses of the K and V rows of sequence b, kv head `head`, positions [start, start + count).
template <class T>
INLINE void find_rows(const AttentionArgs& a, int64_t b, int64_t head, int64_t start, int64_t count,
                      const T** keys, const T** values) {
    const int32_t* table = a.tables + b * a.table_stride;
    const int64_t sink_blocks = a.bases ? a.sink_blocks[b] : 0, base = a.bases ? a.bases[b] : 0;
    for (int64_t j = 0; j < count;) {
        const int64_t page = (start + j) / a.block_size, offset = (start + j) % a.block_size;
        const int64_t block = table[page < sink_blocks ? page : page - base];
        const int64_t apart = block - a.scratch.first_id;
        const int64_t at = (head * a.block_size + offset) * a.dim;
        const T *key = (const T*)a.k + block * a.k_block_stride + at,
                *value = (const T*)a.v + block * a.v_block_stride + at;
        if (apart >= 0) {
            key = (const T*)a.scratch.k + apart * a.scratch.k_block_stride + at;
            value = (const T*)a.scratch.v + apart * a.scratch.v_block_stride + at;
        }
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
