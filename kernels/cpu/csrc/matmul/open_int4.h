// int8 weights kept in 4 bits: within a group of inputs, an output feature's codes are step * nibble +
// offset. They are opened to what linear_int8.h multiplies, whose products and sums they share (without
// VNNI: int4_runs.h).
//
// A panel is [K / 8][2 W] words; the low bits of byte i of a word are nibble i, the high bits nibble i + 4.
// A product of the bytes of a word with a step stays within each byte (15 x 17 = 255), so one
// multiplication in 16 bits serves two of them.

#pragma once

#include "matmul/linear_int8.h"

typedef uint16_t vu16 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t vu8 __attribute__((vector_size(VECTOR_BYTES)));
constexpr int64_t NIBBLES_BYTES = 4 * PANEL8;  // of a panel: one word of each output feature

struct Int4PackArgs {
    const uint8_t* codes;  // [columns][stride], as kernels/quant.py has them
    int64_t stride;
    uint8_t* packed;
    int64_t columns, depth, threads;
};
LAYOUT(Int4PackArgs,
       FIELD(codes) FIELD(stride) FIELD(packed) FIELD(columns) FIELD(depth) FIELD(threads))

// W bytes, one in each lane.
INLINE vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vi lanes;
    for (int lane = 0; lane < W; ++lane) lanes[lane] = p[lane];
    return lanes;
#endif
}

// The low byte of each lane in its four places, or (`ALTERNATE`) in the first and the third: one
// instruction, where a multiplication would take two.
template <bool ALTERNATE>
INLINE vi spread(vi bytes) {
#if defined(__AVX512BW__)
    const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C));
    const __mmask64 taken = ALTERNATE ? 0x5555555555555555 : ~0ull;
    return (vi)_mm512_maskz_shuffle_epi8(taken, (__m512i)bytes, places);
#else
    return (vi)((vu)bytes * (ALTERNATE ? 0x00010001u : 0x01010101u));  // may pass 31 bits
#endif
}

// How the nibbles of one group of a panel are opened to bytes, 128 more than the int8 codes.
struct Int4Opener {
    vu16 steps[2];
    vu8 offsets[2];

    // of the panel, and of its groups
    INLINE Int4Opener(const uint8_t* step, const uint8_t* offset) {
        UNROLL for (int n = 0; n < 2; ++n) {
            steps[n] = (vu16)spread<true>(load_bytes(step + n * W));
            offsets[n] = (vu8)spread<false>(load_bytes(offset + n * W));
        }
    }
    // codes[0 or 1][n]: the first four inputs of a word, or the last.
    INLINE void open(const uint8_t* word, vi (&codes)[2][2]) const {
        constexpr int32_t LOW = 0x0F0F0F0F;
        UNROLL for (int n = 0; n < 2; ++n) {
            prefetch_ahead(word + n * VECTOR_BYTES);
            const vi nibbles = load_bits(word + n * VECTOR_BYTES);
            codes[0][n] = (vi)((vu8)((vu16)(nibbles & LOW) * steps[n]) + offsets[n]);
            codes[1][n] = (vi)((vu8)((vu16)((vi)((vu)nibbles >> 4) & LOW) * steps[n]) + offsets[n]);
        }
    }
};

// The opened codes of a word, to where a panel of them has them.
INLINE void keep(const vi (&codes)[2][2], uint8_t* to) {
    UNROLL for (int i = 0; i < 4; ++i)
        std::memcpy(to + i * VECTOR_BYTES, &codes[i / 2][i % 2], VECTOR_BYTES);
}

// A weight in 4 bits, one panel of it.
struct Int4Panel {
    const uint8_t *words, *steps, *offsets;
    int64_t count, group;  // words of a row, and of a group

    Int4Panel(const Int8LinearArgs& a, int64_t panel)
        : count((a.depth + 7) / 8), group(std::max<int64_t>(1, a.weight_group / 8)) {
        const int64_t groups = (count + group - 1) / group;
        words = a.packed + panel * count * NIBBLES_BYTES;
        steps = a.steps + panel * groups * PANEL8;
        offsets = a.offsets + panel * groups * PANEL8;
    }
    INLINE Int4Opener opener(int64_t word) const {
        const int64_t at = word / group * PANEL8;
        return Int4Opener(steps + at, offsets + at);
    }
    // All of it, as [K / 4][PANEL8][4].
    INLINE void open(uint8_t* to) const {
        for (int64_t first = 0; first < count; first += group) {
            const Int4Opener opener = this->opener(first);
            for (int64_t word = first; word < std::min(count, first + group); ++word) {
                vi codes[2][2];
                opener.open(words + word * NIBBLES_BYTES, codes);
                keep(codes, to + word * 2 * NIBBLES_BYTES);
            }
        }
    }
};

// `int8_tile` of a weight in 4 bits, opened in registers on the way; opened codes are left in `kept`,
// [K / 4][PANEL8][4], if they are to serve further tiles.
template <int R, bool KEEP>
void int4_tile(const Int8Block& block, int64_t row, const Int4Panel& panel, uint8_t* kept,
               float* out) {
    const int32_t* x = block.tiles.data() + row * block.quads;
    const int32_t* sums = block.tile_sums.data() + row * block.groups;
    const float* scales = block.tile_scales.data() + row * block.groups;
    constexpr bool IN_REGISTERS = 2 * R <= MAX_ROWS;
    vf totals[R][2] = {};
    if constexpr (!IN_REGISTERS) std::memset(out, 0, R * PANEL8 * sizeof(float));
    for (int64_t g = 0, word = 0; g < block.groups; ++g) {
        const int64_t end = std::min(block.quads, (g + 1) * block.group) / 2;
        vi acc[R][2];
        UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = sums[g * R + r] - vi{};
        while (word < end) {
            const Int4Opener opener = panel.opener(word);
            const int64_t stop = std::min(end, (word / panel.group + 1) * panel.group);
            for (; word < stop; ++word, x += 2 * R) {
                vi w[2][2];
                opener.open(panel.words + word * NIBBLES_BYTES, w);
                if constexpr (KEEP) keep(w, kept + word * 2 * NIBBLES_BYTES);
                add_quads<R>(x, w[0], acc);
                add_quads<R>(x + R, w[1], acc);
            }
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) {
                float* to = out + r * PANEL8 + n * W;
                const vf sum = __builtin_convertvector(acc[r][n], vf);
                if constexpr (IN_REGISTERS)
                    totals[r][n] = multiply_add(scales[g * R + r], sum, totals[r][n]);
                else
                    store(to, multiply_add(scales[g * R + r], sum, load(to)));
            }
    }
    if constexpr (IN_REGISTERS)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) store(out + r * PANEL8 + n * W, totals[r][n]);
}

INLINE void pack_int4(const Int4PackArgs& a) {
    const int64_t panels = (a.columns + PANEL8 - 1) / PANEL8, words = (a.depth + 7) / 8;
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* to = a.packed + p * words * NIBBLES_BYTES;
        const auto nibble = [&](int64_t column, int64_t k) -> uint8_t {
            if (column >= a.columns || k >= a.depth) return 0;
            return a.codes[column * a.stride + k / 2] >> (k % 2 * 4) & 15;
        };
        for (int64_t k = 0; k < 8 * words; k += 8)
            for (int64_t column = p * PANEL8; column < (p + 1) * PANEL8; ++column)
                for (int64_t j = k; j < k + 4; ++j)
                    *to++ = nibble(column, j) | nibble(column, j + 4) << 4;
    }
}
