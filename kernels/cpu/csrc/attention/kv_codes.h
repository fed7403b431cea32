// Codes of a quantised KV cache, and their fp16 scales: how they are made and what they mean. The truth
// is quantize_kv in quant.py; what is written here has its bits.

#pragma once

#include "vectors.h"

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

struct int8 {
    int8_t bits;
};
struct fp8 {  // E4M3 without infinities, "e4m3fn"
    uint8_t bits;
};

typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));

// A scale is multiplied by this when it is read, since `load` leaves it out of a code.
template <class C>
constexpr float UNIT = 1.0f;

// GCC 12 takes four times as long over a conversion from 8 to 32 bits that it has to find itself.
INLINE vf load(const int8* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vb codes;
    std::memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector(codes, vi), vf);
#endif
}

#if defined(__F16C__)
// Sign, exponent and mantissa moved to where fp16 has them: value / 2^8, subnormals included.
template <>
constexpr float UNIT<fp8> = 256.0f;
INLINE vf load(const fp8* p) {
    vb codes;
    std::memcpy(&codes, p, sizeof codes);
#if VECTOR_BYTES == 64
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)codes), 7);
    wide = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xBFFF));
    return (vf)_mm512_cvtph_ps(wide);
#else
    int64_t eight;
    std::memcpy(&eight, &codes, sizeof eight);
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(eight)), 7);
    wide = _mm_and_si128(wide, _mm_set1_epi16((short)0xBFFF));
    return (vf)_mm256_cvtph_ps(wide);
#endif
}
INLINE float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
INLINE uint16_t float_to_half(float x) { return _cvtss_sh(x, 0); }
#else
INLINE vf load(const fp8* p) {
    vb codes;
    std::memcpy(&codes, p, sizeof codes);
    const vi wide = __builtin_convertvector(codes, vi), size = wide & 0x7f;
    const vf normal = (vf)((size << 20) + (120 << 23));
    const vf subnormal = __builtin_convertvector(size, vf) * (1.0f / 512);
    const vf value = select((vi)(size < 8), subnormal, normal);
    return (vf)((vi)value | (wide & (int32_t)0x80000000));
}
INLINE float half_to_float(uint16_t half) {
    const uint32_t size = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t bits = (size << 13) + (112u << 23);
    if (size >= 0x7c00) bits = 0x7f800000u | (size << 13);  // infinity, NaN
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (size < 0x400) value = (float)size * (1.0f / 16777216);
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
// Of a finite x >= 0 that fp16 can hold, or NaN; to nearest even.
INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    if (!(x == x)) return 0x7e00;
    if (x < 6.103515625e-05f) {  // subnormal: 0.5f has the unit of fp16's subnormals as its own
        x += 0.5f;
        std::memcpy(&bits, &x, sizeof bits);
        return (uint16_t)(bits - (126u << 23));
    }
    std::memcpy(&bits, &x, sizeof bits);
    bits -= 112u << 23;
    return (uint16_t)((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13);
}
#endif

// `count` scales that lie in one piece, as fp32.
template <class C>
INLINE void widen_scales(const uint16_t* from, float* to, int64_t count) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + W <= count; i += W) {
#if VECTOR_BYTES == 64
        const vf wide = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i)));
#else
        const vf wide = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i)));
#endif
        store(to + i, wide * UNIT<C>);
    }
#endif
    for (; i < count; ++i) to[i] = half_to_float(from[i]) * UNIT<C>;
}

// The same, apart by group: scales [count][groups] -> to[group][...], `ld` floats from one group to the next.
INLINE void widen_by_group(const uint16_t* from, float* to, int64_t count, int64_t groups, int64_t ld) {
    if (groups == 1) return widen_scales<int8>(from, to, count);
    int64_t i = 0;
#if defined(__F16C__)
    if (groups == 2 || groups == 4)
        for (; i + W <= count; i += W)
            for (int64_t pair = 0; pair < groups / 2; ++pair) {
                vu words;  // two scales of W keys
                std::memcpy(&words, from + i * groups + pair * 2 * W, sizeof words);
                if (groups == 4) {
                    vu others;
                    std::memcpy(&others, from + i * 4 + (1 - pair) * 2 * W, sizeof others);
                    words = pair ? every_other<1>(others, words) : every_other<0>(words, others);
                }
                const vh parts[2] = {narrowed(words & 0xffffu), narrowed(words >> 16)};
                UNROLL for (int g = 0; g < 2; ++g)
                    widen_scales<int8>((const uint16_t*)&parts[g], to + (2 * pair + g) * ld + i, W);
            }
#endif
    for (; i < count; ++i)
        for (int64_t g = 0; g < groups; ++g) to[g * ld + i] = half_to_float(from[i * groups + g]);
}

// Quantising goes by 8 lanes on every machine, since 8 is the smallest group.
typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef int8_t v8b __attribute__((vector_size(8)));
typedef uint16_t v8h __attribute__((vector_size(16)));
typedef uint32_t v8u __attribute__((vector_size(32)));

INLINE v8f take8(const float* p, int64_t n) {  // lanes from n on are 0, and not read
    v8f v = {};
    std::memcpy(&v, p, n >= 8 ? sizeof v : n * sizeof(float));
    return v;
}
INLINE v8f take8(const bf16* p, int64_t n) {
    v8h v = {};
    std::memcpy(&v, p, n >= 8 ? sizeof v : n * sizeof(bf16));
    return (v8f)(__builtin_convertvector(v, v8u) << 16);
}
INLINE v8f select8(v8i mask, v8f yes, v8f no) {
    return (v8f)(((v8i)yes & mask) | ((v8i)no & ~mask));
}
INLINE v8f clamp8(v8f x, float most) {
    const v8f top = most - (v8f){}, bottom = -most - (v8f){};
    x = select8((v8i)(x > top), top, x);
    return select8((v8i)(x < bottom), bottom, x);
}

// Codes of 8 finite values that were divided by their scale: to nearest, half to even.
INLINE v8b narrow8(v8i codes) {
#if defined(__AVX512VL__)
    const int64_t eight = _mm_cvtsi128_si64(_mm256_cvtepi32_epi8((__m256i)codes));
    v8b bytes;
    std::memcpy(&bytes, &eight, sizeof bytes);
    return bytes;
#else
    return __builtin_convertvector(codes, v8b);
#endif
}
INLINE v8b code8(v8f x, const int8*) {
    const v8f shifted = clamp8(x, 127.0f) + 12582912.0f;
    return narrow8((v8i)shifted - 0x4B400000);
}
INLINE v8b code8(v8f x, const fp8*) {
    x = clamp8(x, 448.0f);
    const v8u bits = (v8u)x, size = bits & 0x7fffffffu;
    const v8u normal = (size + 0x7ffffu + ((size >> 20) & 1u) - (120u << 23)) >> 20;
    const v8u subnormal = (v8u)((v8f)size + 16384.0f) - 0x46800000u;  // whose unit is 2^-9
    const v8u mask = (v8u)(size < 0x3c800000u);                       // below 2^-6
    const v8u code = (subnormal & mask) | (normal & ~mask);
    return narrow8((v8i)(code | ((bits >> 24) & 0x80u)));
}

template <class C>
constexpr float TOP = 127.0f;
template <>
constexpr float TOP<fp8> = 448.0f;

// `dim` values -> codes, and one scale for each `group` of them.
template <class C, class T>
INLINE void encode(const T* from, int64_t dim, int64_t group, C* codes, uint16_t* scales) {
    for (int64_t first = 0; first < dim; first += group, ++scales) {
        v8i largest = {};  // as integers, for which NaN is larger than infinity
        for (int64_t d = 0; d < group; d += 8) {
            const v8i size = (v8i)take8(from + first + d, group - d) & 0x7fffffff;
            const v8i more = (v8i)(size > largest);
            largest = (size & more) | (largest & ~more);
        }
        int32_t most = 0;
        UNROLL for (int i = 0; i < 8; ++i) most = std::max(most, largest[i]);
        if (most >= 0x7f800000) {
            *scales = 0x7e00;  // NaN, and so is all made of it
            std::memset(codes + first, 0, group);
            continue;
        }
        float size;
        std::memcpy(&size, &most, sizeof size);
        *scales = float_to_half(std::clamp(size / TOP<C>, 1e-5f, 65504.0f));
        const float scale = half_to_float(*scales);
        for (int64_t d = 0; d < group; d += 8) {
            const v8b made = code8(take8(from + first + d, group - d) / scale, codes);
            std::memcpy(codes + first + d, &made, std::min<int64_t>(8, group - d));
        }
    }
}
