// Rows in the vector registers times an int8 weight, whole or in 4 bits.

#pragma once

#include "matmul/int4_runs.h"

// This thread's memory for an opened panel.
INLINE uint8_t* opened_memory(int64_t bytes) {
    static thread_local std::vector<uint8_t> own;
    grow(own, bytes + 64);
    return own.data() + (64 - (uintptr_t)own.data() % 64) % 64;
}
INLINE uint8_t* opened_codes(const Int8Block& block) {
    return opened_memory(block.quads * 4 * PANEL8);
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

// What follows: body(first row, rows, totals[rows, rounded up][PANEL8]) for the tiles of a part and one panel.

// multiply(first row, width, totals) makes the totals of a tile.
template <class Multiply, class Body>
INLINE void each_multiplied_tile(const Tiling& tiling, int64_t part, Multiply&& multiply, Body&& body) {
    tiling.each_tile(part, [&](int64_t row, int64_t rows, auto width) {
        float totals[width.value * PANEL8];
        multiply(row, width, totals);
        body(row, rows, totals);
    });
}

template <class Body>
INLINE void each_opening_tile(const Int8LinearArgs& a, const Int8Block& block, const Tiling& tiling,
                              int64_t part, int64_t panel, Body&& body) {
    const int64_t first = part * tiling.part_rows;
    const bool is_only = tiling.tiles_of(part) == 1;
    uint8_t* codes = opened_codes(block);
    const auto multiply = [&](int64_t row, auto width, float* totals) {
        opening_tile<width.value>(a, block, panel, row, row == first, is_only, codes, totals);
    };
    each_multiplied_tile(tiling, part, multiply, body);
}

template <int RUN, class Body>
INLINE void each_runs_tile(const Int8LinearArgs& a, const Int8Block& block, const Runs& runs,
                           const Tiling& tiling, int64_t part, int64_t panel, Body&& body) {
    const PackedRuns packed(Int4Panel(a, panel), runs);
    const auto each_tile_of = [&](const auto& weight) {
        const auto multiply = [&](int64_t row, auto width, float* totals) {
            runs_tile<width.value, RUN>(block, runs.pairs, row, weight, totals);
        };
        each_multiplied_tile(tiling, part, multiply, body);
    };
    if (tiling.tiles_of(part) == 1) return each_tile_of(packed);
    each_tile_of(open_runs(block, runs, packed, opened_memory(opened_runs_bytes(block))));
}

template <class Body>
INLINE void each_int8_tile(const Int8LinearArgs& a, const Int8Block& block, const Runs& runs,
                           const Tiling& tiling, int64_t part, int64_t panel, Body&& body) {
    const auto multiply = [&](int64_t row, auto width, float* totals) {
        int8_tile<width.value>(block, row, whole_panel(a, block, panel), totals);
    };
    if (!a.steps) return each_multiplied_tile(tiling, part, multiply, body);
    if constexpr (!ADDS_IN_INT16) return each_opening_tile(a, block, tiling, part, panel, body);
    else if (runs.quads == 8) each_runs_tile<8>(a, block, runs, tiling, part, panel, body);
    else if (runs.quads == 4) each_runs_tile<4>(a, block, runs, tiling, part, panel, body);
    else each_runs_tile<2>(a, block, runs, tiling, part, panel, body);
}

template <class T>
void linear_int8_vectors(const Int8LinearArgs& a) {
    static thread_local Int8Block own;
    static thread_local Shares own_shares;
    Int8Block& block = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    block.reserve(a);
    const Runs runs(a, block);
    const bool in_runs = ADDS_IN_INT16 && a.steps;
    if (in_runs) grow(block.run_sums, (std::min(a.rows, BLOCK) + 1) * block.groups * runs.pairs);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANEL8 - 1) / PANEL8;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const Tiling tiling(std::min(BLOCK, a.rows - start), panels, threads,
                            int8_rows(a.rows, block.groups));
#pragma omp single nowait
        shares.cut(tiling.parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < tiling.rows; ++row) {
            const int8_t* codes = codes_of<T>(a, block, start, row);
            if (in_runs)
                lay_out_runs(block, runs, row, codes, tiling);
            else
                lay_out(block, row, codes, tiling);
        }
        shares.take([&](int64_t part, int64_t p) {
            if (!tiling.tiles_of(part)) return;
            each_int8_tile(a, block, runs, tiling, part, p,
                           [&](int64_t row, int64_t rows, const float* totals) {
                               for (int64_t r = 0; r < rows; ++r)
                                   finish_int8<T>(a, start + row + r, p, totals + r * PANEL8);
                           });
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}
