// int8 rows times a weight of 4-bit codes with scales of groups, as files hold it: products are summed
// exactly in int32 over the inputs that share a scale of the row, and each sum is scaled by both in fp32
// and added to the total, group after group.
//
// Panels are those of open_int4.h. Codes come times 8, by one shift and one mask. A zero point (8 of a
// weight that has none) is taken off in integers: for few rows off the sum of the products (zero times
// the sum of the row's codes), for many off the codes as they are opened, 128 more than they stand for.
// Either way the sum is the same integer. Zero points that are no integers (GGUF's minimums) take a
// multiply-add of their own.

#pragma once

#include "matmul/int8_vectors.h"
#include "matmul/linear_lut.h"

struct Int4GroupsArgs {
    int64_t dtype;
    const void* x;  // rows of dtype, or codes if there are scales of x
    int64_t x_stride;
    const float* x_scales;  // [rows, groups], or null
    const uint8_t* packed;
    const float* scales;    // [panels][weight groups][PANELC]
    const uint8_t* zeros;   // the same shape, up to 16
    const float* minimums;  // instead of zeros: what is added to each weight of a group; or null
    const float* bias;      // [columns] or null
    void* out;
    int64_t out_stride, rows, columns, depth;
    int64_t group;         // inputs that share a scale of x: 32 or a multiple of 64, or depth
    int64_t weight_group;  // a multiple of `group`, or at least depth
    int64_t threads;
};
LAYOUT(Int4GroupsArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(x_scales) FIELD(packed) FIELD(scales) FIELD(zeros)
       FIELD(minimums) FIELD(bias) FIELD(out) FIELD(out_stride) FIELD(rows) FIELD(columns) FIELD(depth)
       FIELD(group) FIELD(weight_group) FIELD(threads))

typedef int8_t vc4 __attribute__((vector_size(VECTOR_BYTES)));

constexpr int64_t OPEN_FROM_TILES = 3;  // of rows: fewer open codes in registers, each for itself
constexpr int64_t OPENED = 2048;    // inputs whose codes are opened at once: 64 KB

// What one group of a panel is scaled by.
struct Int4Group {
    vf scales[2], minimums[2];
    vi zeros[2];

    INLINE Int4Group(const Int4GroupsArgs& a, int64_t groups, int64_t panel, int64_t inputs_before) {
        const int64_t at = (panel * groups + inputs_before / a.weight_group) * PANELC;
        UNROLL for (int n = 0; n < 2; ++n) {
            scales[n] = load(a.scales + at + n * W);
            minimums[n] = a.minimums ? load(a.minimums + at + n * W) : vf{};
            zeros[n] = a.minimums ? vi{} : 8 * load_bytes(a.zeros + at + n * W);
        }
    }
};

// A product as the functions below share it.
struct GroupsProduct {
    const Int4GroupsArgs& a;
    const Int8Block& block;
    int64_t weight_groups, words;  // of a row

    GroupsProduct(const Int4GroupsArgs& a, const Int8Block& block)
        : a(a), block(block),
          weight_groups(std::max<int64_t>(1, (a.depth + a.weight_group - 1) / a.weight_group)),
          words(block.quads / 2) {}
    const uint8_t* panel(int64_t p) const { return a.packed + p * words * WORD_BYTES; }
    INLINE Int4Group group(int64_t p, int64_t g) const {
        return Int4Group(a, weight_groups, p, 4 * g * block.group);
    }
};

constexpr int32_t EIGHT_TIMES = 0x78787878;

// The codes of one group, 8 u - zero + 128, as [K / 4][PANELC][4].
INLINE void open_groups(const uint8_t* from, int64_t words, const Int4Group& by, uint8_t* to) {
    vc4 add[2];
    UNROLL for (int n = 0; n < 2; ++n) add[n] = (vc4)((vu)(128 - by.zeros[n]) * 0x01010101u);
    for (int64_t word = 0; word < words; ++word, from += WORD_BYTES, to += 2 * WORD_BYTES)
        UNROLL for (int n = 0; n < 2; ++n) {
            prefetch_ahead(from + n * VECTOR_BYTES);
            const vi codes = load_bits(from + n * VECTOR_BYTES);
            const vc4 low = (vc4)(codes << 3 & EIGHT_TIMES) + add[n];
            const vc4 high = (vc4)((vi)((vu)codes >> 1) & EIGHT_TIMES) + add[n];
            std::memcpy(to + n * VECTOR_BYTES, &low, VECTOR_BYTES);
            std::memcpy(to + WORD_BYTES + n * VECTOR_BYTES, &high, VECTOR_BYTES);
        }
}

// total + the group's sum, scaled; `x_sum`: of the row's codes, scaled.
INLINE vf add_scaled_group(vf total, vi sums, vf by, float x_sum, vf minimum, bool has_minimums) {
    total = multiply_add(by, __builtin_convertvector(sums, vf), total);
    return has_minimums ? multiply_add(x_sum, minimum, total) : total;
}

// totals[R][PANELC] += the groups [first, end) of R rows and one panel. `weights`: of these groups, words
// of codes, or opened ones.
template <int R, bool IS_OPEN>
void groups_tile(const GroupsProduct& product, int64_t row, int64_t panel, int64_t first, int64_t end,
               const uint8_t* weights, float* out) {
    const Int8Block& block = product.block;
    const int32_t* x = block.tiles.data() + row * block.quads + first * block.group * R;
    const int32_t* sums = block.tile_sums.data() + row * block.groups;
    const float* scales = block.tile_scales.data() + row * block.groups;
    constexpr bool IN_REGISTERS = 2 * R <= MAX_ROWS;
    const bool has_minimums = product.a.minimums;
    vf totals[R][2];
    if constexpr (IN_REGISTERS)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) totals[r][n] = load(out + r * PANELC + n * W);
    for (int64_t g = first; g < end; ++g) {
        const Int4Group by = product.group(panel, g);
        const int64_t words = (std::min(block.quads, (g + 1) * block.group) - g * block.group) / 2;
        vi acc[R][2];
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n)
                acc[r][n] = IS_OPEN ? sums[g * R + r] - vi{} : by.zeros[n] * (sums[g * R + r] >> 7);
        for (int64_t word = 0; word < words; ++word, x += 2 * R) {
            vi w[2][2];
            if constexpr (IS_OPEN) {
                UNROLL for (int i = 0; i < 4; ++i)
                    w[i / 2][i % 2] = load_bits(weights + i * VECTOR_BYTES);
                weights += 2 * WORD_BYTES;
            } else {
                UNROLL for (int n = 0; n < 2; ++n) {
                    prefetch_ahead(weights + n * VECTOR_BYTES);
                    const vi codes = load_bits(weights + n * VECTOR_BYTES);
                    w[0][n] = codes << 3 & EIGHT_TIMES;
                    w[1][n] = (vi)((vu)codes >> 1) & EIGHT_TIMES;
                }
                weights += WORD_BYTES;
            }
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int half = 0; half < 2; ++half) {
                    const vi codes = x[half * R + r] - vi{};
                    acc[r][0] = add_products(acc[r][0], w[half][0], codes);
                    acc[r][1] = add_products(acc[r][1], w[half][1], codes);
                }
        }
        UNROLL for (int r = 0; r < R; ++r) {
            const float scale = scales[g * R + r], sum = scale * (float)(sums[g * R + r] >> 4);
            UNROLL for (int n = 0; n < 2; ++n) {
                float* to = out + r * PANELC + n * W;
                const vf total = IN_REGISTERS ? totals[r][n] : load(to);
                const vf next = add_scaled_group(total, acc[r][n], scale * by.scales[n], -sum,
                                               by.minimums[n], has_minimums);
                if constexpr (IN_REGISTERS)
                    totals[r][n] = next;
                else
                    store(to, next);
            }
        }
    }
    if constexpr (IN_REGISTERS)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) store(out + r * PANELC + n * W, totals[r][n]);
}

// One panel times the rows of one part: totals[rows of the part, rounded up to whole tiles][PANELC].
INLINE void groups_panel(const GroupsProduct& product, const Tiling& tiling, int64_t part, int64_t panel,
                       float* totals) {
    const Int8Block& block = product.block;
    const int64_t first = part * tiling.part_rows;
    const int64_t rows = std::min(tiling.rows - first, tiling.part_rows);
    const uint8_t* weights = product.panel(panel);
    if (ADDS_IN_INT16 || rows <= (OPEN_FROM_TILES - 1) * tiling.tile) {
        tiling.each_tile(part, [&](int64_t row, int64_t, auto width) {
            groups_tile<width.value, false>(product, row, panel, 0, block.groups, weights,
                                          totals + (row - first) * PANELC);
        });
        return;
    }
    static thread_local std::vector<uint8_t> memory;
    grow(memory, std::min(block.quads, std::max(OPENED / 4, block.group)) * WORD_BYTES + 64);
    uint8_t* codes = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
    const int64_t step = std::max<int64_t>(1, OPENED / 4 / block.group);
    for (int64_t from = 0; from < block.groups; from += step) {
        const int64_t to = std::min(block.groups, from + step);
        for (int64_t g = from; g < to; ++g) {
            const int64_t begin = g * block.group, end = std::min(block.quads, begin + block.group);
            open_groups(weights + begin / 2 * WORD_BYTES, (end - begin) / 2, product.group(panel, g),
                      codes + (begin - from * block.group) * WORD_BYTES);
        }
        tiling.each_tile(part, [&](int64_t row, int64_t, auto width) {
            groups_tile<width.value, true>(product, row, panel, from, to, codes,
                                         totals + (row - first) * PANELC);
        });
    }
}

template <class T>
INLINE void finish_groups(const Int4GroupsArgs& a, int64_t row, int64_t panel, const float* totals) {
    T* out = (T*)a.out + row * a.out_stride;
    for (int n = 0; n < 2; ++n) {
        const int64_t at = panel * PANELC + n * W, left = a.columns - at;
        if (left <= 0) break;
        vf y = load(totals + n * W);
        if (a.bias) y += load_up_to(a.bias + at, left);
        store_up_to(out + at, y, left);
    }
}

// The part of the arguments that int8's preparation of rows reads.
INLINE Int8LinearArgs rows_of(const Int4GroupsArgs& a) {
    Int8LinearArgs rows = {};
    rows.dtype = a.dtype, rows.x = a.x, rows.x_stride = a.x_stride, rows.x_scales = a.x_scales;
    rows.rows = a.rows, rows.columns = a.columns, rows.depth = a.depth, rows.group = a.group;
    rows.weight_group = a.weight_group;
    return rows;
}

// `codes_of`, with an eighth of the scales: the weight's codes come times 8.
template <class T>
INLINE const int8_t* int4_codes_of(const Int8LinearArgs& a, Int8Block& block, int64_t start,
                                   int64_t row) {
    const int8_t* codes = codes_of<T>(a, block, start, row);
    float* scales = block.scales.data() + row * block.groups;
    for (int64_t g = 0; g < block.groups; ++g) scales[g] *= 0.125f;
    return codes;
}

template <class T>
void linear_int4_groups_vectors(const Int4GroupsArgs& a) {
    static thread_local Int8Block own;
    static thread_local Shares own_shares;
    Int8Block& block = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    const Int8LinearArgs of_rows = rows_of(a);
    block.reserve(of_rows);
    const GroupsProduct product(a, block);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const Tiling tiling(std::min(BLOCK, a.rows - start), panels, threads,
                            int8_rows(a.rows, block.groups));
#pragma omp single nowait
        shares.cut(tiling.parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < tiling.rows; ++row) {
            const int8_t* codes = int4_codes_of<T>(of_rows, block, start, row);
            lay_out<false>(block, row, codes, tiling);
        }
        shares.take([&](int64_t part, int64_t p) {
            const int64_t first = part * tiling.part_rows;
            const int64_t end = std::min(tiling.rows, first + tiling.part_rows);
            if (first >= end) return;
            alignas(VECTOR_BYTES) float totals[(BLOCK + 1) * PANELC];
            std::memset(totals, 0, (end - first + 1) * PANELC * sizeof(float));
            groups_panel(product, tiling, part, p, totals);
            for (int64_t row = first; row < end; ++row)
                finish_groups<T>(a, start + row, p, totals + (row - first) * PANELC);
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}
