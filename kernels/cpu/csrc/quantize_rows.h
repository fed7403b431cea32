// Rows of activations as int8 codes and scales of groups, as kernels/quant.py defines them, bit for bit;
// transformed before or not.

#pragma once

#include "vectors.h"

typedef int8_t vc __attribute__((vector_size(W)));

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even
constexpr float MIN_SCALE = 1e-7f;    // a row of zeros divides by it

// The larger magnitude of each lane, as bits: an order in which infinity and NaN come last.
INLINE vi max_bits(vi top, vf v) {
    const vi bits = (vi)v & 0x7fffffff;
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)bits, (__m512i)top);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)bits, (__m256i)top);
#else
    const vi more = (vi)(bits > top);
    return (bits & more) | (top & ~more);
#endif
}

// The scale that brings the largest magnitude to `limit`; NaN if one of them is not finite.
INLINE float scale_of(vi top, float limit) {
    int32_t largest = 0;
    for (int lane = 0; lane < W; ++lane) largest = std::max(largest, top[lane]);
    if (largest >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    float value;
    std::memcpy(&value, &largest, 4);
    return std::max(value / limit, MIN_SCALE);
}

// The codes of one row, given its scale; 0 if that is NaN. `to` may be where `from` is: a value is
// read before its code, which is shorter, is written.
template <class T>
INLINE void write_codes(const T* from, int64_t n, float scale, int8_t* to) {
    if (scale != scale) {
        std::memset(to, 0, n);
        return;
    }
    for (int64_t i = 0; i < n; i += W) {
        const vf shifted = load_up_to(from + i, n - i) / scale + ROUND;
        const vc codes = __builtin_convertvector((vi)shifted - 0x4B400000, vc);
        std::memcpy(to + i, &codes, std::min<int64_t>(W, n - i));
    }
}

constexpr int HADAMARD = 64;  // inputs of a block; its root is 8

// The sums and differences of the lanes S apart.
#if defined(__clang__)
template <int S, size_t... I>
INLINE vf across(vf v, std::index_sequence<I...>) {
    return __builtin_shufflevector(v, v, (I ^ S)...);
}
#else
template <int S, size_t... I>
INLINE vf across(vf v, std::index_sequence<I...>) {
    const vi lanes = {(int32_t)(I ^ S)...};
    return __builtin_shuffle(v, lanes);
}
#endif
template <int S, size_t... I>
INLINE vi upper_signs(std::index_sequence<I...>) {
    return vi{(I & S ? INT32_MIN : 0)...};
}
template <int S, int N>
INLINE void add_across(vf (&v)[N]) {
    if constexpr (S < W) {
        const auto lanes = std::make_index_sequence<W>{};
        UNROLL for (int i = 0; i < N; ++i)
            v[i] = across<S>(v[i], lanes) + (vf)((vi)v[i] ^ upper_signs<S>(lanes));
        add_across<2 * S>(v);
    }
}

// `to` [n] = each whole block of `x` times the Hadamard matrix over 8; the rest as it is.
template <class T>
INLINE void hadamard_row(const T* x, int64_t n, float* to) {
    constexpr int N = HADAMARD / W;
    int64_t start = 0;
    for (; start + HADAMARD <= n; start += HADAMARD) {
        vf v[N];
        UNROLL for (int i = 0; i < N; ++i) v[i] = load(x + start + i * W);
        add_across<1>(v);
        UNROLL for (int step = 1; step < N; step *= 2)
            UNROLL for (int i = 0; i < N; ++i)
                if (!(i & step)) {
                    const vf a = v[i], b = v[i + step];
                    v[i] = a + b;
                    v[i + step] = a - b;
                }
        UNROLL for (int i = 0; i < N; ++i) store(to + start + i * W, v[i] * 0.125f);
    }
    for (; start < n; start += W) store_up_to(to + start, load_up_to(x + start, n - start), n - start);
}

// The codes of a row, and a scale for each `group` inputs, which is a multiple of W or
// the whole row.
template <class T>
INLINE void quantize_row(const T* x, int64_t n, int64_t group, int8_t* codes, float* scales) {
    int64_t start = 0;
    do {  // a row of nothing has a scale, too
        const int64_t some = std::min(group, n - start);
        vi top = {};
        for (int64_t i = 0; i < some; i += W) top = max_bits(top, load_up_to(x + start + i, some - i));
        const float scale = scale_of(top, 127.0f);
        write_codes(x + start, some, scale, codes + start);
        *scales++ = scale;
        start += group;
    } while (start < n);
}

// The same of the row, or of the transformed row.
template <class T>
INLINE void quantize_row(const T* x, int64_t n, int64_t group, bool hadamard, int8_t* codes,
                         float* scales) {
    if (!hadamard) return quantize_row(x, n, group, codes, scales);
    static thread_local std::vector<float> made;
    if ((int64_t)made.size() < n) made.resize(n);
    hadamard_row(x, n, made.data());
    quantize_row(made.data(), n, group, codes, scales);
}
