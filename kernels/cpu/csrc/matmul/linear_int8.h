// int8 rows times an int8 weight: exact sums of s8 x s8 in int32 over the inputs that share a scale of
// the row (a group, or all); each is scaled in fp32 and added to the total, group after group.
//
// A panel holds 2 W output features as [K / 4][2 W][4] bytes, code + 128: the instructions multiply
// unsigned by signed, and 128 times the sum of a row's codes is taken off again. int32 wraps, so that
// only the true sum has to fit: K <= 133,000.
//
// Without VNNI the products of two neighbours are added in int16, which holds them while the two codes
// of x add up to 128 at most, either way. Where they have the same sign, the second is negated and the
// bytes of the weight that it meets are complemented (u becomes 255 - u): x u = -x (255 - u) + 255 x, and
// the last term is known before any weight is read.

#pragma once

#include "byte_products.h"
#include "export.h"
#include "matmul/tiling.h"
#include "quantize_rows.h"

constexpr int PANEL8 = 2 * W;
// Rows of a tile. With groups, 6 x 2 sums and as many totals fit 32 registers: faster from two tiles on
// than 12 rows with totals in memory; 7 and 8 rows are best served by one tile.
INLINE int int8_rows(int64_t rows, int64_t groups) {
    return groups == 1 ? MAX_ROWS : std::min(MAX_ROWS, rows <= 8 ? 8 : 6);
}

struct Int8LinearArgs {
    int64_t dtype;
    const void* x;  // rows of dtype, or codes if there are scales of x
    int64_t x_stride;
    const float* x_scales;  // [rows, groups], or null
    const uint8_t* packed;
    const float *scales, *bias;  // [columns]; bias may be null
    void* out;
    int64_t out_stride, rows, columns, depth;
    int64_t group;  // inputs that share a scale of x: 16, 32, a multiple of 64, or depth
    int64_t threads;
    // Of a weight in 4 bits (open_int4.h), else null: [panels][groups of weight_group inputs][PANEL8].
    const uint8_t *steps, *offsets;
    int64_t weight_group;  // a multiple of 8
    int64_t hadamard;      // transform rows of dtype before they are rounded
};
LAYOUT(Int8LinearArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(x_scales) FIELD(packed) FIELD(scales) FIELD(bias)
       FIELD(out) FIELD(out_stride) FIELD(rows) FIELD(columns) FIELD(depth) FIELD(group)
       FIELD(threads) FIELD(steps) FIELD(offsets) FIELD(weight_group) FIELD(hadamard))

struct Int8PackArgs {
    const int8_t* codes;
    int64_t stride;
    uint8_t* packed;
    int64_t columns, depth, threads;
};
LAYOUT(Int8PackArgs,
       FIELD(codes) FIELD(stride) FIELD(packed) FIELD(columns) FIELD(depth) FIELD(threads))

// Ints that four codes of a row take: their mask, too, where products are added in int16.
template <bool IN_INT16 = ADDS_IN_INT16>
constexpr int64_t QUAD_INTS = IN_INT16 ? 2 : 1;

// Four codes of a row, and the mask of those that were negated.
struct Quad {
    uint32_t codes, negated;
};

// Negates the second code of each pair with one sign. Codes are from -127 on.
INLINE Quad with_opposite_signs(uint32_t codes) {
    const uint32_t ones = (~(codes ^ codes >> 8) & 0x00800080u) << 1, mask = ones * 255;
    const uint32_t turned = codes ^ mask;  // by bytes, -x is ~x + 1: no carry may leave a byte
    return {((turned & 0x7f7f7f7fu) + ones) ^ (turned & 0x80808080u), mask};
}
// The codes of `quad` that were negated, added up.
INLINE int32_t sum_of_negated(Quad quad) {
    const uint32_t codes = quad.codes & quad.negated;
    return (int8_t)(codes >> 8) + (int8_t)(codes >> 24);
}

// The rows of a block as the tiles read them, tile after tile: [K / 4][rows of the tile] times four codes
// (and their mask, with ADDS_IN_INT16), and [groups][rows of the tile] scales and first sums.
struct Int8Block {
    int64_t quads;          // K / 4, rounded up
    int64_t group, groups;  // quads of a group; groups of a row
    std::vector<int32_t> tiles, tile_sums;
    std::vector<float> tile_scales;
    std::vector<float> scales;  // [rows][groups]
    std::vector<int32_t> sums;      // of the codes of a group
    std::vector<int32_t> run_sums;  // of shorter runs, in tiles (int4_runs.h)

    void reserve(const Int8LinearArgs& a) {
        const size_t many = (size_t)std::min(a.rows, BLOCK);
        reserve_rows(a, many);
        // The last tile may have a row that is not needed.
        grow(tiles, (many + 1) * quads * QUAD_INTS<>);
        grow(tile_sums, (many + 1) * groups);
        grow(tile_scales, (many + 1) * groups);
    }
    void reserve_rows(const Int8LinearArgs& a, int64_t rows) {
        quads = a.weight_group ? (a.depth + 7) / 8 * 2 : (a.depth + 3) / 4;  // whole words
        group = std::max<int64_t>(1, (a.group + 3) / 4);
        groups = std::max<int64_t>(1, (quads + group - 1) / group);
        grow(scales, rows * groups);
        grow(sums, rows * groups);
    }
    void add_up(int64_t row, const int8_t* codes) {
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t end = 4 * std::min(quads, (g + 1) * group);
            int32_t sum = 0;
            for (int64_t i = 4 * g * group; i < end; ++i) sum += codes[i];
            sums[row * groups + g] = sum;
        }
    }
};

// Row `row` of a block from its codes [4 * quads], zeros past K.
template <bool IN_INT16 = ADDS_IN_INT16>
INLINE void lay_out(Int8Block& block, int64_t row, const int8_t* codes, const Tiling& tiling) {
    const int64_t first = tiling.first_of(row), step = tiling.width_at(first);
    constexpr int64_t INTS = QUAD_INTS<IN_INT16>;
    int32_t* to = block.tiles.data() + INTS * (first * block.quads + (row - first));
    block.add_up(row, codes);
    const int64_t place = first * block.groups + (row - first);
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t end = std::min(block.quads, (g + 1) * block.group);
        int32_t negated = 0;
        for (int64_t at = g * block.group; at < end; ++at) {
            uint32_t four;
            std::memcpy(&four, codes + 4 * at, 4);
            if constexpr (IN_INT16) {
                const Quad quad = with_opposite_signs(four);
                negated += sum_of_negated(quad);
                std::memcpy(to + INTS * at * step, &quad, sizeof quad);
            } else {
                std::memcpy(to + INTS * at * step, &four, 4);
            }
        }
        const int64_t from = row * block.groups + g;
        block.tile_scales[place + g * step] = block.scales[from];
        block.tile_sums[place + g * step] =
            (int32_t)(-128u * (uint32_t)block.sums[from] - 255u * (uint32_t)negated);
    }
}

// The codes of a row, zeros past K; its scales go into the block.
template <class T>
INLINE const int8_t* codes_of(const Int8LinearArgs& a, Int8Block& block, int64_t start, int64_t row) {
    static thread_local std::vector<int8_t> codes;
    grow(codes, 4 * block.quads);
    std::memset(codes.data() + a.depth, 0, 4 * block.quads - a.depth);
    const int64_t from = (start + row) * a.x_stride;
    float* scales = block.scales.data() + row * block.groups;
    if (a.x_scales) {
        std::memcpy(codes.data(), (const int8_t*)a.x + from, a.depth);
        std::memcpy(scales, a.x_scales + (start + row) * block.groups, block.groups * sizeof(float));
    } else {
        quantize_row((const T*)a.x + from, a.depth, a.group, a.hadamard, codes.data(), scales);
    }
    return codes.data();
}

// acc += the products of four codes of each of R rows, at `x`, with a pair of vectors of the weight.
template <int R>
INLINE void add_quads(const int32_t* x, const vi (&w)[2], vi (&acc)[R][2]) {
    UNROLL for (int r = 0; r < R; ++r)
        if constexpr (ADDS_IN_INT16) {
            const vi codes = x[2 * r] - vi{}, negated = x[2 * r + 1] - vi{};
            acc[r][0] = add_products(acc[r][0], w[0] ^ negated, codes);
            acc[r][1] = add_products(acc[r][1], w[1] ^ negated, codes);
        } else {
            const vi codes = x[r] - vi{};
            acc[r][0] = add_products(acc[r][0], w[0], codes);
            acc[r][1] = add_products(acc[r][1], w[1], codes);
        }
}

// out[R][PANEL8] = the totals of R rows and one panel: each group's sum times its scale, added up in one
// chain of fused multiply-adds, group after group.
template <int R>
void int8_tile(const Int8Block& block, int64_t row, const uint8_t* weights, float* out) {
    const int32_t* x = block.tiles.data() + QUAD_INTS<> * row * block.quads;
    const int32_t* sums = block.tile_sums.data() + row * block.groups;
    const float* scales = block.tile_scales.data() + row * block.groups;
    constexpr bool IN_REGISTERS = 2 * R <= MAX_ROWS;
    vf totals[R][2] = {};
    if constexpr (!IN_REGISTERS) std::memset(out, 0, R * PANEL8 * sizeof(float));
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t end = std::min(block.quads, (g + 1) * block.group);
        vi acc[R][2];
        UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = sums[g * R + r] - vi{};
        for (int64_t at = g * block.group; at < end; ++at) {
            const uint8_t* pair = weights + at * 4 * PANEL8;
            prefetch_ahead(pair);
            prefetch_ahead(pair + VECTOR_BYTES);
            const vi w[2] = {load_bits(pair), load_bits(pair + VECTOR_BYTES)};
            add_quads<R>(x + QUAD_INTS<> * at * R, w, acc);
        }
        UNROLL for (int r = 0; r < R; ++r) {
            const float scale = scales[g * R + r];
            UNROLL for (int n = 0; n < 2; ++n) {
                float* to = out + r * PANEL8 + n * W;
                if constexpr (IN_REGISTERS)
                    totals[r][n] =
                        multiply_add(scale, __builtin_convertvector(acc[r][n], vf), totals[r][n]);
                else
                    store(to, multiply_add(scale, __builtin_convertvector(acc[r][n], vf), load(to)));
            }
        }
    }
    if constexpr (IN_REGISTERS)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) store(out + r * PANEL8 + n * W, totals[r][n]);
}

// y = total * scale of the column + bias, for one row and one panel.
template <class T>
INLINE void finish_int8(const Int8LinearArgs& a, int64_t row, int64_t panel, const float* totals) {
    T* out = (T*)a.out + row * a.out_stride;
    for (int n = 0; n < 2; ++n) {
        const int64_t at = panel * PANEL8 + n * W, left = a.columns - at;
        if (left <= 0) break;
        vf y = load(totals + n * W) * load_up_to(a.scales + at, left);
        if (a.bias) y += load_up_to(a.bias + at, left);
        store_up_to(out + at, y, left);
    }
}

INLINE void pack_int8(const Int8PackArgs& a) {
    const int64_t panels = (a.columns + PANEL8 - 1) / PANEL8, quads = (a.depth + 3) / 4;
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* to = a.packed + p * quads * 4 * PANEL8;
        for (int64_t k = 0; k < 4 * quads; k += 4)
            for (int64_t column = p * PANEL8; column < (p + 1) * PANEL8; ++column)
                for (int64_t j = k; j < k + 4; ++j)
                    *to++ = 128 + (column < a.columns && j < a.depth
                                       ? a.codes[column * a.stride + j]
                                       : 0);
    }
}
