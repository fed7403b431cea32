// Codes of weights as fp32 values, a panel of 2 W output features at a time: 4-bit codes of any table of
// 16 values (int4, nf4), 8-bit integers, and E4M3. Codes only, without scales.

#pragma once

#include "quantize_rows.h"

constexpr int PANELC = 2 * W;
constexpr int64_t WORD_BYTES = 4 * PANELC;  // of a panel: one word of each output feature

// The values of a 4-bit code in the low bits of each lane.
INLINE vf look_up(const float* table, vi codes) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, _mm256_castsi256_ps((__m256i)(codes << 28)));
#else
    vf values;
    for (int lane = 0; lane < W; ++lane) values[lane] = table[codes[lane] & 15];
    return values;
#endif
}

// Codes of which RUN, of successive inputs, lie in one word.
struct Words {
    static constexpr int64_t RUN_BYTES = WORD_BYTES;
    const float* table;
    vi words[2];

    INLINE void take(const uint8_t* from) {
        prefetch_ahead(from);
        prefetch_ahead(from + VECTOR_BYTES);
        words[0] = load_bits(from);
        words[1] = load_bits(from + VECTOR_BYTES);
    }
};

struct Nibbles : Words {
    static constexpr int RUN = 8;
    INLINE vf value(int j, int n) const { return look_up(table, (vi)((vu)words[n] >> (4 * j))); }
};

// Codes of 8 bits, 128 more than they stand for.
struct Bytes : Words {
    static constexpr int RUN = 4;
    INLINE vf value(int j, int n) const {
        const vi code = (vi)((vu)words[n] >> (8 * j)) & 255;
        return __builtin_convertvector(code - 128, vf);
    }
};

// Values are 2^-8 of E4M3's: an fp16 number has the same bits then, and subnormal codes cost nothing.
struct E4m3 {
    static constexpr int RUN = 1;
    static constexpr int64_t RUN_BYTES = PANELC;
    const float* table;
    vf values[2];

#if defined(__AVX512BW__)
    INLINE void take(const uint8_t* from) {
        prefetch_ahead(from);
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
        const __m512i half =
            _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
        values[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
        values[1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
#elif defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
    INLINE void take(const uint8_t* from) {
        prefetch_ahead(from);
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
        const __m256i half =
            _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
        values[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
        values[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
#else
    INLINE void take(const uint8_t* from) {
        for (int n = 0; n < 2 * W; ++n) {
            const int code = from[n], power = code >> 3 & 15, digits = code & 7;
            const float size = power ? std::ldexp(8.0f + digits, power - 18)
                                     : std::ldexp((float)digits, -17);
            values[n / W][n % W] = code & 128 ? -size : size;
        }
    }
#endif
    INLINE vf value(int, int n) const { return values[n]; }
};

// To the nearest E4M3 value, half to even; |v| <= 448.
INLINE vf round_e4m3(vf v) {
    const vu bits = (vu)v;
    const vf normal = (vf)((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
    const vf fixed = (v + ROUND / 512.0f) - ROUND / 512.0f;  // multiples of 2^-9
    return select((vi)((vi)v & 0x7fffffff) < 0x3c800000, fixed, normal);
}
