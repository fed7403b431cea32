// Rows in the vector registers times an int8 weight, whole or in 4 bits.

#pragma once

#include "matmul/open_int4.h"

// This thread's memory for the opened codes of a panel.
INLINE uint8_t* opened_codes(const Int8Block& block) {
    static thread_local std::vector<uint8_t> own;
    grow(own, block.quads * 4 * PANEL8 + 64);
    return own.data() + (64 - (uintptr_t)own.data() % 64) % 64;
}

// A panel of a weight in 8 bits: codes plus 128, [K / 4][PANEL8][4].
INLINE const uint8_t* whole_panel(const Int8LinearArgs& a, const Int8Block& block, int64_t panel) {
    return a.packed + panel * block.quads * 4 * PANEL8;
}

// The same of either weight: where it is, or opened for this thread.
INLINE const uint8_t* int8_panel(const Int8LinearArgs& a, const Int8Block& block, int64_t panel) {
    if (!a.steps) return whole_panel(a, block, panel);
    uint8_t* codes = opened_codes(block);
    Int4Panel(a, panel).open(codes);
    return codes;
}

// One tile of rows times a weight in 4 bits: the first of a part opens the codes, for those after it.
template <int R>
INLINE void opening_tile(const Int8LinearArgs& a, const Int8Block& block, int64_t panel, int64_t row,
                         bool is_first, bool is_only, uint8_t* codes, float* totals) {
    if constexpr (R > 2 && MAX_ROWS < 12) {  // too few registers for sums and opened codes
        if (is_first) Int4Panel(a, panel).open(codes);
        int8_tile<R>(block, row, codes, totals);
    } else if (!is_first) {
        int8_tile<R>(block, row, codes, totals);
    } else if (is_only) {
        int4_tile<R, false>(block, row, Int4Panel(a, panel), nullptr, totals);
    } else {
        int4_tile<R, true>(block, row, Int4Panel(a, panel), codes, totals);
    }
}

template <class T>
void linear_int8_vectors(const Int8LinearArgs& a) {
    static thread_local Int8Block own;
    static thread_local Shares own_shares;
    Int8Block& block = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    block.reserve(a);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANEL8 - 1) / PANEL8;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const Tiling tiling(std::min(BLOCK, a.rows - start), panels, threads,
                            int8_rows(a.rows, block.groups));
#pragma omp single nowait
        shares.cut(tiling.parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < tiling.rows; ++row)
            lay_out(block, row, codes_of<T>(a, block, start, row), tiling);
        shares.take([&](int64_t part, int64_t p) {
            const int64_t first = part * tiling.part_rows, tiles = tiling.tiles_of(part);
            if (!tiles) return;
            uint8_t* codes = a.steps ? opened_codes(block) : nullptr;
            tiling.each_tile(part, [&](int64_t row, int64_t rows, auto width) {
                float totals[width.value * PANEL8];
                if (a.steps)
                    opening_tile<width.value>(a, block, p, row, row == first, tiles == 1, codes, totals);
                else
                    int8_tile<width.value>(block, row, whole_panel(a, block, p), totals);
                for (int64_t r = 0; r < rows; ++r)
                    finish_int8<T>(a, start + row + r, p, totals + r * PANEL8);
            });
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}
