// The MLP of an expert over chosen neurons, whose rows lie anywhere in a pool of rows.
//
// A row is [gate | up | down] of one neuron, dim numbers each, in a format that kernels/neurons.py
// describes. A neuron's row is read once, from end to end.
// Additions: neurons of a token in their given order, a block of NEURONS in one chain, then the blocks
// in order; so the result does not depend on places, other tokens or threads. Neurons may come in
// several calls, each of which adds its blocks to the fp32 sum of those before.

#pragma once

#include "attention/kv_codes.h"
#include "export.h"
#include "products.h"

constexpr int64_t NEURONS = 16;  // neurons that one thread adds up
constexpr int DOT_CHAINS = 4;      // accumulators of a dot product

struct NeuronArgs {
    int64_t dtype;  // of x and out
    const void* x;
    int64_t x_stride;
    const uint8_t* pool;
    int64_t row_bytes;
    int64_t format;         // of rows: 0 fp32, 1 bf16, 2 int8, 3 int4
    const int32_t* places;  // by token, and then by neuron: the row in the pool
    const int64_t* ends;    // [tokens] where those of each token end
    float* sums;            // [blocks of all tokens][dim]
    float* so_far;          // [tokens][dim]: of earlier calls; nullptr: this call is the only one
    int64_t begins, is_last;
    void* out;              // written by the last call
    int64_t out_stride;
    int64_t tokens, dim, threads;
};
LAYOUT(NeuronArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(pool) FIELD(row_bytes) FIELD(format) FIELD(places)
       FIELD(ends) FIELD(sums) FIELD(so_far) FIELD(begins) FIELD(is_last) FIELD(out)
       FIELD(out_stride) FIELD(tokens) FIELD(dim) FIELD(threads))

// x . row over [0, count), in DOT_CHAINS interleaved chains.
template <class T, class R>
INLINE float dot_rows(const T* x, const R* row, int64_t count) {
    vf acc[DOT_CHAINS] = {};
    int64_t d = 0;
    for (; d + DOT_CHAINS * W <= count; d += DOT_CHAINS * W)
        UNROLL for (int c = 0; c < DOT_CHAINS; ++c)
            acc[c] = multiply_add(load(x + d + c * W), load(row + d + c * W), acc[c]);
    for (; d < count; d += W)
        acc[0] = multiply_add(load_up_to(x + d, count - d), load_up_to(row + d, count - d), acc[0]);
    return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

// sum[0, count) += scale * row.
template <class R>
INLINE void add_row(float scale, const R* row, int64_t count, float* sum) {
    int64_t d = 0;
    for (; d + W <= count; d += W) store(sum + d, multiply_add(scale, load(row + d), load(sum + d)));
    if (d < count) {
        const vf total = multiply_add(scale, load_partial(row + d, count - d),
                                      load_partial(sum + d, count - d));
        store_partial(sum + d, total, count - d);
    }
}

// The parts of one row, of numbers R.
template <class R>
struct PlainNeuron {
    const R* values;
    int64_t dim;
    PlainNeuron(const uint8_t* at, const NeuronArgs& a) : values((const R*)at), dim(a.dim) {}
    template <class T>
    float dot(const T* x, int64_t part) const {
        return dot_rows(x, values + part * dim, dim);
    }
    void add(float scale, float* sum) const { add_row(scale, values + 2 * dim, dim, sum); }
};

// The same of int8 codes.
struct Int8Neuron {
    static constexpr int64_t group = 64;
    const int8* codes;
    const uint8_t* scales;  // fp32, not aligned
    int64_t dim, groups;
    Int8Neuron(const uint8_t* at, const NeuronArgs& a)
        : codes((const int8*)at), scales(at + 3 * a.dim), dim(a.dim),
          groups((a.dim + group - 1) / group) {}
    float scale(int64_t i) const {
        float found;
        std::memcpy(&found, scales + 4 * i, sizeof found);
        return found;
    }
    template <class T>
    float dot(const T* x, int64_t part) const {
        float total = 0;
        for (int64_t g = 0, d = 0; g < groups; ++g, d += group)
            total += scale(part * groups + g) *
                     dot_rows(x + d, codes + part * dim + d, std::min(group, dim - d));
        return total;
    }
    void add(float by, float* sum) const {
        for (int64_t g = 0, d = 0; g < groups; ++g, d += group)
            add_row(by * scale(2 * groups + g), codes + 2 * dim + d, std::min(group, dim - d),
                    sum + d);
    }
};

// Codes of W numbers, from the lower (shift 0) or upper (4) halves of W bytes.
INLINE vf load_halves(const uint8_t* p, int shift) {
#if defined(__AVX512F__)
    const vi bytes = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const vi bytes = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vi bytes;
    for (int i = 0; i < W; ++i) bytes[i] = p[i];
#endif
    return __builtin_convertvector(((bytes >> shift) & 15) - 8, vf);
}

// The same of int4 codes.
struct Int4Neuron {
    static constexpr int64_t group = 32, half = 16;
    const uint8_t *codes, *scales;  // bf16, not aligned
    int64_t dim, groups;
    Int4Neuron(const uint8_t* at, const NeuronArgs& a)
        : codes(at), dim(a.dim), groups((a.dim + group - 1) / group) {
        scales = at + 3 * groups * half;
    }
    float scale(int64_t i) const {
        uint16_t bits;
        std::memcpy(&bits, scales + 2 * i, sizeof bits);
        const uint32_t wide = (uint32_t)bits << 16;
        float found;
        std::memcpy(&found, &wide, sizeof found);
        return found;
    }
    template <class T>
    static float dot_group(const T* x, const uint8_t* from) {
        vf acc[2] = {};
        UNROLL for (int64_t i = 0; i < half; i += W)
            UNROLL for (int h = 0; h < 2; ++h)
                acc[h] = multiply_add(load(x + h * half + i), load_halves(from + i, 4 * h), acc[h]);
        return sum_lanes(acc[0] + acc[1]);
    }
    static void add_group(float by, const uint8_t* from, float* sum) {
        UNROLL for (int64_t i = 0; i < half; i += W)
            UNROLL for (int h = 0; h < 2; ++h) {
                float* to = sum + h * half + i;
                store(to, multiply_add(by, load_halves(from + i, 4 * h), load(to)));
            }
    }
    template <class T>
    float dot(const T* x, int64_t part) const {
        float total = 0;
        for (int64_t g = 0, d = 0; g < groups; ++g, d += group) {
            const uint8_t* from = codes + (part * groups + g) * half;
            const T* states = x + d;
            T some[group] = {};
            if (d + group > dim) {
                std::memcpy(some, states, (dim - d) * sizeof(T));
                states = some;
            }
            total += scale(part * groups + g) * dot_group(states, from);
        }
        return total;
    }
    void add(float by, float* sum) const {
        for (int64_t g = 0, d = 0; g < groups; ++g, d += group) {
            const uint8_t* from = codes + (2 * groups + g) * half;
            const float scaled = by * scale(2 * groups + g);
            if (d + group <= dim) {
                add_group(scaled, from, sum + d);
            } else {
                float some[group] = {};
                std::memcpy(some, sum + d, (dim - d) * sizeof(float));
                add_group(scaled, from, some);
                std::memcpy(sum + d, some, (dim - d) * sizeof(float));
            }
        }
    }
};

template <class T, class Row>
void neuron_mlp_of(const NeuronArgs& a) {
    std::vector<int64_t> first_block(a.tokens + 1, 0), token_of;
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t count = a.ends[t] - (t ? a.ends[t - 1] : 0);
        first_block[t + 1] = first_block[t] + (count + NEURONS - 1) / NEURONS;
        token_of.resize(first_block[t + 1], t);
    }
    const int64_t blocks = first_block[a.tokens];
#pragma omp parallel for num_threads((int)a.threads) if (blocks * NEURONS * a.dim > GRAIN / 2)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t t = token_of[block], begin = t ? a.ends[t - 1] : 0;
        const int64_t first = begin + (block - first_block[t]) * NEURONS;
        const T* x = (const T*)a.x + t * a.x_stride;
        float* sum = a.sums + block * a.dim;
        std::memset(sum, 0, a.dim * sizeof(float));
        for (int64_t n = first; n < std::min(first + NEURONS, a.ends[t]); ++n) {
            const Row row(a.pool + a.places[n] * a.row_bytes, a);
            const float gate = row.dot(x, 0), up = row.dot(x, 1);
            row.add(gate / (1.0f + std::exp(-gate)) * up, sum);
        }
    }
    for (int64_t t = 0; t < a.tokens; ++t)
        for (int64_t d = 0; d < a.dim; d += W) {
            float* so_far = a.so_far ? a.so_far + t * a.dim + d : nullptr;
            vf total = {};
            if (so_far && !a.begins) total = load_up_to(so_far, a.dim - d);
            for (int64_t block = first_block[t]; block < first_block[t + 1]; ++block)
                total += load_up_to(a.sums + block * a.dim + d, a.dim - d);
            if (so_far) store_up_to(so_far, total, a.dim - d);
            if (a.is_last) store_up_to((T*)a.out + t * a.out_stride + d, total, a.dim - d);
        }
}

template <class T>
void neuron_mlp(const NeuronArgs& a) {
    if (a.format == 0)
        neuron_mlp_of<T, PlainNeuron<float>>(a);
    else if (a.format == 1)
        neuron_mlp_of<T, PlainNeuron<bf16>>(a);
    else if (a.format == 2)
        neuron_mlp_of<T, Int8Neuron>(a);
    else
        neuron_mlp_of<T, Int4Neuron>(a);
}
