// Rows of bf16 times a weight of integer codes in groups (4 or 8 bits), in integers: the activations of
// a segment become int16 with one power of two for all of them, products with codes are summed in int32,
// exactly, and each segment's sum is scaled once. For 4 bits that is a quarter of the instructions that
// fp32 takes to unpack.
//
// bf16 has 8 significant bits and int16 has 15 and a sign: a value within a factor of 128 of its
// segment's largest is held exactly, a smaller one to 2^-15 of that largest.
//
// The weight is packed as in linear_lut.h: words of 8 or 4 codes. `word >> BITS j` has codes j and
// j + RUN / 2 in the low bits of its halves, so x is laid out in the pairs (x[j], x[j + RUN / 2]).

#pragma once

#include "matmul/linear_lut.h"

// How codes lie in a word, and the code of 0 where a group has no zero point.
struct Int4Codes {
    static constexpr int BITS = 4, RUN = 8, CENTRE = 8;
    static constexpr int32_t LOW = 0x000F000F;
};
struct Int8Codes {
    static constexpr int BITS = 8, RUN = 4, CENTRE = 128;
    static constexpr int32_t LOW = 0x00FF00FF;
};

// The rows of a block: [padded K / RUN][RUN / 2 pairs][rows of the tile], tile after tile.
struct IntegersBlock {
    int64_t pairs, segments;  // of a row
    std::vector<int32_t> tiles;
    std::vector<float> scales;  // [rows][segments]
    std::vector<int32_t> sums;  // of the int16 values

    void reserve(const CodesBlock& shape, int64_t rows) {
        const size_t many = (size_t)std::min(rows, BLOCK);
        pairs = shape.depth / 2;
        grow(tiles, (many + 1) * pairs);
        reserve_rows(shape, many);
    }
    void reserve_rows(const CodesBlock& shape, int64_t rows) {
        segments = shape.num_segments();
        grow(scales, rows * segments);
        grow(sums, rows * segments);
    }
};

// 2^power; powers beyond what a float has are cut.
INLINE float power_of_two(int32_t power) {
    const int32_t bits = std::clamp(power + 127, 1, 254) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// n values as int16 times `scale`, which is returned: NaN if one of them is not finite.
INLINE float to_int16(const float* values, int64_t n, int16_t* to, int32_t& sum) {
    vi top = {};
    for (int64_t i = 0; i < n; i += W) top = max_bits(top, load_up_to(values + i, n - i));
    int32_t largest = 0;
    for (int lane = 0; lane < W; ++lane) largest = std::max(largest, top[lane]);
    if (largest >= 0x7f800000) {
        std::memset(to, 0, n * sizeof(int16_t));
        return std::numeric_limits<float>::quiet_NaN();
    }
    const int32_t power = std::max((largest >> 23) - 127, -100);  // 2^power <= the largest
    const float up = power_of_two(14 - power);
    typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES / 2)));
    vi total = {};
    for (int64_t i = 0; i < n; i += W) {
        const vi whole = (vi)(load_up_to(values + i, n - i) * up + ROUND) - 0x4B400000;
        const vs narrow = __builtin_convertvector(whole, vs);
        std::memcpy(to + i, &narrow, std::min<int64_t>(W, n - i) * sizeof(int16_t));
        total += whole;  // 0 past the end
    }
    for (int lane = 0; lane < W; ++lane) sum += total[lane];
    return power_of_two(power - 14);
}

// write(segment, int16 values, their number) for each segment of a row, whose scales and sums go into
// the block.
template <class Write>
INLINE void each_segment(const CodesLinearArgs& a, const CodesBlock& shape, IntegersBlock& block,
                         int64_t start, int64_t row, Write&& write) {
    const bf16* from = (const bf16*)a.x + (start + row) * a.x_stride;
    for (int64_t segment = 0; segment < block.segments; ++segment) {
        float values[SEGMENT + W];
        int16_t whole[SEGMENT] = {};
        const int64_t group = segment / shape.segments, within = segment % shape.segments * SEGMENT;
        const int64_t k = group * shape.group + within;  // where it lies in x
        const int64_t n = std::max<int64_t>(
            0, std::min({a.depth - k, shape.group - within, shape.depth_of(segment)}));
        for (int64_t i = 0; i < n; i += W) store(values + i, load_up_to(from + k + i, n - i));
        int32_t sum = 0;
        block.scales[row * block.segments + segment] = to_int16(values, n, whole, sum);
        block.sums[row * block.segments + segment] = sum;
        write(segment, whole, shape.depth_of(segment));
    }
}

template <class Codes>
INLINE void prepare_integers_row(const CodesLinearArgs& a, const CodesBlock& shape, IntegersBlock& block,
                             int64_t start, int64_t row, const Tiling& tiling) {
    const int64_t first = tiling.first_of(row), step = tiling.width_at(first);
    int32_t* to = block.tiles.data() + first * block.pairs + (row - first);
    each_segment(a, shape, block, start, row, [&](int64_t, const int16_t* whole, int64_t depth) {
        constexpr int HALF = Codes::RUN / 2;
        for (int64_t i = 0; i < depth; i += Codes::RUN)
            for (int64_t j = i; j < i + HALF; ++j, to += step)
                *to = (int32_t)((uint16_t)whole[j] | (uint32_t)(uint16_t)whole[j + HALF] << 16);
    });
}

// Of one row and 4 bits. Half of the codes are multiplied where they stand, 16 times too large, into
// sums of their own (64 of them come to 2^29 at most), which saves most of the shifts.
INLINE void add_int4_row(const uint8_t* weights, const int32_t* x, int64_t depth, vi (&acc)[1][2]) {
    constexpr int32_t LOW = Int4Codes::LOW;
    vi high[2] = {};
    for (int64_t k = 0; k < depth; k += Int4Codes::RUN) {
        const uint8_t* from = weights + k / Int4Codes::RUN * WORD_BYTES;
        prefetch_ahead(from);
        prefetch_ahead(from + VECTOR_BYTES);
        UNROLL for (int n = 0; n < 2; ++n) {
            vu words = (vu)load_bits(from + n * VECTOR_BYTES);
            UNROLL for (int j = 0; j < 4; j += 2) {
                const int32_t* pairs = x + k / 2 + j;
                acc[0][n] = add_pairs(acc[0][n], (vi)words & LOW, pairs[0] - vi{});
                high[n] = add_pairs(high[n], (vi)words & (LOW << 4), pairs[1] - vi{});
                words >>= 8;
            }
        }
    }
    UNROLL for (int n = 0; n < 2; ++n) acc[0][n] += high[n] >> 4;
}

// acc[r][n] = the sum over one segment of codes (from 0 on) times int16 values.
template <class Codes, int R>
INLINE void add_integers(const uint8_t* weights, const int32_t* x, int64_t depth, vi (&acc)[R][2]) {
    if constexpr (R == 1 && Codes::BITS == 4) return add_int4_row(weights, x, depth, acc);
    for (int64_t k = 0; k < depth; k += Codes::RUN) {
        const uint8_t* from = weights + k / Codes::RUN * WORD_BYTES;
        prefetch_ahead(from);
        prefetch_ahead(from + VECTOR_BYTES);
        const vu words[2] = {(vu)load_bits(from), (vu)load_bits(from + VECTOR_BYTES)};
        UNROLL for (int j = 0; j < Codes::RUN / 2; ++j) {
            const vi w[2] = {(vi)(words[0] >> (Codes::BITS * j)) & Codes::LOW,
                             (vi)(words[1] >> (Codes::BITS * j)) & Codes::LOW};
            UNROLL for (int r = 0; r < R; ++r) {
                const vi pair = x[(k / 2 + j) * R + r] - vi{};
                acc[r][0] = add_pairs(acc[r][0], w[0], pair);
                acc[r][1] = add_pairs(acc[r][1], w[1], pair);
            }
        }
    }
}

// The same with the codes of the segment at hand, [depth / 2][PANELC] pairs.
template <int R>
INLINE void add_integers(const vi* codes, const int32_t* x, int64_t depth, vi (&acc)[R][2]) {
    for (int64_t k = 0; k < depth / 2; ++k)
        UNROLL for (int r = 0; r < R; ++r) {
            const vi pair = x[k * R + r] - vi{};
            acc[r][0] = add_pairs(acc[r][0], codes[2 * k], pair);
            acc[r][1] = add_pairs(acc[r][1], codes[2 * k + 1], pair);
        }
}

// What one segment of a panel is scaled by.
struct SegmentScales {
    vf scales[2], shifts[2];
    bool has_shifts;

    SegmentScales(const CodesLinearArgs& a, const CodesBlock& shape, int64_t panel, int64_t segment) {
        const int64_t at = (panel * CodesBlock::groups(a) + segment / shape.segments) * PANELC;
        has_shifts = a.shifts;
        for (int n = 0; n < 2; ++n) {
            __builtin_prefetch(a.scales + at + 4 * PANELC + n * W);
            scales[n] = load(a.scales + at + n * W);
            shifts[n] = has_shifts ? load(a.shifts + at + n * W) : vf{};
        }
    }
};

// totals[PANELC] += scale of the weight * scale of x * (acc + shift * sum), for one row. acc counts
// codes from the centre.
INLINE void add_integers_scaled(const SegmentScales& by, const IntegersBlock& block,
                                int64_t segment, int64_t row, const vi (&acc)[2], float* totals) {
    const int64_t place = row * block.segments + segment;
    const float scale = block.scales[place], sum = (float)block.sums[place];
    UNROLL for (int n = 0; n < 2; ++n) {
        vf y = __builtin_convertvector(acc[n], vf);
        if (by.has_shifts) y = multiply_add(sum, by.shifts[n], y);
        float* to = totals + n * W;
        store(to, multiply_add(y, scale * by.scales[n], load(to)));
    }
}

// One panel times the rows of one part of a block: totals[rows of the part][PANELC].
template <class Codes>
INLINE void integers_panel(const CodesLinearArgs& a, const CodesBlock& shape,
                           const IntegersBlock& block, const Tiling& tiling, int64_t part,
                           int64_t panel, float* totals) {
    constexpr int PAIRS = Codes::RUN / 2;  // of a word
    const int64_t first = part * tiling.part_rows;
    const uint8_t* weights = a.packed + panel * (shape.depth / Codes::RUN) * WORD_BYTES;
    const bool several = std::min(tiling.rows - first, tiling.part_rows) > tiling.tile;
    vi codes[SEGMENT];  // [SEGMENT / 2][2]
    for (int64_t segment = 0; segment < block.segments; ++segment) {
        const int64_t k = shape.start_of(segment), depth = shape.depth_of(segment);
        const uint8_t* from = weights + k / Codes::RUN * WORD_BYTES;
        const SegmentScales by(a, shape, panel, segment);
        for (int64_t i = 0; several && i < depth / 2; i += PAIRS)
            UNROLL for (int n = 0; n < 2; ++n) {
                const uint8_t* word = from + i / PAIRS * WORD_BYTES + n * VECTOR_BYTES;
                prefetch_ahead(word);
                const vu words = (vu)load_bits(word);
                UNROLL for (int j = 0; j < PAIRS; ++j)
                    codes[2 * (i + j) + n] = (vi)(words >> (Codes::BITS * j)) & Codes::LOW;
            }
        tiling.each_tile(part, [&](int64_t row, int64_t rows, auto width) {
            constexpr int R = width.value;
            const int32_t* x = block.tiles.data() + row * block.pairs + k / 2 * R;
            vi acc[R][2];
            UNROLL for (int r = 0; r < R; ++r) {
                const int32_t sum = r < rows ? block.sums[(row + r) * block.segments + segment] : 0;
                acc[r][0] = acc[r][1] = -Codes::CENTRE * sum - vi{};
            }
            if (several)
                add_integers<R>(codes, x, depth, acc);
            else
                add_integers<Codes, R>(from, x, depth, acc);
            UNROLL for (int r = 0; r < R; ++r)
                if (r < rows)
                    add_integers_scaled(by, block, segment, row + r, acc[r],
                                        totals + (row + r - first) * PANELC);
        });
    }
}

template <class Codes>
void linear_integers_vectors(const CodesLinearArgs& a) {
    if (!a.rows || !a.columns) return;
    static thread_local IntegersBlock own;
    static thread_local CodesBlock own_shape;
    static thread_local Shares own_shares;
    IntegersBlock& block = own;  // the caller's, for all threads
    CodesBlock& shape = own_shape;
    Shares& shares = own_shares;
    shape.measure(a, Codes::RUN);
    block.reserve(shape, a.rows);
    const int threads = (int)a.threads;
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
#pragma omp parallel num_threads(threads) if (a.columns * a.depth * a.rows > GRAIN)
    for (int64_t start = 0; start < a.rows; start += BLOCK) {
        const Tiling tiling(std::min(BLOCK, a.rows - start), panels, threads);
#pragma omp single nowait
        shares.cut(tiling.parts, panels, threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < tiling.rows; ++row)
            prepare_integers_row<Codes>(a, shape, block, start, row, tiling);
        shares.take([&](int64_t part, int64_t p) {
            const int64_t first = part * tiling.part_rows;
            const int64_t end = std::min(tiling.rows, first + tiling.part_rows);
            if (first >= end) return;
            alignas(VECTOR_BYTES) float totals[(BLOCK + 1) * PANELC];
            std::memset(totals, 0, (end - first) * PANELC * sizeof(float));
            integers_panel<Codes>(a, shape, block, tiling, part, p, totals);
            for (int64_t row = first; row < end; ++row)
                finish_codes<bf16>(a, start, row, p, 0, totals + (row - first) * PANELC);
        });
        if (start + BLOCK < a.rows) {
#pragma omp barrier
        }
    }
}
