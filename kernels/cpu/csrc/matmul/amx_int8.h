// The products of linear_int8.h in tiles of the matrix unit, with the same bits: a group's sums are exact,
// and their totals are added up in the same chain.

#pragma once

#include "matmul/amx.h"
#include "matmul/int8_vectors.h"

#if HAVE_AMX
constexpr int64_t INT8_AMX_FROM = 4;  // rows

// totals[PANEL8] += scale of group g of row `row` * (sums - 128 * the sum of its codes).
INLINE void add_int8_group(const Int8Block& block, int64_t row, int64_t g, const void* sums,
                           float* totals) {
    const int64_t place = row * block.groups + g;
    const int32_t shift = (int32_t)(128u * (uint32_t)block.sums[place]);
    for (int n = 0; n < 2; ++n) {
        const vi exact = load_bits((const int32_t*)sums + n * W) - shift;
        float* to = totals + n * W;
        store(to, multiply_add(block.scales[place], __builtin_convertvector(exact, vf), load(to)));
    }
}

// One scale a row: whole panels at once, in the pieces that amx.h cuts them into.
template <class T>
void linear_int8_amx_rows(const Int8LinearArgs& a, Int8Block& block) {
    const int64_t steps = (block.quads + TILE_ROWS - 1) / TILE_ROWS;
    const auto prepare = [&](int64_t start, int64_t row, uint8_t* x) {
        const int8_t* codes = codes_of<T>(a, block, start, row);
        block.add_up(row, codes);
        amx_lay_out(x, row, steps, codes, 4 * block.quads);
    };
    const auto finish = [&](int64_t start, int64_t row, int64_t panel, const uint8_t* sums) {
        float totals[PANEL8] = {};
        add_int8_group(block, row, 0, sums, totals);
        finish_int8<T>(a, start + row, panel, totals);
    };
    amx_linear<SignedProducts>(a.rows, a.columns, a.depth, block.quads, (int)a.threads, a.packed,
                               AmxRows{nullptr}, prepare, finish);
}

// totals[end - first][PANEL8] of one panel, group after group: a group of the panel stays in the L1
// cache while all rows pass through it. Rows lie in steps of 64 codes; a group may begin within one:
// what is read beyond its end meets zeros of the panel's.
INLINE void int8_panel_amx(const Int8Block& block, uint8_t* x, int64_t steps, int64_t first,
                           int64_t end, const uint8_t* panel, float* totals) {
    alignas(64) uint8_t sums[AMX_ROWS * 4 * PANEL8];
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t from = g * block.group, quads = std::min(block.group, block.quads - from);
        const uint8_t* piece = panel + from * 4 * PANEL8;
        const auto rows_at = [&](int64_t row) -> AmxRows {
            return {amx_place(x, row, from / TILE_ROWS, steps) + from % TILE_ROWS * 4};
        };
        for (int64_t row = first; row < end; row += AMX_ROWS) {
            const AmxAhead ahead = row == first ? AmxAhead{piece, AMX_STEP / 64, 0, true}
                                                : AmxAhead{piece, 0};
            amx_panel<SignedProducts>(rows_at(row), rows_at(row + TILE_ROWS), end - row, piece, quads,
                                      ahead, false, sums);
            for (int64_t r = 0; r < std::min(AMX_ROWS, end - row); ++r)
                add_int8_group(block, row + r, g, sums + r * 4 * PANEL8,
                               totals + (row + r - first) * PANEL8);
        }
    }
}

template <class T>
void linear_int8_amx(const Int8LinearArgs& a) {
    static thread_local Int8Block own;
    static thread_local std::vector<uint8_t> own_rows;
    static thread_local Shares own_shares;
    Int8Block& block = own;  // the caller's, for all threads
    std::vector<uint8_t>& memory = own_rows;
    Shares& shares = own_shares;
    block.reserve_rows(a, std::min(a.rows, AMX_BLOCK));
    if (block.groups == 1 && !a.steps) return linear_int8_amx_rows<T>(a, block);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANEL8 - 1) / PANEL8;
    const int64_t steps = (block.quads + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t most = (std::min(a.rows, AMX_BLOCK) + TILE_ROWS - 1) / TILE_ROWS;
    grow(memory, most * steps * TILE_BYTES + 128);  // a row may be read 64 bytes beyond its step
    uint8_t* x = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    {
        const AmxTiles tiles;
        for (int64_t start = 0; start < a.rows; start += AMX_BLOCK) {
            const AmxCut cut(std::min(AMX_BLOCK, a.rows - start), panels, threads);
#pragma omp single nowait
            shares.cut(cut.parts, panels, threads);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < cut.rows; ++row) {
                const int8_t* codes = codes_of<T>(a, block, start, row);
                block.add_up(row, codes);
                amx_lay_out(x, row, steps, codes, 4 * block.quads);
            }
            shares.take([&](int64_t part, int64_t p) {
                const int64_t first = part * cut.part_rows;
                const int64_t end = std::min(cut.rows, first + cut.part_rows);
                if (first >= end) return;
                alignas(VECTOR_BYTES) float totals[AMX_BLOCK * PANEL8];
                std::memset(totals, 0, (end - first) * PANEL8 * sizeof(float));
                int8_panel_amx(block, x, steps, first, end, int8_panel(a, block, p), totals);
                for (int64_t row = first; row < end; ++row)
                    finish_int8<T>(a, start + row, p, totals + (row - first) * PANEL8);
            });
            if (start + AMX_BLOCK < a.rows) {
#pragma omp barrier
            }
        }
    }
}
#endif

template <class T>
void linear_int8(const Int8LinearArgs& a) {
    if (!a.rows || !a.columns) return;
#if HAVE_AMX
    if (a.rows >= INT8_AMX_FROM && amx_usable()) return linear_int8_amx<T>(a);
#endif
    linear_int8_vectors<T>(a);
}
