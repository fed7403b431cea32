// x times a packed weight. A panel holds 2 W output features with the input features outermost: fp32
// [K][2W], bf16 [K/2][2W][2] (pairs, as the bf16 dot product wants them), zeros where N or K is ragged.
// One panel is read once for up to 12 rows of x, and stays in the L2 cache for the rows after that.

#pragma once

#include "cpu_tiling.h"

constexpr int PANEL = 2 * W;  // output features of one packed panel

struct LinearArgs {
    int64_t dtype;
    const void* x;
    int64_t x_stride;
    const void *packed, *bias;  // bias may be null
    void* out;
    int64_t out_stride, rows, columns, depth, threads;
};

struct PackArgs {
    int64_t dtype;
    const void* weight;
    int64_t weight_stride;
    void* packed;
    int64_t columns, depth, threads;
};

#if HAVE_DPBF16
template <int R>
INLINE void panel_rows(const bf16* x, int64_t ldx, const bf16* panel, int64_t depth,
                       vf (&acc)[R][2]) {
    __m512 sums[R][2] = {};
    for (int64_t k = 0; k < depth; k += 2) {
        const bf16* weights = panel + k * PANEL;
        _mm_prefetch((const char*)(weights + 1024), _MM_HINT_T0);
        _mm_prefetch((const char*)(weights + 1056), _MM_HINT_T0);
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(weights + 2 * W);
        UNROLL for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * ldx + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, second);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < 2; ++n) acc[r][n] = (vf)sums[r][n];
}
#else
template <int R>
INLINE void panel_rows(const bf16* x, int64_t ldx, const bf16* panel, int64_t depth,
                       vf (&acc)[R][2]) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int n = 0; n < 2; ++n) {
            vu pairs;
            std::memcpy(&pairs, panel + k * PANEL + n * 2 * W, sizeof pairs);
            const vf even = (vf)(pairs << 16), odd = (vf)(pairs & 0xffff0000u);
            for (int r = 0; r < R; ++r) {
                uint32_t first = (uint32_t)x[r * ldx + k].bits << 16;
                uint32_t second = (uint32_t)x[r * ldx + k + 1].bits << 16;
                float a, b;
                std::memcpy(&a, &first, 4);
                std::memcpy(&b, &second, 4);
                acc[r][n] += a * even;
                acc[r][n] += b * odd;
            }
        }
}
#endif
template <int R>
INLINE void panel_rows(const float* x, int64_t ldx, const float* panel, int64_t depth,
                       vf (&acc)[R][2]) {
    multiply<R, 2>(x, ldx, panel, PANEL, depth, acc);
}

template <class T, int R>
void panel_tile(const T* x, int64_t ldx, const T* panel, const T* bias, T* y, int64_t ldy,
                int64_t depth, int64_t columns) {
    vf acc[R][2] = {};
    panel_rows<R>(x, ldx, panel, depth, acc);
    UNROLL for (int n = 0; n < 2; ++n) {
        const int64_t left = columns - n * W;
        if (left <= 0) break;
        const vf shift = bias ? load_up_to(bias + n * W, left) : vf{};
        UNROLL for (int r = 0; r < R; ++r)
            store_up_to(y + r * ldy + n * W, acc[r][n] + shift, left);
    }
}

template <class T>
void linear(const LinearArgs& a) {
    if (!a.rows || !a.columns) return;
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANEL - 1) / PANEL;
    const int64_t depth = sizeof(T) == 2 ? (a.depth + 1) / 2 * 2 : a.depth;
    const int tile = rows_per_tile(a.rows);
    // Rows are cut, too, where there are fewer panels than threads could share evenly.
    const int64_t tiles = (a.rows + tile - 1) / tile;
    const int64_t parts = std::clamp<int64_t>(4 * threads / panels, 1, tiles);
    const int64_t part_rows = (tiles + parts - 1) / parts * tile;
    static thread_local Shares own_shares;
    Shares& shares = own_shares;  // the caller's, for all threads
    shares.cut(parts, panels, threads);
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    shares.take([&](int64_t part, int64_t p) {
        const T* panel = (const T*)a.packed + p * PANEL * depth;
        const T* bias = a.bias ? (const T*)a.bias + p * PANEL : nullptr;
        const int64_t columns = std::min<int64_t>(PANEL, a.columns - p * PANEL);
        const int64_t end = std::min(a.rows, (part + 1) * part_rows);
        for (int64_t row = part * part_rows; row < end; row += tile)
            with_constant<MAX_ROWS>((int)std::min<int64_t>(tile, end - row), [&](auto count) {
                panel_tile<T, count.value>((const T*)a.x + row * a.x_stride, a.x_stride, panel, bias,
                                           (T*)a.out + row * a.out_stride + p * PANEL,
                                           a.out_stride, depth, columns);
            });
    });
}

template <class T>
void pack(const PackArgs& a) {
    constexpr int64_t run = sizeof(T) == 2 ? 2 : 1;  // input features that lie side by side
    const int64_t panels = (a.columns + PANEL - 1) / PANEL;
    const int64_t padded = (a.depth + run - 1) / run * run;
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        T* to = (T*)a.packed + p * PANEL * padded;
        for (int64_t k = 0; k < padded; k += run)
            for (int64_t row = p * PANEL; row < (p + 1) * PANEL; ++row)
                for (int64_t j = k; j < k + run; ++j)
                    *to++ = row < a.columns && j < a.depth
                                ? ((const T*)a.weight)[row * a.weight_stride + j]
                                : T{};
    }
}
