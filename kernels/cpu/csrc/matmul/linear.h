// x times a packed weight. A panel holds 2 W output features with the input features outermost: fp32
// [K][2W], bf16 [K/2][2W][2] (pairs, as the bf16 dot product wants them), zeros where N or K is ragged.
// One panel is read once for up to 12 rows of x, and stays in the L2 cache for the rows after that.
// Where the CPU has a matrix unit, bf16 goes there (amx.h).

#pragma once

#include "matmul/amx.h"
#include "export.h"
#include "products.h"

constexpr int PANEL = 2 * W;  // output features of one packed panel

struct LinearArgs {
    int64_t dtype;
    const void* x;
    int64_t x_stride;
    const void *packed, *bias;  // bias may be null
    void* out;
    int64_t out_stride, rows, columns;
    int64_t depth;  // of bf16 even
    int64_t threads;
};
LAYOUT(LinearArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(packed) FIELD(bias) FIELD(out) FIELD(out_stride)
       FIELD(rows) FIELD(columns) FIELD(depth) FIELD(threads))

struct PackArgs {
    int64_t dtype;
    const void* weight;
    int64_t weight_stride;
    void* packed;
    int64_t columns, depth, threads;
};
LAYOUT(PackArgs,
       FIELD(dtype) FIELD(weight) FIELD(weight_stride) FIELD(packed) FIELD(columns) FIELD(depth)
       FIELD(threads))

// Input features that a panel has side by side, in 4 bytes.
template <class T>
constexpr int RUN_OF = 4 / sizeof(T);
// The same of a row as tiles read it: bf16 becomes fp32 there, once for all panels, where the CPU has no
// product of bf16.
template <class T>
constexpr bool IS_WIDENED = sizeof(T) == 2 && !HAVE_DPBF16;
template <class T>
constexpr int ROW_UNIT = IS_WIDENED<T> ? 8 : 4;  // bytes

template <class U>
INLINE U unit_at(const uint8_t* x, int64_t at) {
    U unit;
    std::memcpy(&unit, x + sizeof(U) * at, sizeof(U));
    return unit;
}

// Of a walk through a panel: a cache line of what comes `ahead`, or, if that is null, of this panel
// further on.
template <class T>
INLINE void prefetch_step(const T* weights, const T* ahead, int64_t group) {
    if (ahead) {
        __builtin_prefetch(ahead + group * (64 / (int)sizeof(T)));
    } else {
        prefetch_ahead(weights);
        prefetch_ahead(weights + VECTOR_BYTES / (int)sizeof(T));
    }
}

// acc[r][n] = the sums of R rows, [groups][R] units, and one panel. `ahead`: as `prefetch_step` has it.
#if HAVE_DPBF16
template <int R>
INLINE void panel_rows(const uint8_t* x, const bf16* panel, const bf16* ahead, int64_t groups,
                       vf (&acc)[R][2]) {
    __m512 sums[R][2] = {};
    for (int64_t g = 0; g < groups; ++g) {
        const bf16* weights = panel + g * 2 * PANEL;
        prefetch_step(weights, ahead, g);
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weights);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(weights + 2 * W);
        UNROLL for (int r = 0; r < R; ++r) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(unit_at<int32_t>(x, g * R + r));
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, second);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < 2; ++n) acc[r][n] = (vf)sums[r][n];
}
#else
template <int R>
INLINE void panel_rows(const uint8_t* x, const bf16* panel, const bf16* ahead, int64_t groups,
                       vf (&acc)[R][2]) {
    for (int64_t g = 0; g < groups; ++g) {
        const bf16* weights = panel + g * 2 * PANEL;
        prefetch_step(weights, ahead, g);
        // The first of each pair of inputs, then the second: with both, there are not enough registers.
        UNROLL for (int half = 0; half < 2; ++half) {
            vf w[2];
            UNROLL for (int n = 0; n < 2; ++n) {
                vu pairs;
                std::memcpy(&pairs, weights + n * 2 * W, sizeof pairs);
                w[n] = (vf)(half ? pairs & 0xffff0000u : pairs << 16);
            }
            UNROLL for (int r = 0; r < R; ++r) {
                const float value = unit_at<float>(x, 2 * (g * R + r) + half);
                acc[r][0] = multiply_add(value, w[0], acc[r][0]);
                acc[r][1] = multiply_add(value, w[1], acc[r][1]);
            }
        }
    }
}
#endif
template <int R>
INLINE void panel_rows(const uint8_t* x, const float* panel, const float* ahead, int64_t groups,
                       vf (&acc)[R][2]) {
    for (int64_t g = 0; g < groups; ++g) {
        const float* weights = panel + g * PANEL;
        prefetch_step(weights, ahead, g);
        const vf w[2] = {load(weights), load(weights + W)};
        UNROLL for (int r = 0; r < R; ++r) {
            const float value = unit_at<float>(x, g * R + r);
            acc[r][0] += value * w[0];
            acc[r][1] += value * w[1];
        }
    }
}

template <class T, int R>
void panel_tile(const uint8_t* x, const T* panel, const T* ahead, const T* bias, T* y, int64_t ldy,
                int64_t groups, int64_t columns) {
    vf acc[R][2] = {};
    panel_rows<R>(x, panel, ahead, groups, acc);
    UNROLL for (int n = 0; n < 2; ++n) {
        const int64_t left = columns - n * W;
        if (left <= 0) break;
        const vf shift = bias ? load_up_to(bias + n * W, left) : vf{};
        UNROLL for (int r = 0; r < R; ++r)
            store_up_to(y + r * ldy + n * W, acc[r][n] + shift, left);
    }
}

#if HAVE_AMX
// For any number of rows: the unit adds up in an order of its own, and a row's bits do not depend on
// how many others there are.
inline void linear_amx(const LinearArgs& a) {
    const int64_t groups = (a.depth + 1) / 2, steps = (groups + TILE_ROWS - 1) / TILE_ROWS;
    const auto prepare = [&](int64_t start, int64_t row, uint8_t* x) {
        const bf16* from = (const bf16*)a.x + (start + row) * a.x_stride;
        amx_lay_out(x, row, steps, from, a.depth * sizeof(bf16));
    };
    const auto finish = [&](int64_t start, int64_t row, int64_t panel, const uint8_t* sums) {
        bf16* out = (bf16*)a.out + (start + row) * a.out_stride + panel * PANEL;
        const bf16* bias = a.bias ? (const bf16*)a.bias + panel * PANEL : nullptr;
        for (int n = 0; n < 2; ++n) {
            const int64_t left = a.columns - panel * PANEL - n * W;
            if (left <= 0) break;
            const vf shift = bias ? load_up_to(bias + n * W, left) : vf{};
            store_up_to(out + n * W, load((const float*)sums + n * W) + shift, left);
        }
    };
    const int64_t row_bytes = a.x_stride * sizeof(bf16);
    // Rows a multiple of 4 KiB apart would drive each other out of the L1 cache.
    const bool is_whole = a.depth * sizeof(bf16) % 64 == 0, is_spread = row_bytes % 4096 != 0;
    const bool is_aligned = ((uintptr_t)a.x | row_bytes) % 64 == 0;
    const bool in_place = is_whole && is_spread && is_aligned;
    const AmxRows ready{in_place ? (const uint8_t*)a.x : nullptr, row_bytes, 64};
    amx_linear<Bf16Products>(a.rows, a.columns, a.depth, groups, (int)a.threads,
                             (const uint8_t*)a.packed, ready, prepare, finish);
}
#endif

// A block of rows as tiles read it: [groups][rows of the tile] units, tile after tile. Rows as they
// come would lie a power of two apart, often, and drive each other out of the cache.
template <class T>
INLINE void lay_out_row(const LinearArgs& a, int64_t row, int64_t groups, int64_t step, uint8_t* to) {
    const T* from = (const T*)a.x + row * a.x_stride;
    if constexpr (IS_WIDENED<T>) {
        for (int64_t k = 0; k < a.depth; ++k) {
            const uint32_t bits = (uint32_t)from[k].bits << 16;
            std::memcpy(to + 8 * (k / 2 * step) + 4 * (k % 2), &bits, 4);
        }
    } else {
        for (int64_t g = 0; g < groups; ++g) std::memcpy(to + 4 * g * step, from + g * RUN_OF<T>, 4);
    }
}

template <class T>
void linear(const LinearArgs& a) {
    if (!a.rows || !a.columns) return;
#if HAVE_AMX
    if constexpr (sizeof(T) == 2)
        if (amx_usable()) return linear_amx(a);
#endif
    static thread_local std::vector<uint8_t> own;
    static thread_local Shares own_shares;
    std::vector<uint8_t>& units = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANEL - 1) / PANEL;
    const int64_t groups = (a.depth + RUN_OF<T> - 1) / RUN_OF<T>;
    const bool is_small = groups * 2 * VECTOR_BYTES <= 256 << 10;  // two panels fit into the L2 cache
    const bool lays_out = a.rows > 1 || IS_WIDENED<T>;
    if (lays_out) grow(units, ROW_UNIT<T> * std::min(a.rows, BLOCK) * groups);
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const int64_t rows = std::min(BLOCK, a.rows - start), tile = rows_per_tile(rows);
        // Rows are cut, too, where there are fewer panels than threads could share evenly.
        const int64_t tiles = (rows + tile - 1) / tile;
        const int64_t parts = std::clamp<int64_t>(4 * threads / panels, 1, tiles);
        const int64_t part_rows = (tiles + parts - 1) / parts * tile;
#pragma omp single nowait
        shares.cut(parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t first = row / tile * tile, step = std::min(tile, rows - first);
            if (lays_out)
                lay_out_row<T>(a, start + row, groups, step,
                               units.data() + ROW_UNIT<T> * (first * groups + row - first));
        }
        shares.take([&](int64_t part, int64_t p) {
            const T* panel = (const T*)a.packed + p * PANEL * groups * RUN_OF<T>;
            const T* bias = a.bias ? (const T*)a.bias + p * PANEL : nullptr;
            const int64_t columns = std::min<int64_t>(PANEL, a.columns - p * PANEL);
            const int64_t begin = part * part_rows, end = std::min(rows, begin + part_rows);
            for (int64_t row = begin; row < end; row += tile) {
                const uint8_t* x =
                    lays_out ? units.data() + ROW_UNIT<T> * row * groups : (const uint8_t*)a.x;
                // The first two of several tiles prefetch the next panel, half of it each.
                const int64_t nth = (row - begin) / tile;
                const bool prefetches = nth < 2 && begin + tile < end && p + 1 < panels && is_small;
                const T* ahead = panel + (2 * groups + nth * groups) * RUN_OF<T> * W;
                with_constant<MAX_ROWS>((int)std::min<int64_t>(tile, end - row), [&](auto count) {
                    panel_tile<T, count.value>(x, panel, prefetches ? ahead : nullptr, bias,
                                               (T*)a.out + (start + row) * a.out_stride + p * PANEL,
                                               a.out_stride, groups, columns);
                });
            }
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
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
