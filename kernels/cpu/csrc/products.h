// Products of small fp32 matrices in vectors, and how rows are cut into tiles for them.

#pragma once

#include "vectors.h"

// Call body(std::integral_constant<int, n>) for a run-time n in [1, MAX].
template <int MAX, class Body>
INLINE void with_constant(int n, Body&& body) {
    if constexpr (MAX == 1) {
        body(std::integral_constant<int, 1>{});
    } else {
        if (n == MAX)
            body(std::integral_constant<int, MAX>{});
        else
            with_constant<MAX - 1>(n, body);
    }
}

// Cut `count` into equal pieces of at most `most`: 16 is 8 + 8, not 12 + 4.
INLINE int rows_per_tile(int64_t count, int most = MAX_ROWS) {
    const int64_t tiles = (count + most - 1) / most;
    return (int)((count + tiles - 1) / tiles);
}

// acc[r][n] (+)= sum_k a[r][k] * b[k][n], one chain of additions per element, k ascending.
template <int R, int N>
INLINE void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                     vf (&acc)[R][N]) {
    for (int64_t k = 0; k < depth; ++k) {
        vf column[N];
        UNROLL for (int n = 0; n < N; ++n) column[n] = load(b + k * ldb + n * W);
        UNROLL for (int r = 0; r < R; ++r) {
            const float scale = a[r * lda + k];
            UNROLL for (int n = 0; n < N; ++n)
                acc[r][n] = multiply_add(scale, column[n], acc[r][n]);
        }
    }
}

// out[rows][columns] = out * keep[row] (or 0 without keep) + a[rows][depth] . b[depth][columns], where
// columns is a multiple of W. One chain of additions per element, k ascending.
INLINE void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows,
                          int64_t depth, int64_t columns, const float* keep, float* out,
                          int64_t ldo) {
    const int tile = rows_per_tile(rows);
    const auto strip = [&](auto num_vectors, int64_t column) {
        constexpr int N = num_vectors.value;
        for (int64_t row = 0; row < rows; row += tile)
            with_constant<MAX_ROWS>((int)std::min<int64_t>(tile, rows - row), [&](auto count) {
                constexpr int R = count.value;
                vf acc[R][N] = {};
                float* to = out + row * ldo + column;
                if (keep)
                    UNROLL for (int r = 0; r < R; ++r)
                        UNROLL for (int n = 0; n < N; ++n)
                            acc[r][n] = keep[row + r] * load(to + r * ldo + n * W);
                multiply<R, N>(a + row * lda, lda, b + column, ldb, depth, acc);
                UNROLL for (int r = 0; r < R; ++r)
                    UNROLL for (int n = 0; n < N; ++n) store(to + r * ldo + n * W, acc[r][n]);
            });
    };
    int64_t column = 0;
    for (; column + 2 * W <= columns; column += 2 * W)
        strip(std::integral_constant<int, 2>{}, column);
    if (column < columns) strip(std::integral_constant<int, 1>{}, column);
}
