// The write of K and V into a paged cache, quantised where the cache is; alone, or with the rotary
// embedding in one pass.

#pragma once

#include "attention/attention.h"
#include "rowwise.h"

struct WriteArgs {
    int64_t dtype;
    const void* k;
    int64_t k_stride;
    const void* v;
    int64_t v_stride;
    Cache cache;
    const int64_t* slots;
    int64_t tokens, threads;
};
LAYOUT(WriteArgs,
       FIELD(dtype) FIELD(k) FIELD(k_stride) FIELD(v) FIELD(v_stride) CACHE_FIELDS(cache) FIELD(slots)
       FIELD(tokens) FIELD(threads))

struct RopeWriteArgs {
    WriteArgs write;  // whose k is rotated in place
    void* q;
    int64_t q_stride, heads;
    const float *cos, *sin;  // [tokens, half]
    int64_t half;
};
LAYOUT(RopeWriteArgs,
       FIELD(write.dtype) FIELD(write.k) FIELD(write.k_stride) FIELD(write.v) FIELD(write.v_stride)
       CACHE_FIELDS(write.cache) FIELD(write.slots) FIELD(write.tokens) FIELD(write.threads) FIELD(q)
       FIELD(q_stride) FIELD(heads) FIELD(cos) FIELD(sin) FIELD(half))

template <class T, class C>
INLINE void write_side(const Cache& c, const Side& side, int64_t slot, const T* rows) {
    const int64_t block = slot / c.block_size, offset = slot % c.block_size, groups = c.groups();
    for (int64_t h = 0; h < c.kv_heads; ++h) {
        const int64_t at = h * c.block_size + offset;
        C* to = side.row<C>(block, c.num_blocks, at * c.dim);
        if constexpr (sizeof(C) == 1)
            encode(rows + h * c.dim, c.dim, c.group, to,
                   side.row_scales(block, c.num_blocks, at * groups));
        else
            std::memcpy(to, rows + h * c.dim, c.dim * sizeof(C));
    }
}

// Token t of the call; a negative slot is skipped.
template <class T, class C>
INLINE void write_token(const WriteArgs& a, int64_t t) {
    if (a.slots[t] < 0) return;
    write_side<T, C>(a.cache, a.cache.k, a.slots[t], (const T*)a.k + t * a.k_stride);
    write_side<T, C>(a.cache, a.cache.v, a.slots[t], (const T*)a.v + t * a.v_stride);
}

// Call body(element) with what the cache is made of.
template <class T, class Body>
INLINE void with_element(const Cache& c, Body&& body) {
    if (c.format == 0)
        body(T{});
    else if (c.format == 1)
        body(int8{});
    else
        body(fp8{});
}

template <class T>
void write_kv(const WriteArgs& a) {
    const int64_t work = a.tokens * a.cache.kv_heads * a.cache.dim;
    with_element<T>(a.cache, [&](auto element) {
#pragma omp parallel for num_threads((int)a.threads) if (work > GRAIN)
        for (int64_t t = 0; t < a.tokens; ++t) write_token<T, decltype(element)>(a, t);
    });
}

template <class T>
void rope_write_kv(const RopeWriteArgs& r) {
    const WriteArgs& a = r.write;
    const int64_t kv_heads = a.cache.kv_heads, dim = a.cache.dim;
    with_element<T>(a.cache, [&](auto element) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * r.heads * dim > GRAIN)
        for (int64_t t = 0; t < a.tokens; ++t) {
            const float *cos = r.cos + t * r.half, *sin = r.sin + t * r.half;
            T *q = (T*)r.q + t * r.q_stride, *k = (T*)a.k + t * a.k_stride;
            rotate_heads(q, q, r.heads, dim, cos, sin, r.half);
            rotate_heads(k, k, kv_heads, dim, cos, sin, r.half);
            write_token<T, decltype(element)>(a, t);
        }
    });
}
