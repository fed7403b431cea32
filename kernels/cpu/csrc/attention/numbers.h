// Rows of 16-bit numbers, and their products with int8 codes: exact sums in int32, which have one value in
// any order.
//
// With VNNI a number is two bytes, each multiplied by four codes at a time. Without, codes are widened to
// 16 bits and multiplied by two.

#pragma once

#include "attention/order.h"
#include "byte_products.h"
#include "quantize_rows.h"

constexpr bool BY_PAIRS = ADDS_IN_INT16;  // of 16-bit numbers; or by bytes
constexpr int OPENED = BY_PAIRS ? 2 : 1;  // vectors that a vector of codes takes
// What numbers are rounded to: their high byte is at most 127.
constexpr float QUERY_TOP = 32512, WEIGHT_TOP = 32767;
constexpr float LEAST_SIZE = 1e-30f;  // what is smaller is 0, since its reciprocal could be infinite

typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES)));

INLINE vi splat_int(int32_t x) { return x - (vi){}; }

// Four codes a lane, of one key or of four, as `add_quad` takes them: bytes, or by pairs the first and the
// third code, then the second and the fourth.
struct Opened {
    vi codes, others;
};
template <bool KEYS>
INLINE Opened open_codes(vi codes) {
    if constexpr (BY_PAIRS) return {(vi)(((vs)codes << 8) >> 8), (vi)((vs)codes >> 8)};
    if constexpr (KEYS) codes ^= (int32_t)0x80808080;  // + 128: the unsigned side of the products
    return {codes, codes};
}
INLINE void store(int32_t* to, const Opened& opened) {
    std::memcpy(to, &opened.codes, sizeof(vi));
    if constexpr (BY_PAIRS) std::memcpy(to + W, &opened.others, sizeof(vi));
}
INLINE Opened load_opened(const int32_t* from) {
    const vi codes = load_bits(from);
    if constexpr (BY_PAIRS) return {codes, load_bits(from + W)};
    return {codes, codes};
}

// rows[i], codes of key i -> rows[v] whose lanes have four codes each, of keys 0 ... 3: of the head
// dimensions from v W on, a lane each.
INLINE void interleave_bytes(vf* rows) {
#if defined(__AVX512BW__)
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i r[4];
    UNROLL for (int i = 0; i < 4; ++i) r[i] = _mm512_permutexvar_epi32(order, (__m512i)rows[i]);
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpacklo_epi8(r[2], r[3]);
    const __m512i c = _mm512_unpackhi_epi8(r[0], r[1]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    rows[0] = (vf)_mm512_unpacklo_epi16(a, b), rows[1] = (vf)_mm512_unpackhi_epi16(a, b);
    rows[2] = (vf)_mm512_unpacklo_epi16(c, d), rows[3] = (vf)_mm512_unpackhi_epi16(c, d);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i r[4];
    UNROLL for (int i = 0; i < 4; ++i) r[i] = _mm256_permutevar8x32_epi32((__m256i)rows[i], order);
    const __m256i a = _mm256_unpacklo_epi8(r[0], r[1]), b = _mm256_unpacklo_epi8(r[2], r[3]);
    const __m256i c = _mm256_unpackhi_epi8(r[0], r[1]), d = _mm256_unpackhi_epi8(r[2], r[3]);
    rows[0] = (vf)_mm256_unpacklo_epi16(a, b), rows[1] = (vf)_mm256_unpackhi_epi16(a, b);
    rows[2] = (vf)_mm256_unpacklo_epi16(c, d), rows[3] = (vf)_mm256_unpackhi_epi16(c, d);
#else
    char from[4][VECTOR_BYTES], to[4 * VECTOR_BYTES];
    std::memcpy(from, rows, sizeof from);
    for (int d = 0; d < VECTOR_BYTES; ++d)
        for (int i = 0; i < 4; ++i) to[4 * d + i] = from[i][d];
    std::memcpy(rows, to, sizeof to);
#endif
}

// A row holds two ints for each four numbers. By bytes: all low bytes, then all high ones. By pairs: the
// first and the third number, then the second and the fourth, four after four.
INLINE int64_t place_of_low(int64_t quad) { return BY_PAIRS ? 2 * quad : quad; }
INLINE int64_t place_of_high(int64_t quad, int64_t quads) {
    return BY_PAIRS ? 2 * quad + 1 : quads + quad;
}
INLINE void store_bytes(vi from, char* to) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)from);
#else
    const vb bytes = __builtin_convertvector(from, vb);
#endif
    std::memcpy(to, &bytes, W);
}
// Numbers `at` ... `at` + W of a row. `SIGNED`: so are their low bytes; else the numbers are 0 or more.
template <bool SIGNED>
INLINE void store_numbers(vi numbers, int32_t* row, int64_t quads, int64_t at) {
    if constexpr (BY_PAIRS) {
        const vi later = (vi)turned<2>((vf)numbers, std::make_index_sequence<W>{});
        const vi pairs = (numbers & 0xffff) | (later << 16);
        UNROLL for (int i = 0; i < W / 4; ++i)
            std::memcpy(row + place_of_low(at / 4 + i), (const int32_t*)&pairs + 4 * i, 8);
    } else {
        store_bytes(numbers, (char*)row + at);
        store_bytes((SIGNED ? numbers + 128 : numbers) >> 8, (char*)(row + quads) + at);
    }
}

// The largest lane of `max_bits`, as a number.
template <int S = W / 2>
INLINE float largest_size(vi bits) {
    if constexpr (S == 0) {
        float size;
        const int32_t most = bits[0];
        std::memcpy(&size, &most, sizeof size);
        return size;
    } else {
        const vf others = turned<S>((vf)bits, std::make_index_sequence<W>{});
        return largest_size<S / 2>(max_bits(bits, others));
    }
}
INLINE vi rounded(vf x, float factor) {  // x * factor, to nearest, half to even
    return (vi)multiply_add(factor, x, splat(ROUND)) - 0x4B400000;
}
// The factor that makes `top` of `size`; 0 makes zeros of all that is not finite or hardly anything.
INLINE vf factor_to(vf size, float top) {
    const vi usable = (vi)(size > LEAST_SIZE) & (vi)(size <= std::numeric_limits<float>::max());
    return (vf)((vi)(top / size) & usable);
}
// What undoes it; NaN of what held NaN or an infinity.
INLINE vf unit_of(vf size, float top) { return (size + (size - size)) * (1 / top); }

// Sums of products of one row and one vector, and how they are added to.
struct Sums {
    vi low = {}, high = {};
    INLINE vi total() const { return (high << 8) + low; }
};
template <bool KEYS>
INLINE void add_quad(Sums& sums, const Opened& opened, vi low, vi high) {
    if constexpr (BY_PAIRS) {
        sums.low = add_pairs(sums.low, opened.codes, low);
        sums.low = add_pairs(sums.low, opened.others, high);
    } else if constexpr (KEYS) {  // unsigned codes
        sums.low = add_products(sums.low, opened.codes, low);
        sums.high = add_products(sums.high, opened.codes, high);
    } else {  // unsigned numbers
        sums.low = add_products(sums.low, low, opened.codes);
        sums.high = add_products(sums.high, high, opened.codes);
    }
}

// sums[r][n] += the products of numbers and codes in memory, of the quads [first, last).
template <int R, int N, bool KEYS>
INLINE void add_quads(const int32_t* numbers, int64_t ldn, int64_t quads, int64_t first, int64_t last,
                      const int32_t* codes, int64_t ldc, Sums (&sums)[R][N]) {
    for (int64_t q = first; q < last; ++q) {
        Opened code[N];
        UNROLL for (int n = 0; n < N; ++n) code[n] = load_opened(codes + q * ldc + n * OPENED * W);
        UNROLL for (int r = 0; r < R; ++r) {
            const int32_t* row = numbers + r * ldn;
            const vi low = splat_int(row[place_of_low(q)]);
            const vi high = splat_int(row[place_of_high(q, quads)]);
            UNROLL for (int n = 0; n < N; ++n) add_quad<KEYS>(sums[r][n], code[n], low, high);
        }
    }
}
