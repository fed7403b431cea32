// The order of summation of attention, one for decode and prefill, and the steps that keep it.
//
// The score of a query and a key is the sum of four chains of fused multiply-adds, one after the other:
// chain i takes the head dimensions i, i + 4, i + 8 and so on. (One chain suits prefill, where a vector is of many
// keys; as many as a vector has lanes suit decode, which reads the dimensions of one key. Four cost
// neither much.)
// Keys are taken in tiles of 64 that stand at multiples of 64 of the context: an online softmax step a
// tile, whose weights are summed by lanes, and whose values are added one key after the other. Every
// 256 positions a piece ends; a row's pieces are merged in ascending order. The sinks of a rolled
// context are a piece of their own, the first. A key that a row does not see weighs 0, which changes no
// sum. So a row has the same bits as a decode row and in a chunk of any length, whatever the batch, the
// blocks and the threads. What could be compiled in two ways is compiled once (functions that are not
// inlined), or says each fused multiply-add outright.
// Queries in bf16 over int8 codes have scores and values by integers (code_tiles.h), and the rest as here.

#pragma once

#include "attention/attention.h"
#include "products.h"

constexpr int CHAINS = 4;   // of a score
constexpr int SPLIT = 256;  // positions of a piece; a multiple of KEY_TILE
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// to[d][i] = keys[i][d] for W keys, zeros past `dim`; `ld` floats from one dimension to the next.
template <class Row>
INLINE void transpose_keys(const Row* keys, int64_t dim, int64_t padded, float* to, int64_t ld) {
    for (int64_t d = 0; d < padded; d += W) {
        const int64_t at = keys[0].place(d);
        vf square[W];
        UNROLL for (int i = 0; i < W; ++i) square[i] = keys[i].up_to(d, at, dim - d);
        transpose(square);
        UNROLL for (int i = 0; i < W; ++i) store(to + (d + i) * ld, square[i]);
    }
}

// scores[R][N W] = queries[R][dim] . keys[dim][N W]. The registers hold the sums of one chain at a time.
template <int R, int N>
INLINE void score_rows(const float* queries, int64_t ldq, const float* keys, int64_t ldk, int64_t dim,
                       float* scores) {
    for (int chain = 0; chain < CHAINS; ++chain) {
        vf acc[R][N] = {};
        for (int64_t d = chain; d < dim; d += CHAINS) {
            vf column[N];
            UNROLL for (int n = 0; n < N; ++n) column[n] = load(keys + d * ldk + n * W);
            UNROLL for (int r = 0; r < R; ++r) {
                const float value = queries[r * ldq + d];
                UNROLL for (int n = 0; n < N; ++n)
                    acc[r][n] = multiply_add(value, column[n], acc[r][n]);
            }
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n) {
                float* to = scores + r * KEY_TILE + n * W;
                store(to, chain ? load(to) + acc[r][n] : acc[r][n]);
            }
    }
}

// The same for any number of rows and columns, of which there is a multiple of W.
inline __attribute__((noinline)) void score_tile(const float* queries, int64_t ldq, const float* keys,
                                                 int64_t ldk, int64_t rows, int64_t dim,
                                                 int64_t columns, float* scores) {
    const int tile = rows_per_tile(rows);
    for (int64_t column = 0; column < columns; column += 2 * W)
        for (int64_t row = 0; row < rows; row += tile)
            with_constant<MAX_ROWS>((int)std::min<int64_t>(tile, rows - row), [&](auto count) {
                constexpr int R = count.value;
                const float *q = queries + row * ldq, *k = keys + column;
                float* to = scores + row * KEY_TILE + column;
                if (columns - column > W) score_rows<R, 2>(q, ldq, k, ldk, dim, to);
                else score_rows<R, 1>(q, ldq, k, ldk, dim, to);
            });
}

// The state of an online softmax of `rows` queries: unnormalised sums [rows][padded], the largest score
// and the sum of weights of each.
struct Partial {
    float *out, *top, *total;
    static int64_t size(int64_t rows, int64_t padded) { return rows * (padded + 2); }
    Partial(float* at, int64_t rows, int64_t padded)
        : out(at), top(at + rows * padded), total(at + rows * (padded + 1)) {}

    // Without the first `rows`.
    Partial after(int64_t rows, int64_t padded) const {
        Partial rest = *this;
        rest.out += rows * padded, rest.top += rows, rest.total += rows;
        return rest;
    }
    void clear(int64_t rows, int64_t padded) const {
        std::fill_n(out, rows * padded, 0.0f);
        std::fill_n(top, rows, HIDDEN);
        std::fill_n(total, rows, 0.0f);
    }
};

// cap * tanh(score / cap), in place. The soft cap of scores that are scaled later is that much larger.
inline __attribute__((noinline)) void cap_scores(float* scores, int64_t width, float cap) {
    for (int64_t j = 0; j < width; j += W)
        store(scores + j, vtanh(load(scores + j) / cap) * cap);
}

struct Range {  // of positions
    int64_t begin, end;
};

// Rows of scores [R][KEY_TILE], `width` of each, which are hidden already: the same step, side by side, so
// that none waits for the sums of another.
template <int R>
INLINE void soften_side_by_side(float* scores, int64_t width, float scale, float* top, float* total,
                                float* keep) {
    vf best[R], sums[R] = {}, shift[R];
    UNROLL for (int r = 0; r < R; ++r) best[r] = splat(HIDDEN);
    for (int64_t j = 0; j < width; j += W)
        UNROLL for (int r = 0; r < R; ++r) best[r] = vmax(load(scores + r * KEY_TILE + j), best[r]);
    UNROLL for (int r = 0; r < R; ++r) {
        const float before = top[r], now = std::max(before, max_lanes(best[r]) * scale);
        // With nothing seen so far, weights are exp(-inf); `keep` is of no account.
        const float last = now == HIDDEN ? 0.0f : now;
        keep[r] = vexp(splat(before - last))[0];  // exactly 1 of 0, without a jump that nothing foretells
        shift[r] = splat(-last);
        top[r] = now;
    }
    for (int64_t j = 0; j < width; j += W)
        UNROLL for (int r = 0; r < R; ++r) {
            float* at = scores + r * KEY_TILE + j;
            const vf weight = vexp(multiply_add(scale, load(at), shift[r]));
            store(at, weight);
            sums[r] += weight;
        }
    UNROLL for (int r = 0; r < R; ++r) total[r] = std::fma(total[r], keep[r], sum_lanes(sums[r]));
}

// One step of the online softmax on scores [rows][KEY_TILE] before they are scaled, of which `width` are
// there. Each `group` rows see the positions in one of `seen`; the first entry is that of position `tile`,
// and what is not seen counts as -inf. `keep`: the factors for what was accumulated before. `cap`: soft
// cap of the scores, or 0.
inline __attribute__((noinline)) void soften_rows(float* scores, int64_t rows, int64_t group,
                                                  const Range* seen, int64_t tile, int64_t width,
                                                  float scale, float cap, const Partial& piece,
                                                  float* keep) {
    float* at = scores;
    for (int64_t r = 0; r < rows; ++r, at += KEY_TILE) {
        const Range& sees = seen[r / group];
        const int64_t begin = std::clamp<int64_t>(sees.begin - tile, 0, width);
        const int64_t end = std::clamp<int64_t>(sees.end - tile, 0, width);
        if (cap) cap_scores(at, width, cap);
        for (int64_t j = 0; j < begin; ++j) at[j] = HIDDEN;
        for (int64_t j = end; j < width; ++j) at[j] = HIDDEN;
    }
    constexpr int64_t SIDE_BY_SIDE = 3;
    for (int64_t r = 0; r < rows; r += SIDE_BY_SIDE)
        with_constant<SIDE_BY_SIDE>((int)std::min(SIDE_BY_SIDE, rows - r), [&](auto count) {
            soften_side_by_side<count.value>(scores + r * KEY_TILE, width, scale, piece.top + r,
                                             piece.total + r, keep + r);
        });
}

// Adds to the pieces of `rows` queries, merged so far, the next one.
inline __attribute__((noinline)) void merge(const Partial& all, const Partial& next, int64_t rows,
                                            int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) {
        if (next.top[r] == HIDDEN) continue;
        const float before = all.top[r], now = std::max(before, next.top[r]);
        const float keep = before == now ? 1.0f : std::exp(before - now);
        const float weight = next.top[r] == now ? 1.0f : std::exp(next.top[r] - now);
        all.top[r] = now;
        all.total[r] = all.total[r] * keep + next.total[r] * weight;
        float* out = all.out + r * padded;
        const float* more = next.out + r * padded;
        for (int64_t d = 0; d < padded; d += W)
            store(out + d, load(out + d) * keep + load(more + d) * weight);
    }
}

template <class T>
INLINE void widen(const T* from, float* to, int64_t count, int64_t padded) {
    for (int64_t d = 0; d < count; d += W) store(to + d, load_up_to(from + d, count - d));
    for (int64_t d = (count + W - 1) / W * W; d < padded; ++d) to[d] = 0;
}
// The factor that makes weights of a row's sums; 0 of a row that saw no key. `sink`: one more score, or
// null.
inline __attribute__((noinline)) float norm_of(float top, float total, const float* sink) {
    if (top == HIDDEN) return 0.0f;
    if (!sink) return 1.0f / total;
    const float now = std::max(top, *sink), keep = std::exp(top - now);
    return keep / (total * keep + std::exp(*sink - now));
}
template <class T>
INLINE void finish(const Partial& done, int64_t row, int64_t padded, const float* sink, T* to,
                   int64_t dim) {
    const float norm = norm_of(done.top[row], done.total[row], sink);
    for (int64_t d = 0; d < dim; d += W)
        store_up_to(to + d, load(done.out + row * padded + d) * norm, dim - d);
}
