// The products of linear_integers.h in tiles of the matrix unit, with the same bits: int16 is a signed
// and an unsigned byte there, and so two sums, 256 apart. Of 4 bits, codes at even places of a word are
// one group of four bytes, those at odd places the next; a word of 8-bit codes is a group already.

#pragma once

#include "matmul/amx.h"
#include "matmul/linear_integers.h"

#if HAVE_AMX
constexpr int64_t INTEGERS_AMX_FROM = 8;  // rows

struct HalvesProducts {
    INLINE static void first() { SignedProducts::first(); }
    INLINE static void second() {
        _tile_dpbuud(2, 5, 6);
        _tile_dpbuud(3, 5, 7);
    }
};

// Rows of a block: [row / 16][segments][upper bytes, lower bytes][steps] tiles.
struct IntegersTiles {
    int64_t segments, steps;  // of a row, of a segment
    std::vector<uint8_t> bytes;

    void reserve(const CodesBlock& shape, int64_t rows) {
        segments = shape.num_segments();
        steps = (std::min(SEGMENT, shape.padded_group) + 63) / 64;
        const int64_t tiles = (std::min(rows, AMX_BLOCK) + TILE_ROWS - 1) / TILE_ROWS;
        grow(bytes, tiles * segments * 2 * steps * TILE_BYTES + 64);
    }
    uint8_t* at(int64_t row, int64_t segment) {
        uint8_t* start = bytes.data() + (64 - (uintptr_t)bytes.data() % 64) % 64;
        return start + (row / TILE_ROWS * segments + segment) * 2 * steps * TILE_BYTES;
    }
    template <class Codes>
    void lay_out(int64_t row, int64_t segment, const int16_t* whole, int64_t depth) {
        uint8_t* upper = at(row, segment) + row % TILE_ROWS * 64;
        uint8_t* lower = upper + steps * TILE_BYTES;
        for (int64_t i = 0; i < 64 * steps; ++i) {
            const int64_t to = i / 64 * TILE_BYTES + i % 64;
            const int64_t k = Codes::BITS == 8 ? i : i / 8 * 8 + i % 4 * 2 + i % 8 / 4;
            const int16_t value = k < depth ? whole[k] : 0;
            upper[to] = (uint8_t)((uint16_t)value >> 8);
            lower[to] = (uint8_t)value;
        }
    }
};

// The codes of one segment of a panel as bytes, [depth / 4][PANELC][4].
template <class Codes>
INLINE void open_codes(const uint8_t* from, int64_t depth, uint8_t* codes) {
    constexpr int32_t BYTES = 0x0F0F0F0F;
    for (int64_t word = 0; word < depth / Codes::RUN; ++word)
        UNROLL for (int n = 0; n < 2; ++n) {
            const uint8_t* at = from + word * WORD_BYTES + n * VECTOR_BYTES;
            prefetch_ahead(at);
            const vu words = (vu)load_bits(at);
            if constexpr (Codes::BITS == 8) {
                std::memcpy(codes + (2 * word + n) * VECTOR_BYTES, &words, VECTOR_BYTES);
                continue;
            }
            const vi even = (vi)words & BYTES, odd = (vi)(words >> 4) & BYTES;
            std::memcpy(codes + (4 * word + n) * VECTOR_BYTES, &even, VECTOR_BYTES);
            std::memcpy(codes + (4 * word + 2 + n) * VECTOR_BYTES, &odd, VECTOR_BYTES);
        }
}

template <class Codes>
INLINE void integers_panel_amx(const CodesLinearArgs& a, const CodesBlock& shape,
                               const IntegersBlock& block, IntegersTiles& x, int64_t first,
                               int64_t end, int64_t panel, float* totals) {
    const uint8_t* weights = a.packed + panel * (shape.depth / Codes::RUN) * WORD_BYTES;
    alignas(64) uint8_t codes[SEGMENT * PANELC] = {};
    alignas(64) int32_t sums[2][TILE_ROWS][PANELC];
    for (int64_t segment = 0; segment < block.segments; ++segment) {
        const SegmentScales by(a, shape, panel, segment);
        open_codes<Codes>(weights + shape.start_of(segment) / Codes::RUN * WORD_BYTES,
                          shape.depth_of(segment), codes);
        for (int64_t row = first; row < end; row += TILE_ROWS) {
            const uint8_t* upper = x.at(row, segment);
            amx_panel<HalvesProducts>({upper}, {upper + x.steps * TILE_BYTES}, AMX_ROWS, codes,
                                      x.steps * TILE_ROWS, {codes, 0}, false, sums);
            for (int64_t r = 0; r < std::min<int64_t>(TILE_ROWS, end - row); ++r) {
                const int32_t sum = block.sums[(row + r) * block.segments + segment];
                vi acc[2];
                UNROLL for (int n = 0; n < 2; ++n)
                    acc[n] = (load_bits(sums[0][r] + n * W) << 8) + load_bits(sums[1][r] + n * W) -
                             Codes::CENTRE * sum;
                add_integers_scaled(by, block, segment, row + r, acc,
                                    totals + (row + r - first) * PANELC);
            }
        }
    }
}

template <class Codes>
void linear_integers_amx(const CodesLinearArgs& a) {
    static thread_local IntegersBlock own;
    static thread_local IntegersTiles own_tiles;
    static thread_local CodesBlock own_shape;
    static thread_local Shares own_shares;
    IntegersBlock& block = own;  // the caller's, for all threads
    IntegersTiles& x = own_tiles;
    CodesBlock& shape = own_shape;
    Shares& shares = own_shares;
    shape.measure(a, Codes::RUN);
    block.reserve_rows(shape, std::min(a.rows, AMX_BLOCK));
    x.reserve(shape, a.rows);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    {
        const AmxTiles tiles;
        for (int64_t start = 0; start < a.rows; start += AMX_BLOCK) {
            const AmxCut cut(std::min(AMX_BLOCK, a.rows - start), panels, threads);
#pragma omp single nowait
            shares.cut(cut.parts, panels, threads);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < cut.rows; ++row)
                each_segment(a, shape, block, start, row,
                             [&](int64_t segment, const int16_t* whole, int64_t depth) {
                                 x.lay_out<Codes>(row, segment, whole, depth);
                             });
            shares.take([&](int64_t part, int64_t p) {
                const int64_t first = part * cut.part_rows;
                const int64_t end = std::min(cut.rows, first + cut.part_rows);
                if (first >= end) return;
                alignas(VECTOR_BYTES) float totals[AMX_BLOCK * PANELC];
                std::memset(totals, 0, (end - first) * PANELC * sizeof(float));
                integers_panel_amx<Codes>(a, shape, block, x, first, end, p, totals);
                for (int64_t row = first; row < end; ++row)
                    finish_codes<bf16>(a, start, row, p, 0, totals + (row - first) * PANELC);
            });
            if (start + AMX_BLOCK < a.rows) {
#pragma omp barrier
            }
        }
    }
}
#endif

template <class Codes>
void linear_integers(const CodesLinearArgs& a) {
    if (!a.rows || !a.columns) return;
#if HAVE_AMX
    if (a.rows >= INTEGERS_AMX_FROM && amx_usable()) return linear_integers_amx<Codes>(a);
#endif
    linear_integers_vectors<Codes>(a);
}
