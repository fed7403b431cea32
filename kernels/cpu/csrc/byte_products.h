// Products of bytes and of 16-bit numbers, added in int32 by fours and by pairs.

#pragma once

#include "vectors.h"

// acc + the sums over 4 products of unsigned bytes of w and signed bytes of x, lane by lane.
#if defined(__AVX512VNNI__)
constexpr bool ADDS_IN_INT16 = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX512BW__)
constexpr bool ADDS_IN_INT16 = true;
INLINE vi add_products(vi acc, vi w, vi x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
    return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool ADDS_IN_INT16 = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool ADDS_IN_INT16 = true;
INLINE vi add_products(vi acc, vi w, vi x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr bool ADDS_IN_INT16 = false;
INLINE vi add_products(vi acc, vi w, vi x) {
    for (int byte = 0; byte < 4; ++byte)
        acc += (vi)((vu)w >> (8 * byte) & 255u) * ((vi)((vu)x << (24 - 8 * byte)) >> 24);
    return acc;
}
#endif

// acc + a.low * b.low + a.high * b.high, lane by lane of int16 halves.
INLINE vi add_pairs(vi acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
