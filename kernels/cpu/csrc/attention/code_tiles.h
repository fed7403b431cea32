// Attention over int8 keys and values by integer instructions, for queries in bf16.
//
// A query is rounded to 16 bits, with one scale. The weights of a tile of keys, times the scales of their
// values, are rounded to 15 bits, with one scale: the largest of these products, so that a tile of small
// weights is as exact as one of large ones. Either rounds a hundred times as finely as the codes.
// A score is the exact sum over the head dimensions that share a scale of the key (CHUNK at most), scaled,
// then added in fp32 in ascending order; a value is the exact sum over the keys of a tile. So decode and
// prefill have the same bits, by any number of queries at a time. Queries in fp32 go by order.h alone.
//
// Few rows multiply what they read while it lies in registers, so that reading and multiplying overlap
// (decode). What more rows there are take it from memory, in order of use.

#pragma once

#include "attention/coded_queries.h"

constexpr int64_t TILE_QUADS = KEY_TILE / 4;
// Rows and vectors whose sums the registers hold.
constexpr int ROWS_AT_ONCE = 3, VECTORS_AT_ONCE = W == 16 ? 4 : 2;

// A tile of keys and values in order of use, and what is made of the weights of its rows. Of one thread.
class CodeTile {
    const int64_t dim, padded, groups, group;
    std::vector<int32_t> memory, numbers;  // numbers: [rows][groups][2 TILE_QUADS]
    std::vector<float> factors, sizes;     // [rows][groups], up to whole vectors
    int32_t *keys, *values;  // [padded / 4][KEY_TILE] and [TILE_QUADS][padded] times four codes, opened

   public:
    CodeTile(const Cache& c, int64_t rows, int64_t padded)
        : dim(c.dim), padded(padded), groups(c.groups()), group(groups == 1 ? padded : c.group),
          memory(2 * OPENED * padded * TILE_QUADS + 16), numbers(rows * groups * 2 * TILE_QUADS),
          factors(rows * groups + W), sizes(rows * groups + W) {
        keys = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64 / 4;
        values = keys + OPENED * padded * TILE_QUADS;
    }

    // scores[rows][KEY_TILE] of the rows of `q` from `first` on. `ahead`: keys that are needed soon, or null.
    void read_and_score(const CodedQueries& q, int64_t first, int64_t rows,
                        const KeyRows<CodeRow>& tile, const CodeRow* ahead, float* scores) {
        int64_t done = 0;
        if (dim % CHUNK == 0) {
            done = rows_per_tile(rows, ROWS_AT_ONCE);
            if (!ahead) ahead = tile.keys;
            with_constant<ROWS_AT_ONCE>((int)done, [&](auto count) {
                with_size<LEAST_CODE_GROUP / 4, W>(q.part / 4, [&](auto quads) {
                    score_as_read<count.value, quads.value>(q, first, tile, ahead, done < rows, scores);
                });
            });
        } else {
            load_keys(tile);
        }
        if (done < rows) score(q, first + done, rows - done, tile, scores + done * KEY_TILE);
    }

    // out[rows][padded] = out * keep[row] + weights[row] . values; weights [rows][KEY_TILE] are 0 for keys
    // that are not in the tile. `ahead`: as above, of values.
    void read_and_add(const float* weights, int64_t rows, const KeyRows<CodeRow>& tile,
                      const float* scales, const CodeRow* ahead, const float* keep, float* out) {
        take_weights(weights, rows, scales, tile.skip / W, (tile.count + W - 1) / W);
        int64_t done = 0;
        if (dim % CHUNK == 0) {
            done = rows_per_tile(rows, ROWS_AS_READ);
            if (!ahead) ahead = tile.values;
            with_constant<ROWS_AS_READ>((int)done, [&](auto count) {
                with_size<LEAST_CODE_GROUP / W, 4>(std::min(group, CHUNK) / W, [&](auto vectors) {
                    add_as_read<count.value, vectors.value>(tile, ahead, done < rows, keep, out);
                });
            });
        } else {
            load_values(tile);
        }
        if (done < rows) add_rows(done, rows, tile, keep, out);
    }

    // A tile's codes to memory, in order of use; then what follows has the results of the two above.
    __attribute__((noinline)) void load_keys(const KeyRows<CodeRow>& tile) {
        for (int64_t j = tile.skip / W * W; j < tile.count; j += W)
            for (int64_t d = 0; d < dim; d += CHUNK) {
                vf rows[W];
                load_rows<W>(tile.keys + j, d, dim - d, rows);
                transpose(rows);
                const int64_t count = std::min<int64_t>(W, (padded - d) / 4);
                for (int64_t i = 0; i < count; ++i)
                    store(key_codes(d / 4 + i, j), open_codes<true>((vi)rows[i]));
            }
    }
    __attribute__((noinline)) void load_values(const KeyRows<CodeRow>& tile) {
        for (int64_t quad = tile.skip / 4; quad * 4 < tile.count; ++quad)
            for (int64_t d = 0; d < dim; d += CHUNK) {
                vf rows[4];
                load_rows<4>(tile.values + 4 * quad, d, dim - d, rows);
                interleave_bytes(rows);
                const int64_t count = std::min<int64_t>(4, (padded - d) / W);
                for (int64_t i = 0; i < count; ++i)
                    store(value_codes(quad, d + i * W), open_codes<false>((vi)rows[i]));
            }
    }
    __attribute__((noinline)) void score(const CodedQueries& q, int64_t first, int64_t rows,
                                         const KeyRows<CodeRow>& tile, float* scores) const {
        const float* scales = tile.key_scales();
        const int64_t begin = tile.skip / W * W, end = (tile.count + W - 1) / W * W;
        each_row_tile(0, rows, [&](auto count, int64_t row) {
            each_vector(begin, end, [&](auto vectors, int64_t column) {
                score_vectors<count.value, vectors.value>(q, first + row, scales + column, column,
                                                          scores + row * KEY_TILE + column);
            });
        });
    }
    void add_values(const float* weights, int64_t rows, const KeyRows<CodeRow>& tile,
                    const float* scales, const float* keep, float* out) {
        take_weights(weights, rows, scales, tile.skip / W, (tile.count + W - 1) / W);
        add_rows(0, rows, tile, keep, out);
    }

   private:
    // Rows of `read_and_add`: with their sums of CHUNK dimensions.
    static constexpr int ROWS_AS_READ = W == 16 ? 3 : 2;

    INLINE int32_t* key_codes(int64_t quad, int64_t key) const {
        return keys + (quad * KEY_TILE + key) * OPENED;
    }
    INLINE int32_t* value_codes(int64_t quad, int64_t d) const {
        return values + (quad * padded + d) * OPENED;
    }
    INLINE const int32_t* numbers_of(int64_t row, int64_t g) const {
        return &numbers[(row * groups + g) * 2 * TILE_QUADS];
    }

    static RARELY vi load_end(const int8* from, int64_t left) {
        int8 codes[CHUNK] = {};
        std::memcpy(codes, from, left);
        return load_bits(codes);
    }
    // COUNT rows of codes from dimension `d` on.
    template <int COUNT>
    static INLINE void load_rows(const CodeRow* from, int64_t d, int64_t left, vf* rows) {
        if (left >= CHUNK)
            UNROLL for (int i = 0; i < COUNT; ++i) rows[i] = (vf)load_bits(from[i].codes + d);
        else
            UNROLL for (int i = 0; i < COUNT; ++i) rows[i] = (vf)load_end(from[i].codes + d, left);
    }

    template <class Body>
    static INLINE void each_row_tile(int64_t first, int64_t last, Body&& body) {
        const int tile = rows_per_tile(last - first, ROWS_AT_ONCE);
        for (int64_t row = first; row < last; row += tile)
            with_constant<ROWS_AT_ONCE>((int)std::min<int64_t>(tile, last - row),
                                        [&](auto count) { body(count, row); });
    }
    template <int N = VECTORS_AT_ONCE, class Body>
    static INLINE void each_vector(int64_t begin, int64_t end, Body&& body) {
        for (; begin + N * W <= end; begin += N * W) body(std::integral_constant<int, N>{}, begin);
        if constexpr (N > 1)
            if (begin < end) each_vector<N / 2>(begin, end, body);
    }
    // Call body(std::integral_constant<int, n>) for n = `size`, a power of 2 from MIN to MAX.
    template <int MIN, int MAX, class Body>
    static INLINE void with_size(int64_t size, Body&& body) {
        if constexpr (MAX > MIN)
            if (size < MAX) return with_size<MIN, MAX / 2>(size, body);
        body(std::integral_constant<int, MAX>{});
    }

    // What part `p` of the dimensions adds to a score. `scales`: of the keys, [groups][KEY_TILE].
    static INLINE vf add_part(const CodedQueries& q, int64_t row, int64_t p, const Sums& sums,
                              const float* scales, vf total) {
        const vi sum = sums.total() - q.extra[row * q.quads / 2 + p];
        const vf scale = load(scales + (p * q.part >> q.shift) * KEY_TILE);
        return multiply_add(__builtin_convertvector(sum, vf), scale, total);
    }
    INLINE void add_sums(int64_t row, int64_t g, const Sums& sums, float keep, float* to) const {
        store(to, multiply_add(factors[row * groups + g], __builtin_convertvector(sums.total(), vf),
                               keep * load(to)));
    }

    template <int R, int N>
    INLINE void score_vectors(const CodedQueries& q, int64_t row, const float* scales, int64_t column,
                              float* scores) const {
        vf totals[R][N] = {};
        for (int64_t p = 0; p < q.parts; ++p) {
            Sums sums[R][N];
            add_quads<R, N, true>(&q.numbers[row * 2 * q.quads], 2 * q.quads, q.quads, p * q.part / 4,
                                  q.last_quad(p), key_codes(0, column), KEY_TILE * OPENED, sums);
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int n = 0; n < N; ++n)
                    totals[r][n] = add_part(q, row + r, p, sums[r][n], scales + n * W, totals[r][n]);
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n)
                store(scores + r * KEY_TILE + n * W, totals[r][n] * q.scales[row + r]);
    }

    // R rows and all keys, parts of P quads. `keeps`: the codes are needed again.
    template <int R, int P>
    __attribute__((noinline)) void score_as_read(const CodedQueries& q, int64_t row,
                                                 const KeyRows<CodeRow>& tile, const CodeRow* ahead,
                                                 bool keeps, float* scores) {
        const int32_t* numbers = &q.numbers[row * 2 * q.quads];
        const int64_t dim = this->dim, quads = q.quads, count = tile.count;
        for (int64_t j = tile.skip / W * W; j < count; j += W) {
            vf totals[R] = {};
            for (int64_t d = 0; d < dim; d += CHUNK) {
                vf rows[W];
                UNROLL for (int i = 0; i < W; ++i) ahead[j + i].announce(d, CHUNK);
                load_rows<W>(tile.keys + j, d, CHUNK, rows);
                transpose(rows);
                if (keeps)
                    UNROLL for (int i = 0; i < W; ++i)
                        store(key_codes(d / 4 + i, j), open_codes<true>((vi)rows[i]));
                UNROLL for (int p = 0; p < W / P; ++p) {
                    Sums sums[R];
                    UNROLL for (int i = 0; i < P; ++i) {
                        const Opened codes = open_codes<true>((vi)rows[p * P + i]);
                        const int64_t quad = d / 4 + p * P + i;
                        UNROLL for (int r = 0; r < R; ++r) {
                            const int32_t* own = numbers + r * 2 * quads;
                            add_quad<true>(sums[r], codes, splat_int(own[place_of_low(quad)]),
                                           splat_int(own[place_of_high(quad, quads)]));
                        }
                    }
                    UNROLL for (int r = 0; r < R; ++r)
                        totals[r] = add_part(q, row + r, d / (4 * P) + p, sums[r],
                                             tile.key_scales() + j, totals[r]);
                }
            }
            UNROLL for (int r = 0; r < R; ++r)
                store(scores + r * KEY_TILE + j, totals[r] * q.scales[row + r]);
        }
    }

    // The first R rows, S vectors of which share a scale.
    template <int R, int S>
    __attribute__((noinline)) void add_as_read(const KeyRows<CodeRow>& tile, const CodeRow* ahead,
                                               bool keeps, const float* keep, float* out) {
        const int64_t dim = this->dim, ld = groups * 2 * TILE_QUADS, last = (tile.count + 3) / 4;
        for (int64_t d = 0; d < dim; d += CHUNK) {
            const int64_t g = d / group;
            const int32_t* numbers = numbers_of(0, g);
            Sums sums[R][4];
            for (int64_t quad = tile.skip / 4; quad < last; ++quad) {
                vf rows[4];
                UNROLL for (int i = 0; i < 4; ++i) ahead[4 * quad + i].announce(d, CHUNK);
                load_rows<4>(tile.values + 4 * quad, d, CHUNK, rows);
                interleave_bytes(rows);
                if (keeps)
                    UNROLL for (int n = 0; n < 4; ++n)
                        store(value_codes(quad, d + n * W), open_codes<false>((vi)rows[n]));
                UNROLL for (int n = 0; n < 4; n += S)
                    UNROLL for (int r = 0; r < R; ++r) {
                        const int32_t* own = numbers + r * ld + n / S * 2 * TILE_QUADS;
                        const vi low = splat_int(own[place_of_low(quad)]);
                        const vi high = splat_int(own[place_of_high(quad, TILE_QUADS)]);
                        UNROLL for (int s = 0; s < S; ++s)
                            add_quad<false>(sums[r][n + s], open_codes<false>((vi)rows[n + s]), low,
                                            high);
                    }
            }
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int n = 0; n < 4; ++n)
                    add_sums(r, g + n / S, sums[r][n], keep[r], out + r * padded + d + n * W);
        }
    }

    // Rows [row, rows) whose weights are taken, from values that are loaded.
    __attribute__((noinline)) void add_rows(int64_t begin, int64_t rows, const KeyRows<CodeRow>& tile,
                                            const float* keep, float* out) const {
        const int64_t first = tile.skip / 4, last = (tile.count + 3) / 4;
        each_row_tile(begin, rows, [&](auto count, int64_t row) {
            constexpr int R = count.value;
            for (int64_t d = 0; d < padded; d += group)
                each_vector(d, std::min(d + group, padded), [&](auto vectors, int64_t column) {
                    constexpr int N = vectors.value;
                    Sums sums[R][N];
                    add_quads<R, N, false>(numbers_of(row, d / group), groups * 2 * TILE_QUADS,
                                           TILE_QUADS, first, last, value_codes(0, column),
                                           padded * OPENED, sums);
                    UNROLL for (int r = 0; r < R; ++r)
                        UNROLL for (int n = 0; n < N; ++n)
                            add_sums(row + r, d / group, sums[r][n], keep[row + r],
                                     out + (row + r) * padded + column + n * W);
                });
        });
    }

    // Numbers of weights [rows][KEY_TILE] times `scales` [groups][KEY_TILE], vectors [first, last).
    __attribute__((noinline)) void take_weights(const float* weights, int64_t rows, const float* scales,
                                                int64_t first, int64_t last) {
        const int64_t groups = this->groups;
        float *sizes = this->sizes.data(), *scaled = factors.data();
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t g = 0; g < groups; ++g) {
                const float *w = weights + row * KEY_TILE, *s = scales + g * KEY_TILE;
                vi largest = {};
                for (int64_t n = first; n < last; ++n)
                    largest = max_bits(largest, load(w + n * W) * load(s + n * W));
                sizes[row * groups + g] = largest_size(largest);
            }
        for (int64_t i = 0; i < rows * groups; i += W) {
            const vf size = load(sizes + i);
            store(scaled + i, unit_of(size, WEIGHT_TOP));
            store(sizes + i, factor_to(size, WEIGHT_TOP));
        }
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t g = 0; g < groups; ++g) {
                const float *w = weights + row * KEY_TILE, *s = scales + g * KEY_TILE;
                const float factor = sizes[row * groups + g];
                int32_t* to = &numbers[(row * groups + g) * 2 * TILE_QUADS];
                for (int64_t n = first; n < last; ++n)
                    store_numbers<false>(rounded(load(w + n * W) * load(s + n * W), factor), to,
                                         TILE_QUADS, n * W);
            }
    }
};
