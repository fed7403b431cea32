// int8 rows times an int8 weight kept in 4 bits, where products are added in int16 (no VNNI).
//
// The sum over a group of inputs of x (step nibble + offset) is step times the sum of x nibble, plus offset
// times the sum of x. A product of a code with a nibble is small: int16 holds the sums of a run of up to
// 32 inputs, two neighbours in a lane by one instruction, so that only a run's sum is widened, by the
// multiplication with its step. Sums are those of linear_int8.h with the opened codes, as integers.

#pragma once

#include "matmul/open_int4.h"

typedef int16_t vi16 __attribute__((vector_size(VECTOR_BYTES)));

#if defined(__AVX512BW__)
INLINE vi16 pair_products(vi nibbles, vi x) {
    return (vi16)_mm512_maddubs_epi16((__m512i)nibbles, (__m512i)x);
}
INLINE vi pair_sums(vi16 a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
INLINE vi16 pair_products(vi nibbles, vi x) {
    return (vi16)_mm256_maddubs_epi16((__m256i)nibbles, (__m256i)x);
}
INLINE vi pair_sums(vi16 a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else  // compiled, but never run
INLINE vi16 pair_products(vi, vi) { return vi16{}; }
INLINE vi pair_sums(vi16, vi) { return vi{}; }
#endif

// The sums of a run fill the registers. GCC would load a vector of the weight anew for each row, add
// products in a tree, and want the sums of a group in registers, too: here a value has to be in one, and
// sums in memory.
template <class V>
INLINE void in_register(V& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__AVX2__)
    asm("" : "+x"(value));
#endif
}
INLINE void in_memory(const vi* sums) { asm volatile("" : : "r"(sums) : "memory"); }

// How the inputs of a product fall into runs: within one group of the weight and one of the row.
struct Runs {
    int64_t quads;  // of a run: 8, 4 or 2
    int64_t pairs;  // of runs in a group of the row, rounded up
    int64_t in_weight_group;

    Runs(const Int8LinearArgs& a, const Int8Block& block)
        : quads(divides(a, block, 8) ? 8 : divides(a, block, 4) ? 4 : 2),
          pairs((std::min(block.group, block.quads) + 2 * quads - 1) / (2 * quads)),
          in_weight_group(std::max<int64_t>(1, a.weight_group / (4 * quads))) {}

   private:
    static bool divides(const Int8LinearArgs& a, const Int8Block& block, int64_t quads) {
        return a.weight_group % (4 * quads) == 0 && (block.groups == 1 || block.group % quads == 0);
    }
};

// `lay_out`, and what a row's offsets are multiplied by: the sums of the codes of two runs, in int16 each,
// tile after tile as [groups][pairs][rows of the tile].
INLINE void lay_out_runs(Int8Block& block, const Runs& runs, int64_t row, const int8_t* codes,
                         const Tiling& tiling) {
    lay_out<false>(block, row, codes, tiling);
    const int64_t first = tiling.first_of(row), step = tiling.width_at(first);
    int32_t* to = block.run_sums.data() + first * block.groups * runs.pairs + (row - first);
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t end = 4 * std::min(block.quads, (g + 1) * block.group);
        int64_t at = 4 * g * block.group;
        for (int64_t pair = 0; pair < runs.pairs; ++pair, to += step) {
            uint16_t sums[2] = {};
            for (uint16_t& sum : sums)
                for (const int64_t stop = std::min(end, at + 4 * runs.quads); at < stop; ++at)
                    sum += codes[at];
            std::memcpy(to, sums, sizeof sums);
        }
    }
}

// The bytes of a panel that go with one run after the other: steps, or offsets.
struct OfRuns {
    const uint8_t* bytes;
    int64_t passed, runs;  // of the weight's group

    INLINE vi lanes(int n) const { return load_bytes(bytes + n * W); }
    INLINE void next() {
        if (++passed == runs) passed = 0, bytes += PANEL8;
    }
};

// One panel as it is packed: nibbles, steps and offsets of one run after the other.
struct PackedRuns {
    const uint8_t* words;
    OfRuns steps, offsets;

    PackedRuns(const Int4Panel& panel, const Runs& runs)
        : words(panel.words),
          steps{panel.steps, 0, runs.in_weight_group},
          offsets{panel.offsets, 0, runs.in_weight_group} {}
    INLINE void take(vi (&codes)[2][2]) {  // of two quads
        constexpr int32_t LOW = 0x0F0F0F0F;
        UNROLL for (int n = 0; n < 2; ++n) {
            prefetch_ahead(words + n * VECTOR_BYTES);
            const vi nibbles = load_bits(words + n * VECTOR_BYTES);
            codes[0][n] = nibbles & LOW;
            codes[1][n] = (vi)((vu)nibbles >> 4) & LOW;
        }
        words += NIBBLES_BYTES;
    }
    INLINE void take_steps(vi (&taken)[2]) {  // twice in each lane
        UNROLL for (int n = 0; n < 2; ++n) taken[n] = steps.lanes(n) | steps.lanes(n) << 16;
        steps.next();
    }
    INLINE void take_offsets(vi (&taken)[2], bool of_two) {  // of two runs in each lane, or of one
        UNROLL for (int n = 0; n < 2; ++n) taken[n] = offsets.lanes(n);
        offsets.next();
        if (!of_two) return;
        UNROLL for (int n = 0; n < 2; ++n) taken[n] |= offsets.lanes(n) << 16;
        offsets.next();
    }
};

// The same of a panel that was opened: its own memory, [quads][2] vectors of nibbles, [runs][2] of steps
// and [pairs][2] of offsets.
struct OpenedRuns {
    const vi *codes, *steps, *offsets;

    INLINE void take(vi (&taken)[2][2]) {
        UNROLL for (int i = 0; i < 4; ++i) taken[i / 2][i % 2] = codes[i];
        codes += 4;
    }
    INLINE void take_steps(vi (&taken)[2]) {
        taken[0] = steps[0], taken[1] = steps[1];
        steps += 2;
    }
    INLINE void take_offsets(vi (&taken)[2], bool) {
        taken[0] = offsets[0], taken[1] = offsets[1];
        offsets += 2;
    }
};

// sums[R][2] (+)= the products of two quads of R rows with a pair of vectors of the weight each.
template <int R, bool IS_FIRST, class Weight>
INLINE void add_two_quads(const int32_t* x, Weight& weight, vi16 (&sums)[R][2]) {
    vi w[2][2];
    weight.take(w);
    UNROLL for (int quad = 0; quad < 2; ++quad) {
        in_register(w[quad][0]), in_register(w[quad][1]);
        UNROLL for (int r = 0; r < R; ++r) {
            const vi codes = x[quad * R + r] - vi{};
            UNROLL for (int n = 0; n < 2; ++n) {
                const vi16 products = pair_products(w[quad][n], codes);
                sums[r][n] = IS_FIRST && !quad ? products : sums[r][n] + products;
                in_register(sums[r][n]);
            }
        }
    }
}

// acc[R][2] += a run of R rows, a whole one (`quads` is not read) or one cut short.
template <int R, int RUN, bool IS_WHOLE, class Weight>
INLINE void add_run(const int32_t* x, int64_t quads, Weight& weight, vi* acc) {
    vi16 sums[R][2];
    add_two_quads<R, true>(x, weight, sums);
    if constexpr (IS_WHOLE)
        UNROLL for (int at = 2; at < RUN; at += 2) add_two_quads<R, false>(x + at * R, weight, sums);
    else
        for (int64_t at = 2; at < quads; at += 2) add_two_quads<R, false>(x + at * R, weight, sums);
    vi steps[2];
    weight.take_steps(steps);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < 2; ++n) acc[2 * r + n] += pair_sums(sums[r][n], steps[n]);
    in_memory(acc);
}

// `int8_tile` of a weight in 4 bits.
template <int R, int RUN, class Weight>
void runs_tile(const Int8Block& block, int64_t pairs, int64_t row, Weight weight, float* out) {
    const int32_t* x = block.tiles.data() + row * block.quads;
    const int32_t* x_sums = block.run_sums.data() + row * block.groups * pairs;
    const int32_t* sums = block.tile_sums.data() + row * block.groups;
    const float* scales = block.tile_scales.data() + row * block.groups;
    std::memset(out, 0, R * PANEL8 * sizeof(float));
    for (int64_t g = 0; g < block.groups; ++g) {
        int64_t quads = std::min(block.group, block.quads - g * block.group);
        vi acc[2 * R];
        UNROLL for (int r = 0; r < R; ++r) acc[2 * r] = acc[2 * r + 1] = sums[g * R + r] - vi{};
        for (int64_t at = 0, pair = 0; at < quads; at += 2 * RUN, ++pair) {
            vi offsets[2];
            weight.take_offsets(offsets, at + RUN < quads);
            UNROLL for (int r = 0; r < R; ++r) {
                const vi both = x_sums[(g * pairs + pair) * R + r] - vi{};
                UNROLL for (int n = 0; n < 2; ++n)
                    acc[2 * r + n] += pair_sums((vi16)offsets[n], both);
            }
        }
        in_memory(acc);
        for (; quads >= RUN; quads -= RUN, x += RUN * R) add_run<R, RUN, true>(x, RUN, weight, acc);
        if (quads > 0) add_run<R, RUN, false>(x, quads, weight, acc);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < 2; ++n) {
                float* to = out + r * PANEL8 + n * W;
                const vf sum = __builtin_convertvector(acc[2 * r + n], vf);
                store(to, multiply_add(scales[g * R + r], sum, load(to)));
            }
    }
}

// Bytes that `open_runs` writes.
INLINE int64_t opened_runs_bytes(const Int8Block& block) { return block.quads * 8 * VECTOR_BYTES; }

// A panel for several tiles.
INLINE OpenedRuns open_runs(const Int8Block& block, const Runs& runs, PackedRuns from, uint8_t* to) {
    vi* codes = (vi*)to;
    vi *steps = codes + 2 * block.quads, *offsets = steps + 2 * block.quads;
    const OpenedRuns opened{codes, steps, offsets};
    for (int64_t at = 0; at < block.quads; at += 2, codes += 4) {
        vi taken[2][2];
        from.take(taken);
        keep(taken, (uint8_t*)codes);
    }
    for (int64_t g = 0; g < block.groups; ++g) {
        const int64_t quads = std::min(block.group, block.quads - g * block.group);
        for (int64_t at = 0; at < quads; at += runs.quads, steps += 2) {
            vi taken[2];
            from.take_steps(taken);
            steps[0] = taken[0], steps[1] = taken[1];
        }
        for (int64_t at = 0; at < quads; at += 2 * runs.quads, offsets += 2) {
            vi taken[2];
            from.take_offsets(taken, at + runs.quads < quads);
            offsets[0] = taken[0], offsets[1] = taken[1];
        }
    }
    return opened;
}
