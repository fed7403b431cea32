// Rows in the vector registers times an int8 weight, whole or in 4 bits.

#pragma once

#include "matmul/int4_runs.h"

// Inputs of a panel that serve all rows of a part before those after them: they stay in the L1 cache.
constexpr int64_t STRETCH = 512;

// A panel of a weight in 8 bits: codes plus 128, [K / 4][PANEL8][4].
INLINE const uint8_t* whole_panel(const Int8LinearArgs& a, const Int8Block& block, int64_t panel) {
    return a.packed + panel * block.quads * 4 * PANEL8;
}

// This thread's memory for what is opened of a panel.
INLINE uint8_t* opened_memory(int64_t bytes) {
    static thread_local std::vector<uint8_t> own;
    grow(own, bytes + 64);
    return own.data() + (64 - (uintptr_t)own.data() % 64) % 64;
}

// The same of either weight: where it is, or opened for this thread.
INLINE const uint8_t* int8_panel(const Int8LinearArgs& a, const Int8Block& block, int64_t panel) {
    if (!a.steps) return whole_panel(a, block, panel);
    uint8_t* codes = opened_memory(block.quads * 4 * PANEL8);
    Int4Panel(a, panel).open(codes);
    return codes;
}

// body(first group, end) for one stretch of a part after the other; a lone tile reads all of it at once.
template <class Body>
INLINE void each_stretch(const Int8Block& block, bool is_lone, Body&& body) {
    const int64_t step = is_lone ? block.groups : std::max<int64_t>(1, STRETCH / 4 / block.group);
    for (int64_t g = 0; g < block.groups; g += step) body(g, std::min(block.groups, g + step));
}

// What follows: one panel times the rows of one part, totals[rows, rounded up to whole tiles][PANEL8] +=.

INLINE void whole_part(const Int8LinearArgs& a, const Int8Block& block, const Tiling& tiling, int64_t part,
                       int64_t panel, float* totals) {
    const int64_t first_row = part * tiling.part_rows;
    each_stretch(block, tiling.tiles_of(part) == 1, [&](int64_t first, int64_t end) {
        tiling.each_tile(part, [&](int64_t row, int64_t, auto width) {
            int8_tile<width.value>(block, row, first, end, whole_panel(a, block, panel),
                                   totals + (row - first_row) * PANEL8);
        });
    });
}

// Of a weight in 4 bits: the first tile opens its codes to those of int8, for the tiles after it.
INLINE void int4_part(const Int8LinearArgs& a, const Int8Block& block, const Tiling& tiling, int64_t part,
                      int64_t index, float* totals) {
    const int64_t first_row = part * tiling.part_rows;
    const bool is_lone = tiling.tiles_of(part) == 1;
    const Int4Panel panel(a, index);
    uint8_t* codes = is_lone ? nullptr : opened_memory(block.quads * 4 * PANEL8);
    each_stretch(block, is_lone, [&](int64_t first, int64_t end) {
        tiling.each_tile(part, [&](int64_t row, int64_t, auto width) {
            float* to = totals + (row - first_row) * PANEL8;
            if (is_lone)
                int4_tile<width.value, false>(block, row, first, end, panel, nullptr, to);
            else if (row == first_row)
                int4_tile<width.value, true>(block, row, first, end, panel, codes, to);
            else
                int8_tile<width.value>(block, row, first, end, codes, to);
        });
    });
}

// The same where products are added in int16: run after run.
template <int RUN>
INLINE void int4_runs_part(const Int8LinearArgs& a, const Int8Block& block, const Runs& runs,
                           const Tiling& tiling, int64_t part, int64_t index, float* totals) {
    const int64_t first_row = part * tiling.part_rows;
    const bool is_lone = tiling.tiles_of(part) == 1;
    const Int4Panel panel(a, index);
    each_stretch(block, is_lone, [&](int64_t first, int64_t end) {
        const PackedRuns packed(panel, runs, first * block.group);
        const auto multiply = [&](const auto& weight) {
            tiling.each_tile(part, [&](int64_t row, int64_t, auto width) {
                runs_tile<width.value, RUN>(block, runs.pairs, row, first, end, weight,
                                            totals + (row - first_row) * PANEL8);
            });
        };
        if (is_lone) return multiply(packed);
        const int64_t quads = std::min(block.quads, end * block.group) - first * block.group;
        multiply(open_runs(block, runs, first, end, packed, opened_memory(opened_runs_bytes(quads))));
    });
}

INLINE void part_of_panel(const Int8LinearArgs& a, const Int8Block& block, const Runs& runs,
                          const Tiling& tiling, int64_t part, int64_t panel, float* totals) {
    if (!a.steps) return whole_part(a, block, tiling, part, panel, totals);
    if constexpr (!ADDS_IN_INT16) return int4_part(a, block, tiling, part, panel, totals);
    if (runs.quads == 8) return int4_runs_part<8>(a, block, runs, tiling, part, panel, totals);
    if (runs.quads == 4) return int4_runs_part<4>(a, block, runs, tiling, part, panel, totals);
    return int4_runs_part<2>(a, block, runs, tiling, part, panel, totals);
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
            if (in_runs) {
                lay_out<false>(block, row, codes, tiling);
                lay_out_run_sums(block, runs, row, codes, tiling);
            } else {
                lay_out(block, row, codes, tiling);
            }
        }
        shares.take([&](int64_t part, int64_t p) {
            const int64_t first = part * tiling.part_rows;
            const int64_t end = std::min(tiling.rows, first + tiling.part_rows);
            if (first >= end) return;
            alignas(VECTOR_BYTES) float totals[(BLOCK + 1) * PANEL8];
            std::memset(totals, 0, (end - first + 1) * PANEL8 * sizeof(float));
            part_of_panel(a, block, runs, tiling, part, p, totals);
            for (int64_t row = first; row < end; ++row)
                finish_int8<T>(a, start + row, p, totals + (row - first) * PANEL8);
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}
