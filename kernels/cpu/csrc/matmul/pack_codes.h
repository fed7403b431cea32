// Packs a weight of 4-bit codes, of 8-bit codes in groups, or of E4M3 into the panels that linear_lut.h
// describes.

#pragma once

#include "export.h"
#include "matmul/weight_codes.h"

struct CodesPackArgs {
    int64_t run;           // codes of a word: 8 of 4 bits, 4 of 8 bits; 1: E4M3, in bytes
    const uint8_t* codes;  // [columns][stride], as kernels/quant.py has them
    int64_t stride;
    uint8_t* packed;
    int64_t columns, depth, group, threads;
};
LAYOUT(CodesPackArgs,
       FIELD(run) FIELD(codes) FIELD(stride) FIELD(packed) FIELD(columns) FIELD(depth) FIELD(group)
       FIELD(threads))

INLINE void pack_codes(const CodesPackArgs& a) {
    const int64_t panels = (a.columns + PANELC - 1) / PANELC;
    const int64_t groups = (a.depth + a.group - 1) / a.group;
    const int64_t padded = (a.group + a.run - 1) / a.run * a.run;
    const int64_t bits = a.run == 8 ? 4 : 8;
    const size_t bytes = a.run == 1 ? 1 : 4;     // of a word
    const uint32_t flip = a.run == 4 ? 128 : 0;  // signed codes, to 128 more
#pragma omp parallel for num_threads((int)a.threads) schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* to = a.packed + p * groups * padded * PANELC * bits / 8;
        const auto code = [&](int64_t column, int64_t group, int64_t offset) -> uint32_t {
            const int64_t at = group * a.group + offset;
            if (column >= a.columns || offset >= a.group || at >= a.depth) return 0;
            const uint8_t* row = a.codes + column * a.stride;
            return bits == 4 ? row[at / 2] >> (at % 2 * 4) & 15 : row[at] ^ flip;
        };
        for (int64_t group = 0; group < groups; ++group)
            for (int64_t offset = 0; offset < padded; offset += a.run) {
                const int64_t at = group * a.group + offset;
                // The bytes of a run as they lie there: all but those at an end.
                const bool is_whole = offset + a.run <= a.group && at + a.run <= a.depth &&
                                      at * bits % 8 == 0;
                for (int64_t column = p * PANELC; column < (p + 1) * PANELC; ++column) {
                    uint32_t word = 0;
                    if (is_whole && column < a.columns) {
                        std::memcpy(&word, a.codes + column * a.stride + at * bits / 8, bytes);
                        word ^= flip * 0x01010101u;
                    } else
                        for (int64_t j = 0; j < a.run; ++j)
                            word |= code(column, group, offset + j) << (bits * j);
                    std::memcpy(to, &word, bytes);
                    to += bytes;
                }
            }
    }
}
