// Rows of x times a weight of 4-bit codes (any table of 16 values: int4, nf4, mxfp4), of 8-bit codes in groups,
// or of E4M3 (in groups, or rows with rows of x in E4M3), with fp32 sums. The codes become fp32 in registers: for one tile of rows as they are used, for several once for
// all of them, a segment at a time.
//
// A panel holds 2 W output features, the input features outermost: 4-bit [K / 8][2 W] words of 8 codes,
// 8-bit [K / 4][2 W] words of 4, E4M3 [K][2 W] bytes. Each element is the sum over segments (at most 128 inputs of one group) of
// scale * (sum over the segment, k ascending), whatever the number of rows. Groups are padded to
// whole words.

#pragma once

#include "export.h"
#include "matmul/weight_codes.h"
#include "quantize_rows.h"
#include "matmul/tiling.h"

constexpr int64_t SEGMENT = 128;

struct CodesLinearArgs {
    int64_t dtype;
    const void* x;
    int64_t x_stride;
    const uint8_t* packed;
    const float* table;     // [16] of 4-bit codes, else null
    const float* scales;    // [panels][groups][PANELC]; E4M3 whose rows are rounded: [columns]
    const float* shifts;    // [panels][groups][PANELC], added to the table's values; or null
    const float* bias;      // [columns] or null
    void* out;
    int64_t out_stride, rows, columns, depth, group, threads;
    int64_t bits;  // of integer codes: 4 (the table is -8 to 7) or 8 (code - 128); E4M3_GROUPS; else 0
};
constexpr int64_t E4M3_GROUPS = -8;  // E4M3 with scales of groups, 256 times too large, as E4m3's values are small
LAYOUT(CodesLinearArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(packed) FIELD(table) FIELD(scales) FIELD(shifts)
       FIELD(bias) FIELD(out) FIELD(out_stride) FIELD(rows) FIELD(columns) FIELD(depth) FIELD(group)
       FIELD(threads) FIELD(bits))

// E4M3 for rows that are rounded to E4M3 too, with a scale each.
INLINE bool is_e4m3(const CodesLinearArgs& a) { return !a.table && !a.bits; }

// The rows of a block in fp32, [padded K][rows of the tile], tile after tile.
struct CodesBlock {
    int64_t group, padded_group, depth;  // K with every group padded
    int64_t segments;                    // of a group
    std::vector<float> tiles, scales;
    std::vector<float> sums;  // [rows][segments of all groups], where codes are shifted

    void measure(const CodesLinearArgs& a, int run) {
        group = a.group;
        padded_group = (group + run - 1) / run * run;
        segments = (padded_group + SEGMENT - 1) / SEGMENT;
        depth = groups(a) * padded_group;
    }
    void reserve(const CodesLinearArgs& a, int run) {
        measure(a, run);
        const size_t many = (size_t)std::min(a.rows, BLOCK);
        grow(tiles, (many + 1) * depth);
        grow(scales, many);
        if (a.shifts) grow(sums, many * groups(a) * segments);
    }
    int64_t num_segments() const { return depth / padded_group * segments; }
    int64_t start_of(int64_t segment) const {
        return segment / segments * padded_group + segment % segments * SEGMENT;
    }
    int64_t depth_of(int64_t segment) const {
        return std::min(SEGMENT, padded_group - segment % segments * SEGMENT);
    }
    static int64_t groups(const CodesLinearArgs& a) { return (a.depth + a.group - 1) / a.group; }
};

template <class T>
INLINE void prepare_row(const CodesLinearArgs& a, CodesBlock& block, int64_t start, int64_t row,
                        const Tiling& tiling) {
    static thread_local std::vector<float> own;
    grow(own, a.depth + W);
    float* values = own.data();
    const T* from = (const T*)a.x + (start + row) * a.x_stride;
    vi top = {};
    for (int64_t k = 0; k < a.depth; k += W) {
        const vf x = load_up_to(from + k, a.depth - k);
        store(values + k, x);
        top = max_bits(top, x);
    }
    if (is_e4m3(a)) {
        const float scale = block.scales[row] = scale_of(top, 448.0f);
        for (int64_t k = 0; k < a.depth; k += W)
            store(values + k, scale == scale ? round_e4m3(load(values + k) / scale) : vf{});
    }
    const int64_t first = tiling.first_of(row), step = tiling.width_at(first);
    float* to = block.tiles.data() + first * block.depth + (row - first);
    float* sums = block.sums.data() + row * CodesBlock::groups(a) * block.segments;
    for (int64_t g = 0, k = 0; k < a.depth; ++g, k += block.group) {
        const int64_t count = std::min(block.group, a.depth - k);
        for (int64_t i = 0; i < block.padded_group; ++i, to += step)
            *to = i < count ? values[k + i] : 0.0f;
        for (int64_t s = 0; a.shifts && s < block.segments; ++s) {
            float sum = 0;
            const int64_t end = std::min(count, (s + 1) * SEGMENT);
            for (int64_t i = s * SEGMENT; i < end; ++i) sum += values[k + i];
            *sums++ = sum;
        }
    }
}

// acc[r][n] = sum over one segment, k ascending.
template <class Codes, int R>
INLINE void add_segment(const float* table, const uint8_t* weights, const float* x, int64_t depth,
                        vf (&acc)[R][2]) {
    Codes codes;
    codes.table = table;
    for (int64_t k = 0; k < depth; k += Codes::RUN) {
        codes.take(weights + k / Codes::RUN * Codes::RUN_BYTES);
        UNROLL for (int j = 0; j < Codes::RUN; ++j) {
            const vf w[2] = {codes.value(j, 0), codes.value(j, 1)};
            UNROLL for (int r = 0; r < R; ++r) {
                const float value = x[(k + j) * R + r];
                acc[r][0] += value * w[0];
                acc[r][1] += value * w[1];
            }
        }
    }
}

// The same with the values of the segment at hand, [depth][PANELC].
template <int R>
INLINE void add_segment(const float* values, const float* x, int64_t depth, vf (&acc)[R][2]) {
    for (int64_t k = 0; k < depth; ++k) {
        const vf w[2] = {load(values + k * PANELC), load(values + k * PANELC + W)};
        UNROLL for (int r = 0; r < R; ++r) {
            const float value = x[k * R + r];
            acc[r][0] += value * w[0];
            acc[r][1] += value * w[1];
        }
    }
}

// totals[R][PANELC] += scale * (acc + shift * sum of x) of one segment.
template <int R>
INLINE void add_scaled(const CodesLinearArgs& a, const CodesBlock& block, int64_t panel,
                       int64_t segment, int64_t row, int64_t rows, vf (&acc)[R][2], float* totals) {
    const int64_t groups = CodesBlock::groups(a);
    const int64_t at = (panel * groups + segment / block.segments) * PANELC;
    const float* sums = block.sums.data() + row * groups * block.segments + segment;
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < 2; ++n) {
            float* to = totals + r * PANELC + n * W;
            if (a.shifts && r < rows)
                acc[r][n] += sums[r * groups * block.segments] * load(a.shifts + at + n * W);
            if (is_e4m3(a))
                store(to, load(to) + acc[r][n]);
            else
                store(to, load(to) + acc[r][n] * load(a.scales + at + n * W));
        }
}

template <class T>
INLINE void finish_codes(const CodesLinearArgs& a, int64_t start, int64_t row, int64_t panel,
                         float row_scale, const float* totals) {
    T* out = (T*)a.out + (start + row) * a.out_stride;
    for (int n = 0; n < 2; ++n) {
        const int64_t at = panel * PANELC + n * W, left = a.columns - at;
        if (left <= 0) break;
        vf y = load(totals + n * W);
        if (is_e4m3(a)) y *= row_scale * (256.0f * load_up_to(a.scales + at, left));
        if (a.bias) y += load_up_to(a.bias + at, left);
        store_up_to(out + at, y, left);
    }
}

// One tile of rows: the codes are turned into values as they are used.
template <class Codes, int R>
INLINE void tile_from_codes(const CodesLinearArgs& a, const CodesBlock& block, int64_t panel,
                            const uint8_t* weights, int64_t row, int64_t rows, float* totals) {
    for (int64_t segment = 0; segment < block.num_segments(); ++segment) {
        const int64_t k = block.start_of(segment);
        vf acc[R][2] = {};
        add_segment<Codes, R>(a.table, weights + k / Codes::RUN * Codes::RUN_BYTES,
                              block.tiles.data() + row * block.depth + k * R,
                              block.depth_of(segment), acc);
        add_scaled<R>(a, block, panel, segment, row, rows, acc, totals);
    }
}

// Several tiles of rows: the values of a segment are written down once for all.
template <class Codes>
INLINE void tiles_from_values(const CodesLinearArgs& a, const CodesBlock& block,
                              const Tiling& tiling, int64_t part, int64_t panel,
                              const uint8_t* weights, float* totals) {
    alignas(VECTOR_BYTES) float values[SEGMENT * PANELC];
    for (int64_t segment = 0; segment < block.num_segments(); ++segment) {
        const int64_t k = block.start_of(segment), depth = block.depth_of(segment);
        Codes codes;
        codes.table = a.table;
        for (int64_t i = 0; i < depth; i += Codes::RUN) {
            codes.take(weights + (k + i) / Codes::RUN * Codes::RUN_BYTES);
            UNROLL for (int j = 0; j < Codes::RUN; ++j)
                UNROLL for (int n = 0; n < 2; ++n)
                    store(values + (i + j) * PANELC + n * W, codes.value(j, n));
        }
        tiling.each_tile(part, [&](int64_t row, int64_t rows, auto width) {
            constexpr int R = width.value;
            vf acc[R][2] = {};
            add_segment<R>(values, block.tiles.data() + row * block.depth + k * R, depth, acc);
            add_scaled<R>(a, block, panel, segment, row, rows, acc,
                          totals + (row - part * tiling.part_rows) * PANELC);
        });
    }
}

// One panel times the rows of one part of a block: totals[rows of the part][PANELC].
template <class Codes>
void codes_panel(const CodesLinearArgs& a, const CodesBlock& block, const Tiling& tiling,
                 int64_t part, int64_t panel, float* totals) {
    const int64_t first = part * tiling.part_rows;
    const uint8_t* weights = a.packed + panel * (block.depth / Codes::RUN) * Codes::RUN_BYTES;
    if (std::min(tiling.rows - first, tiling.part_rows) > tiling.tile)
        tiles_from_values<Codes>(a, block, tiling, part, panel, weights, totals);
    else
        tiling.each_tile(part, [&](int64_t row, int64_t rows, auto width) {
            tile_from_codes<Codes, width.value>(a, block, panel, weights, row, rows, totals);
        });
}

template <class T, class Codes>
void linear_codes(const CodesLinearArgs& a) {
    static thread_local CodesBlock own;
    static thread_local Shares own_shares;
    CodesBlock& block = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    block.reserve(a, Codes::RUN);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const Tiling tiling(std::min(BLOCK, a.rows - start), panels, threads);
#pragma omp single nowait
        shares.cut(tiling.parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < tiling.rows; ++row)
            prepare_row<T>(a, block, start, row, tiling);
        shares.take([&](int64_t part, int64_t p) {
            const int64_t first = part * tiling.part_rows;
            const int64_t end = std::min(tiling.rows, first + tiling.part_rows);
            if (first >= end) return;
            alignas(VECTOR_BYTES) float totals[(BLOCK + 1) * PANELC];
            std::memset(totals, 0, (end - first + 1) * PANELC * sizeof(float));
            codes_panel<Codes>(a, block, tiling, part, p, totals);
            for (int64_t row = first; row < end; ++row)
                finish_codes<T>(a, start, row, p, block.scales[row],
                                totals + (row - first) * PANELC);
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}

template <class Codes>
void linear_integers(const CodesLinearArgs& a);  // amx_integers.h
struct Int4Codes;                                // linear_integers.h
struct Int8Codes;

template <class T>
void linear_codes(const CodesLinearArgs& a) {
    if (!a.rows || !a.columns) return;
    if constexpr (sizeof(T) == 2) {
        if (a.bits == 4) return linear_integers<Int4Codes>(a);
        if (a.bits == 8) return linear_integers<Int8Codes>(a);
    } else if (a.bits == 8) {
        return linear_codes<T, Bytes>(a);
    }
    if (a.table)
        linear_codes<T, Nibbles>(a);
    else
        linear_codes<T, E4m3>(a);
}
