// int8 rows times an int8 weight: exact sums of s8 x s8 in int32 over the inputs that share a scale of
// the row (a group, or all); each is scaled in fp32 and added to the total, group after group.
//
// A panel holds 2 W output features as [K / 4][2 W][4] bytes, code + 128: the instructions multiply
// unsigned by signed, and 128 times the sum of a row's codes is taken off again. int32 wraps, so that
// only the true sum has to fit: K <= 133,000.
//
// Without VNNI the products of two neighbours are added in int16, which holds them unless the two codes
// of x add up to more than 128 either way. Few do. At most 64 of each is left in such a pair, and the
// rest is multiplied apart: three instructions for 64 products where exact int16 sums take four.

#pragma once

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

// acc + the sums over 4 products of unsigned bytes of w and signed bytes of x, lane by lane.
#if defined(__AVX512VNNI__)
constexpr bool SPLITS = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX512BW__)
constexpr bool SPLITS = true;
INLINE vi add_products(vi acc, vi w, vi x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
    return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool SPLITS = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool SPLITS = true;
INLINE vi add_products(vi acc, vi w, vi x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr bool SPLITS = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    for (int byte = 0; byte < 4; ++byte)
        acc += (vi)((vu)w >> (8 * byte) & 255u) * ((vi)((vu)x << (24 - 8 * byte)) >> 24);
    return acc;
}
#endif

struct Quad {
    int32_t at, codes;  // four codes of a row from input feature 4 * at on
};

// The rows of a block as the tiles read them, tile after tile: [K / 4][rows of the tile] quads, and
// [groups][rows of the tile] scales and first sums.
struct Int8Block {
    int64_t quads;          // K / 4, rounded up
    int64_t group, groups;  // quads of a group; groups of a row
    std::vector<int32_t> tiles, tile_sums;
    std::vector<float> tile_scales;
    std::vector<float> scales;  // [rows][groups]
    std::vector<int32_t> sums;  // of the codes of a group
    std::vector<int32_t> num_rest;
    std::vector<Quad> rest;  // [rows][quads], of which num_rest[row] are set

    void reserve(const Int8LinearArgs& a) {
        const size_t many = (size_t)std::min(a.rows, BLOCK);
        reserve_rows(a, many);
        grow(tiles, (many + 1) * quads);  // the last tile may have a row that is not needed
        grow(tile_sums, (many + 1) * groups);
        grow(tile_scales, (many + 1) * groups);
        if (SPLITS) grow(rest, many * quads);
        grow(num_rest, many);
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

// Leaves pairs of codes that int16 holds, times 255; what is taken away is returned.
INLINE int32_t split_pairs(int32_t& quad) {
    int8_t kept[4], taken[4] = {};
    std::memcpy(kept, &quad, 4);
    for (int i = 0; i < 4; i += 2)
        if (std::abs(kept[i] + kept[i + 1]) > 128)
            for (int j = i; j < i + 2; ++j) {
                const int8_t bounded = std::clamp<int8_t>(kept[j], -64, 64);
                taken[j] = kept[j] - bounded;
                kept[j] = bounded;
            }
    int32_t rest;
    std::memcpy(&quad, kept, 4);
    std::memcpy(&rest, taken, 4);
    return rest;
}

// Row `row` of a block from its codes [4 * quads], zeros past K.
template <bool SPLIT = SPLITS>
INLINE void lay_out(Int8Block& block, int64_t row, const int8_t* codes, const Tiling& tiling) {
    const int64_t first = tiling.first_of(row), step = tiling.width_at(first);
    int32_t* to = block.tiles.data() + first * block.quads + (row - first);
    Quad* rest = block.rest.data() + row * block.quads;
    int32_t count = 0;
    for (int64_t at = 0; at < block.quads; ++at) {
        int32_t quad;
        std::memcpy(&quad, codes + 4 * at, 4);
        if constexpr (SPLIT)
            if (const int32_t over = split_pairs(quad)) rest[count++] = {(int32_t)at, over};
        to[at * step] = quad;
    }
    block.add_up(row, codes);
    if constexpr (SPLIT) block.num_rest[row] = count;
    const int64_t at = first * block.groups + (row - first);
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t place = row * block.groups + g;
        block.tile_scales[at + g * step] = block.scales[place];
        block.tile_sums[at + g * step] = (int32_t)(-128u * (uint32_t)block.sums[place]);
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

// sums + what split_pairs has taken from the quads of a row before `end`; `next` is the first of them.
INLINE void add_rest(const Int8Block& block, int64_t row, int64_t end, const uint8_t* weights,
                     int32_t& next, vi (&sums)[2]) {
    const Quad* rest = block.rest.data() + row * block.quads;
    for (; next < block.num_rest[row] && rest[next].at < end; ++next)
        UNROLL for (int n = 0; n < 2; ++n) {
            const int64_t at = (int64_t)rest[next].at * 4 * PANEL8 + n * VECTOR_BYTES;
            sums[n] = add_products(sums[n], load_bits(weights + at), rest[next].codes - vi{});
        }
}

// out[R][PANEL8] = the totals of R rows, of which `rows` count, and one panel: each group's sum times
// its scale, added up in one chain of fused multiply-adds, group after group.
template <int R>
void int8_tile(const Int8Block& block, int64_t row, int64_t rows, const uint8_t* weights, float* out) {
    const int32_t* x = block.tiles.data() + row * block.quads;
    const int32_t* sums = block.tile_sums.data() + row * block.groups;
    const float* scales = block.tile_scales.data() + row * block.groups;
    int32_t next[R] = {};
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
            UNROLL for (int r = 0; r < R; ++r) {
                const vi codes = x[at * R + r] - vi{};
                acc[r][0] = add_products(acc[r][0], w[0], codes);
                acc[r][1] = add_products(acc[r][1], w[1], codes);
            }
        }
        UNROLL for (int r = 0; r < R; ++r) {
            if constexpr (SPLITS)
                if (r < rows) add_rest(block, row + r, end, weights, next[r], acc[r]);
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
