// The products of linear_int4_groups.h in tiles of the matrix unit, with the same bits: the codes of a group are
// opened once for all rows, as the panel that the unit reads.

#pragma once

#include "matmul/amx_int8.h"
#include "matmul/linear_int4_groups.h"

#if HAVE_AMX
constexpr int64_t GROUPS_AMX_FROM = 8;  // rows

// totals[end - first][PANELC] of one panel, group after group.
INLINE void groups_panel_amx(const GroupsProduct& product, uint8_t* x, int64_t steps, int64_t first,
                           int64_t end, int64_t panel, float* totals) {
    static thread_local std::vector<uint8_t> memory;
    const Int8Block& block = product.block;
    grow(memory, block.group * WORD_BYTES + 64);
    uint8_t* codes = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
    alignas(64) uint8_t sums[AMX_ROWS * 4 * PANELC];
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t from = g * block.group, quads = std::min(block.group, block.quads - from);
        const Int4Group by = product.group(panel, g);
        open_groups(product.panel(panel) + from / 2 * WORD_BYTES, quads / 2, by, codes);
        const auto rows_at = [&](int64_t row) -> AmxRows {
            return {amx_place(x, row, from / TILE_ROWS, steps) + from % TILE_ROWS * 4};
        };
        for (int64_t row = first; row < end; row += AMX_ROWS) {
            amx_panel<SignedProducts>(rows_at(row), rows_at(row + TILE_ROWS), end - row, codes, quads,
                                      AmxAhead{codes, 0}, false, sums);
            for (int64_t r = 0; r < std::min(AMX_ROWS, end - row); ++r) {
                const int64_t place = (row + r) * block.groups + g;
                const float scale = block.scales[place];
                const float sum = scale * (float)(8 * block.sums[place]);
                for (int n = 0; n < 2; ++n) {
                    const vi exact = load_bits((const int32_t*)sums + r * PANELC + n * W) -
                                     (int32_t)(128u * (uint32_t)block.sums[place]);
                    float* to = totals + (row + r - first) * PANELC + n * W;
                    store(to, add_scaled_group(load(to), exact, scale * by.scales[n], sum,
                                             by.minimums[n], product.a.minimums));
                }
            }
        }
    }
}

template <class T>
void linear_int4_groups_amx(const Int4GroupsArgs& a) {
    static thread_local Int8Block own;
    static thread_local std::vector<uint8_t> own_rows;
    static thread_local Shares own_shares;
    Int8Block& block = own;  // the caller's, for all threads
    std::vector<uint8_t>& memory = own_rows;
    Shares& shares = own_shares;
    const Int8LinearArgs of_rows = rows_of(a);
    block.reserve_rows(of_rows, std::min(a.rows, AMX_BLOCK));
    const GroupsProduct product(a, block);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
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
                const int8_t* codes = int4_codes_of<T>(of_rows, block, start, row);
                block.add_up(row, codes);
                amx_lay_out(x, row, steps, codes, 4 * block.quads);
            }
            shares.take([&](int64_t part, int64_t p) {
                const int64_t first = part * cut.part_rows;
                const int64_t end = std::min(cut.rows, first + cut.part_rows);
                if (first >= end) return;
                alignas(VECTOR_BYTES) float totals[AMX_BLOCK * PANELC];
                std::memset(totals, 0, (end - first) * PANELC * sizeof(float));
                groups_panel_amx(product, x, steps, first, end, p, totals);
                for (int64_t row = first; row < end; ++row)
                    finish_groups<T>(a, start + row, p, totals + (row - first) * PANELC);
            });
            if (start + AMX_BLOCK < a.rows) {
#pragma omp barrier
            }
        }
    }
}
#endif

template <class T>
void linear_int4_groups(const Int4GroupsArgs& a) {
    if (!a.rows || !a.columns) return;
#if HAVE_AMX
    if (a.rows >= GROUPS_AMX_FROM && amx_usable()) return linear_int4_groups_amx<T>(a);
#endif
    linear_int4_groups_vectors<T>(a);
}
