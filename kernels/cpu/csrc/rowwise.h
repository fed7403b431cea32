// Row-wise operators: RMSNorm, rotary embedding, activation * mul, soft caps, and the weighted sum of
// routed rows. A stride over tokens is free everywhere; what a row holds lies in one piece. RMSNorm and
// activation * mul write rows of T, or the int8 codes of just those rows: a row is made where it stays in
// the cache.

#pragma once

#include "export.h"
#include "quantize_rows.h"

struct CodesArgs {
    int8_t* codes;  // [tokens, dim]; null if rows of T are wanted
    int64_t stride;
    float* scales;  // [tokens, groups], dense
    int64_t group;     // inputs that share a scale: a multiple of W, or dim
    int64_t hadamard;  // transform a row before its codes are made
};
#define CODES_FIELDS(codes_args)                                             \
    FIELD(codes_args.codes) FIELD(codes_args.stride) FIELD(codes_args.scales) \
    FIELD(codes_args.group) FIELD(codes_args.hadamard)

struct RmsNormArgs {
    int64_t dtype;
    const void* x;
    int64_t x_token_stride, x_head_stride;
    const void* residual;  // [tokens, dim], or null; only with heads == 1
    int64_t residual_stride;
    const void* weight;  // null: only the sum is wanted, and perhaps its codes
    const void* post;    // of the norm of x before it is added, or null
    double factor;       // of what is added
    int64_t wide;        // the weights are fp32, whatever the rows are
    void* out;
    int64_t out_token_stride, out_head_stride;
    void* sum;  // [tokens, dim], dense: factor * x + residual
    int64_t tokens, heads, dim;
    double eps;
    int64_t threads;
    CodesArgs int8;  // with heads == 1, in place of `out`
};
LAYOUT(RmsNormArgs,
       FIELD(dtype) FIELD(x) FIELD(x_token_stride) FIELD(x_head_stride) FIELD(residual)
       FIELD(residual_stride) FIELD(weight) FIELD(post) FIELD(factor) FIELD(wide) FIELD(out)
       FIELD(out_token_stride) FIELD(out_head_stride)
       FIELD(sum) FIELD(tokens) FIELD(heads) FIELD(dim) FIELD(eps) FIELD(threads) CODES_FIELDS(int8))

struct RopeArgs {
    int64_t dtype;
    void* q;
    int64_t q_stride;
    void* k;
    int64_t k_stride;
    const float *cos, *sin;  // [tokens, half]
    int64_t tokens, heads, kv_heads, dim, half, threads;
};
LAYOUT(RopeArgs,
       FIELD(dtype) FIELD(q) FIELD(q_stride) FIELD(k) FIELD(k_stride) FIELD(cos) FIELD(sin)
       FIELD(tokens) FIELD(heads) FIELD(kv_heads) FIELD(dim) FIELD(half) FIELD(threads))

struct RopeToArgs {
    int64_t dtype;
    const void* q;
    int64_t q_stride;
    void* out;
    int64_t out_stride;
    const float *cos, *sin;  // [tokens, half]
    int64_t tokens, heads, dim, half, threads;
};
LAYOUT(RopeToArgs,
       FIELD(dtype) FIELD(q) FIELD(q_stride) FIELD(out) FIELD(out_stride) FIELD(cos) FIELD(sin)
       FIELD(tokens) FIELD(heads) FIELD(dim) FIELD(half) FIELD(threads))

struct ActMulArgs {
    int64_t dtype;
    const void* gate_up;
    int64_t stride;
    void* out;
    int64_t out_stride, rows, dim, activation, threads;
    CodesArgs int8;  // in place of `out`
};
LAYOUT(ActMulArgs,
       FIELD(dtype) FIELD(gate_up) FIELD(stride) FIELD(out) FIELD(out_stride) FIELD(rows) FIELD(dim)
       FIELD(activation) FIELD(threads) CODES_FIELDS(int8))

struct SoftCapArgs {
    float* x;  // [rows, dim]
    int64_t stride, rows, dim;
    double cap;
    int64_t threads;
};
LAYOUT(SoftCapArgs,
       FIELD(x) FIELD(stride) FIELD(rows) FIELD(dim) FIELD(cap) FIELD(threads))

struct SwigluArgs {
    int64_t dtype;
    const void* gate_up;
    int64_t stride;
    void* out;
    int64_t out_stride, rows, dim;
    double alpha, limit;
    int64_t threads;
};
LAYOUT(SwigluArgs,
       FIELD(dtype) FIELD(gate_up) FIELD(stride) FIELD(out) FIELD(out_stride) FIELD(rows) FIELD(dim)
       FIELD(alpha) FIELD(limit) FIELD(threads))

struct CombineArgs {
    int64_t dtype;
    const void* rows;       // [*, dim]
    const int64_t* places;  // [tokens, ranks]
    const float* weights;   // [tokens, ranks]
    void* out;              // [tokens, dim]
    int64_t tokens, ranks, dim, threads;
};
LAYOUT(CombineArgs,
       FIELD(dtype) FIELD(rows) FIELD(places) FIELD(weights) FIELD(out) FIELD(tokens) FIELD(ranks)
       FIELD(dim) FIELD(threads))

struct QuantizeArgs {
    int64_t dtype;
    const void* x;
    int64_t stride, rows, dim, threads;
    CodesArgs int8;
};
LAYOUT(QuantizeArgs,
       FIELD(dtype) FIELD(x) FIELD(stride) FIELD(rows) FIELD(dim) FIELD(threads) CODES_FIELDS(int8))

struct HadamardArgs {
    int64_t dtype;
    const void* x;
    int64_t stride;
    float* out;  // [rows, dim], dense
    int64_t rows, dim, threads;
};
LAYOUT(HadamardArgs,
       FIELD(dtype) FIELD(x) FIELD(stride) FIELD(out) FIELD(rows) FIELD(dim) FIELD(threads))

// Where row t of `out` is made: in `out`, or in memory of this thread if its codes are wanted.
template <class T>
INLINE T* row_of(void* out, int64_t offset, const CodesArgs& int8, int64_t dim) {
    static thread_local std::vector<T> own;
    if (!int8.codes) return (T*)out + offset;
    own.resize(dim);
    return own.data();
}

template <class T>
INLINE void write_row(const CodesArgs& int8, int64_t t, const T* row, int64_t dim) {
    if (!int8.codes) return;
    const int64_t groups = (dim + int8.group - 1) / int8.group;
    quantize_row(row, dim, int8.group, int8.hadamard, int8.codes + t * int8.stride,
                 int8.scales + t * groups);
}

template <class T>
void quantize(const QuantizeArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * a.dim > GRAIN / 4)
    for (int64_t t = 0; t < a.rows; ++t) write_row(a.int8, t, (const T*)a.x + t * a.stride, a.dim);
}

template <class T>
void hadamard(const HadamardArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * a.dim > GRAIN)
    for (int64_t t = 0; t < a.rows; ++t)
        hadamard_row((const T*)a.x + t * a.stride, a.dim, a.out + t * a.dim);
}

// A weight of T multiplies the normed value rounded to T, one in fp32 the normed value itself.
template <class T, class V>
INLINE vf weighed(vf x, float scale, const V* weight, int64_t d, int64_t left) {
    const vf normed = std::is_same<T, V>::value ? rounded_to<T>(x * scale) : x * scale;
    return normed * load_up_to(weight + d, left);
}

template <class T>
INLINE float norm_scale(const T* row, int64_t dim, double eps) {
    vf squares = {};
    for (int64_t d = 0; d < dim; d += W) {
        const vf value = load_up_to(row + d, dim - d);
        squares += value * value;
    }
    return 1.0f / std::sqrt(sum_lanes(squares) / (float)dim + (float)eps);
}

// V: of the weights.
template <class T, class V>
void rms_norm_of(const RmsNormArgs& a) {
    const int64_t dim = a.dim;
    const V *weight = (const V*)a.weight, *post = (const V*)a.post;
    const float factor = (float)a.factor;
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.heads * dim > GRAIN / 4)
    for (int64_t row = 0; row < a.tokens * a.heads; ++row) {
        const int64_t t = row / a.heads, h = row % a.heads;
        const T* from = (const T*)a.x + t * a.x_token_stride + h * a.x_head_stride;
        T* to = row_of<T>(a.out, t * a.out_token_stride + h * a.out_head_stride, a.int8, dim);
        vf squares = {};
        if (a.residual) {
            const T* residual = (const T*)a.residual + t * a.residual_stride;
            T* sum = (T*)a.sum + t * dim;
            const auto add = [&](auto added) {
                for (int64_t d = 0; d < dim; d += W) {
                    const int64_t left = dim - d;
                    const vf value = rounded_to<T>(added(d, left) + load_up_to(residual + d, left));
                    store_up_to(sum + d, value, left);
                    squares += value * value;
                }
            };
            if (post) {
                const float scale = norm_scale(from, dim, a.eps);
                add([&](int64_t d, int64_t left) {
                    const vf x = load_up_to(from + d, left);
                    return rounded_to<T>(weighed<T>(x, scale, post, d, left)) * factor;
                });
            } else if (factor != 1.0f) {
                add([&](int64_t d, int64_t left) { return load_up_to(from + d, left) * factor; });
            } else {
                add([&](int64_t d, int64_t left) { return load_up_to(from + d, left); });
            }
            from = sum;
            if (!weight) {
                write_row(a.int8, t, sum, dim);
                continue;
            }
        } else {
            for (int64_t d = 0; d < dim; d += W) {
                const vf value = load_up_to(from + d, dim - d);
                squares += value * value;
            }
        }
        const float scale = 1.0f / std::sqrt(sum_lanes(squares) / (float)dim + (float)a.eps);
        for (int64_t d = 0; d < dim; d += W) {
            const int64_t left = dim - d;
            store_up_to(to + d, weighed<T>(load_up_to(from + d, left), scale, weight, d, left), left);
        }
        write_row(a.int8, t, to, dim);
    }
}

template <class T>
void rms_norm(const RmsNormArgs& a) {
    if (a.wide) rms_norm_of<T, float>(a);
    else rms_norm_of<T, T>(a);
}

template <class T>
INLINE void rotate_heads(const T* x, T* out, int64_t heads, int64_t dim, const float* cos,
                         const float* sin, int64_t half) {
    for (int64_t at = 0; at < heads * dim; at += dim) {
        for (int64_t d = 0; d < half; d += W) {
            const int64_t left = half - d, one = at + d, two = one + half;
            const vf c = load_up_to(cos + d, left), s = load_up_to(sin + d, left);
            const vf a = load_up_to(x + one, left), b = load_up_to(x + two, left);
            store_up_to(out + one, a * c - b * s, left);
            store_up_to(out + two, b * c + a * s, left);
        }
        if (out != x)
            std::memcpy(out + at + 2 * half, x + at + 2 * half, (dim - 2 * half) * sizeof(T));
    }
}

template <class T>
void rope(const RopeArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.heads * a.dim > GRAIN)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const float *cos = a.cos + t * a.half, *sin = a.sin + t * a.half;
        T *q = (T*)a.q + t * a.q_stride, *k = (T*)a.k + t * a.k_stride;
        rotate_heads(q, q, a.heads, a.dim, cos, sin, a.half);
        rotate_heads(k, k, a.kv_heads, a.dim, cos, sin, a.half);
    }
}

template <class T>
void rope_to(const RopeToArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.heads * a.dim > GRAIN)
    for (int64_t t = 0; t < a.tokens; ++t)
        rotate_heads((const T*)a.q + t * a.q_stride, (T*)a.out + t * a.out_stride, a.heads, a.dim,
                     a.cos + t * a.half, a.sin + t * a.half, a.half);
}

enum Activation { SILU, GELU_TANH };

template <int A>
INLINE vf activated(vf g) {
    // GELU by tanh: x (1 + tanh(u)) / 2 is x times the logistic function of 2u.
    const vf u = A == SILU ? g : g * (g * g * 0.044715f + 1.0f) * 1.5957691216057308f;
    return g / (1.0f + vexp(-u));
}

template <class T, int A>
void act_mul_of(const ActMulArgs& a) {
    const int64_t dim = a.dim;
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * dim > GRAIN / 4)
    for (int64_t row = 0; row < a.rows; ++row) {
        const T *gate = (const T*)a.gate_up + row * a.stride, *up = gate + dim;
        T* out = row_of<T>(a.out, row * a.out_stride, a.int8, dim);
        for (int64_t d = 0; d < dim; d += W) {
            const vf g = load_up_to(gate + d, dim - d), u = load_up_to(up + d, dim - d);
            store_up_to(out + d, activated<A>(g) * u, dim - d);
        }
        write_row(a.int8, row, out, dim);
    }
}

template <class T>
void act_mul(const ActMulArgs& a) {
    if (a.activation == GELU_TANH) act_mul_of<T, GELU_TANH>(a);
    else act_mul_of<T, SILU>(a);
}

// x = cap * tanh(x / cap)
inline void soft_cap(const SoftCapArgs& a) {
    const float cap = (float)a.cap;
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * a.dim > GRAIN / 4)
    for (int64_t row = 0; row < a.rows; ++row) {
        float* x = a.x + row * a.stride;
        for (int64_t d = 0; d < a.dim; d += W)
            store_up_to(x + d, vtanh(load_up_to(x + d, a.dim - d) / cap) * cap, a.dim - d);
    }
}

// (clamped up + 1) * g * sigmoid(alpha * g) of the gate g, which is clamped from above only.
template <class T>
void swiglu(const SwigluArgs& a) {
    const int64_t dim = a.dim;
    const vf top = splat((float)a.limit), bottom = splat(-(float)a.limit);
    const float alpha = (float)a.alpha;
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * dim > GRAIN / 4)
    for (int64_t row = 0; row < a.rows; ++row) {
        const T *gate = (const T*)a.gate_up + row * a.stride, *up = gate + dim;
        T* out = (T*)a.out + row * a.out_stride;
        for (int64_t d = 0; d < dim; d += W) {
            const vf g = load_up_to(gate + d, dim - d), u = load_up_to(up + d, dim - d);
            // A comparison with NaN is false, so that NaN stays.
            const vf low = select(g > top, top, g), mid = select(u > top, top, u);
            const vf clamped = select(mid < bottom, bottom, mid);
            store_up_to(out + d, (clamped + 1.0f) * (low / (1.0f + vexp(low * -alpha))), dim - d);
        }
    }
}

// out[t] = sum over ranks, in their order, of weights[t][rank] * rows[places[t][rank]].
template <class T>
void combine(const CombineArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.tokens * a.ranks * a.dim > GRAIN)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t* places = a.places + t * a.ranks;
        const float* weights = a.weights + t * a.ranks;
        for (int64_t d = 0; d < a.dim; d += W) {
            const int64_t left = a.dim - d;
            vf total = {};
            for (int64_t rank = 0; rank < a.ranks; ++rank)
                total += weights[rank] *
                         load_up_to((const T*)a.rows + places[rank] * a.dim + d, left);
            store_up_to((T*)a.out + t * a.dim + d, total, left);
        }
    }
}
