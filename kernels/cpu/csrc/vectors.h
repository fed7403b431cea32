// Vectors of fp32 lanes, as wide as this machine has them: load, store, exp, transpose, sums.
// Registers and rows in memory, by the vector extensions of GCC and Clang.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAVE_DPBF16 1
#else
#define HAVE_DPBF16 0
#endif

#define INLINE inline __attribute__((always_inline))
// One copy of what would else be compiled hundreds of times.
#define RARELY inline __attribute__((noinline, cold))
#define UNROLL _Pragma("GCC unroll 16")  // or accumulators live in memory, not in registers

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
constexpr int MAX_ROWS = 12;  // 12 x 2 accumulators of 32 registers
#else
#define VECTOR_BYTES 32
constexpr int MAX_ROWS = 6;  // 6 x 2 accumulators of 16 registers (AVX2; others make two of one)
#endif

constexpr int W = VECTOR_BYTES / 4;  // fp32 lanes of a vector
constexpr int64_t GRAIN = 65536;     // elements below which a second thread costs more than it gives

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));

struct bf16 {
    uint16_t bits;
};

inline bool made_by_intel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}
inline const bool IN_TURN = made_by_intel();

// Asks for weights that come later in a walk through memory from end to end, while the cache line at
// `at` is worked on: the line a page further on. Intel's cores: a line of each of the next four pages in
// turn. Such a core follows each page by itself, and has half as much more under way as when one page is
// asked for after the other (Sapphire Rapids); AMD's have a fifth less that way (Zen 5).
INLINE void prefetch_ahead(const void* at) {
    constexpr uintptr_t PAGE = 4096, PAGE_LINES = PAGE / 64, PAGES = 4, SPAN = PAGES * PAGE;
    const uintptr_t from = (uintptr_t)at, line = from / 64 % (PAGES * PAGE_LINES);
    const uintptr_t to = line % PAGES * PAGE_LINES + line / PAGES;
    __builtin_prefetch((const void*)(IN_TURN ? from / SPAN * SPAN + SPAN + 64 * to : from + PAGE));
}

INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
// One instruction each. GCC makes five or six of __builtin_convertvector.
#if defined(__AVX512F__)
INLINE vu widened(vh h) { return (vu)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE vh narrowed(vu u) { return (vh)_mm512_cvtepi32_epi16((__m512i)u); }
#elif defined(__AVX2__)
INLINE vu widened(vh h) { return (vu)_mm256_cvtepu16_epi32((__m128i)h); }
INLINE vh narrowed(vu u) { return __builtin_convertvector(u, vh); }
#else
INLINE vu widened(vh h) { return __builtin_convertvector(h, vu); }
INLINE vh narrowed(vu u) { return __builtin_convertvector(u, vh); }
#endif

INLINE vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(widened(h) << 16);
}
INLINE vi load_bits(const void* p) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
INLINE vu round_bf16(vf v) {  // bits of the lower half; to nearest even; NaN stays NaN
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu is_nan = (vu)(v != v);
    return (rounded & ~is_nan) | (is_nan & 0x7fc0u);
}
INLINE void store(bf16* p, vf v) {
    vh h = narrowed(round_bf16(v));
    std::memcpy(p, &h, sizeof h);
}
template <class T>
RARELY vf load_partial(const T* p, int64_t n) {  // lanes from n on are 0, and not read
    T lanes[W] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}
template <class T>
RARELY void store_partial(T* p, vf v, int64_t n) {
    T lanes[W];
    store(lanes, v);
    std::memcpy(p, lanes, n * sizeof(T));
}
template <class T>
INLINE vf load_up_to(const T* p, int64_t n) {
    return n >= W ? load(p) : load_partial(p, n);
}
template <class T>
INLINE void store_up_to(T* p, vf v, int64_t n) {
    if (n >= W)
        store(p, v);
    else
        store_partial(p, v, n);
}
template <class T>
INLINE vf rounded_to(vf v) {  // the value that storing as T and loading again gives
    if constexpr (sizeof(T) == 2)
        return (vf)(round_bf16(v) << 16);
    else
        return v;
}

INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
// b where one of them is NaN. GCC makes four instructions of `select` here.
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf vmax(vf a, vf b) { return select((vi)(a > b), a, b); }
INLINE vf vmin(vf a, vf b) { return select((vi)(a < b), a, b); }
#endif
INLINE vf splat(float x) { return x - (vf){}; }

// a * b + c, rounded once. Said outright: for a tile of one row GCC 12 would multiply several steps at
// once and add them afterwards, unfused, and that row would differ in its last bits (AVX2).
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vf multiply_add(float a, vf b, vf c) {
#if defined(__AVX512F__)
    return multiply_add((vf)_mm512_set1_ps(a), b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return multiply_add((vf)_mm256_set1_ps(a), b, c);
#else
    return a * b + c;
#endif
}

// exp by range reduction to [-ln2/2, ln2/2] and a degree-6 polynomial (the Cephes coefficients),
// within 2 ulp; exactly 0 below -87.3, which is what a masked score of -inf needs. Every step is said
// outright, so that it has the same bits wherever it is compiled.
INLINE vf vexp(vf x) {
    const vi tiny = (vi)(x < -87.3f);
    x = vmin(splat(88.3f), vmax(splat(-87.3f), x));
    const vf shifted = multiply_add(1.44269504088896341f, x, splat(12582912.0f));
    const vi n = (vi)shifted - 0x4B400000;
    const vf steps = shifted - 12582912.0f;
    const vf r = multiply_add(2.12194440e-4f, steps, multiply_add(-0.693359375f, steps, x));
    vf y = multiply_add(1.9875691500e-4f, r, splat(1.3981999507e-3f));
    y = multiply_add(y, r, splat(8.3334519073e-3f));
    y = multiply_add(y, r, splat(4.1665795894e-2f));
    y = multiply_add(y, r, splat(1.6666665459e-1f));
    y = multiply_add(y, r, splat(5.0000001201e-1f));
    y = multiply_add(y, r * r, r) + 1.0f;
    const vf scale = (vf)((n + 127) << 23);
    return (vf)((vi)(y * scale) & ~tiny);
}

// tanh within 2 ulp of 1 in absolute terms, and within 3e-7 relative where it is small.
INLINE vf vtanh(vf x) {
    const vf size = (vf)((vi)x & 0x7fffffff);
    const vf decay = vexp(size * -2.0f), large = (1.0f - decay) / (1.0f + decay);
    const vf square = x * x;
    // The series to x^7.
    vf series = square * (-17.0f / 315.0f) + 2.0f / 15.0f;
    series = series * square - 1.0f / 3.0f;
    const vf small = size * (series * square + 1.0f);
    const vf found = select((vi)(size < 0.15f), small, large);
    return (vf)((vi)found | ((vi)x & INT32_MIN));
}

// Interleave runs of S lanes: `low` takes the even runs of a and b in turn, `high` the odd ones.
constexpr int low_lane(int lane, int s) {
    return lane % (2 * s) < s ? lane : lane - s + W;
}
#if defined(__clang__)
template <int S, int SHIFT, size_t... I>
INLINE vf runs(vf a, vf b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (low_lane(I, S) + SHIFT)...);
}
#else
template <int S, int SHIFT, size_t... I>
INLINE vf runs(vf a, vf b, std::index_sequence<I...>) {
    const vi lanes = {(low_lane(I, S) + SHIFT)...};
    return __builtin_shuffle(a, b, lanes);
}
#endif
template <int S>
INLINE vf low(vf a, vf b) {
    return runs<S, 0>(a, b, std::make_index_sequence<W>{});
}
template <int S>
INLINE vf high(vf a, vf b) {
    return runs<S, S>(a, b, std::make_index_sequence<W>{});
}

// Lanes FIRST, FIRST + 2, ... of a, then those of b.
template <int FIRST, size_t... I>
INLINE vu every_other(vu a, vu b, std::index_sequence<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (int)(2 * I + FIRST)...);
#else
    return __builtin_shuffle(a, b, vu{(uint32_t)(2 * I + FIRST)...});
#endif
}
template <int FIRST>
INLINE vu every_other(vu a, vu b) {
    return every_other<FIRST>(a, b, std::make_index_sequence<W>{});
}

// The lanes of v, turned by S places.
#if defined(__clang__)
template <int S, size_t... I>
INLINE vf turned(vf v, std::index_sequence<I...>) {
    return __builtin_shufflevector(v, v, ((I + S) % W)...);
}
#else
template <int S, size_t... I>
INLINE vf turned(vf v, std::index_sequence<I...>) {
    const vi lanes = {((I + S) % W)...};
    return __builtin_shuffle(v, lanes);
}
#endif
template <int S = W / 2>
INLINE float sum_lanes(vf v) {
    if constexpr (S == 0)
        return v[0];
    else
        return sum_lanes<S / 2>(v + turned<S>(v, std::make_index_sequence<W>{}));
}
template <int S = W / 2>
INLINE float max_lanes(vf v) {
    if constexpr (S == 0)
        return v[0];
    else
        return max_lanes<S / 2>(vmax(v, turned<S>(v, std::make_index_sequence<W>{})));
}

// Lane i of the result is the sum of the lanes of v[i]; every lane is summed in the same order.
template <int S = 1>
INLINE vf sum_each(vf* v) {
    constexpr int left = W / S;
    if constexpr (left == 1) {
        return v[0];
    } else {
        UNROLL for (int i = 0; i < left / 2; ++i)
            v[i] = low<S>(v[2 * i], v[2 * i + 1]) + high<S>(v[2 * i], v[2 * i + 1]);
        return sum_each<2 * S>(v);
    }
}

// In place: lane j of v[i] and lane i of v[j] change places.
template <int S = 1>
INLINE void transpose(vf* v) {
    if constexpr (S < W) {
        UNROLL for (int i = 0; i < W; ++i)
            if (!(i & S)) {
                const vf a = v[i], b = v[i + S];
                v[i] = low<S>(a, b);
                v[i + S] = high<S>(a, b);
            }
        transpose<2 * S>(v);
    }
}
