// Gated DeltaNet: the short convolution, the recurrence of each head's state, and the gated norm of what
// is read from it (kernels/delta.py has the formulas); and the gate of an attention's output.
//
// A task is one key head of one sequence, with its value heads. It computes one token after the other, so
// that no sum depends on where a chunk ends.

#pragma once

#include "rowwise.h"

constexpr int64_t MAX_TAPS = 16;

struct DeltaArgs {
    int64_t dtype;
    const void* mixed;  // [tokens, channels]: q, k and v of all heads
    int64_t mixed_stride;
    const void* z;  // [tokens, value_heads * value_dim]
    int64_t z_stride;
    const void* ba;  // [tokens, 2 * value_heads]: b, then a
    int64_t ba_stride;
    const float* conv;             // [taps, channels], the newest tap last
    const float *decay, *dt_bias;  // [value_heads]
    const float* norm;             // [value_dim]
    double eps;
    void* last;  // [slots] of [taps - 1, channels]: the last rows of `mixed`, the newest last
    int64_t last_stride;
    float* state;  // [slots] of [value_heads, key_dim, value_dim]
    int64_t state_stride;
    const int32_t *starts, *sources, *write_starts, *write_after, *write_slots;
    void* out;  // [tokens, value_heads * value_dim]
    int64_t out_stride;
    int64_t sequences, taps /* at most MAX_TAPS */, key_heads, value_heads, key_dim, value_dim, threads;
};
LAYOUT(DeltaArgs,
       FIELD(dtype) FIELD(mixed) FIELD(mixed_stride) FIELD(z) FIELD(z_stride) FIELD(ba) FIELD(ba_stride)
       FIELD(conv) FIELD(decay) FIELD(dt_bias) FIELD(norm) FIELD(eps) FIELD(last) FIELD(last_stride)
       FIELD(state) FIELD(state_stride) FIELD(starts) FIELD(sources) FIELD(write_starts)
       FIELD(write_after) FIELD(write_slots) FIELD(out) FIELD(out_stride) FIELD(sequences) FIELD(taps)
       FIELD(key_heads) FIELD(value_heads) FIELD(key_dim) FIELD(value_dim) FIELD(threads))

struct GateMulArgs {
    int64_t dtype;
    void* x;
    int64_t x_stride;
    const void* gate;
    int64_t gate_stride, rows, dim, threads;
};
LAYOUT(GateMulArgs,
       FIELD(dtype) FIELD(x) FIELD(x_stride) FIELD(gate) FIELD(gate_stride) FIELD(rows) FIELD(dim)
       FIELD(threads))

// x *= sigmoid(gate)
template <class T>
void gate_mul(const GateMulArgs& a) {
#pragma omp parallel for num_threads((int)a.threads) if (a.rows * a.dim > GRAIN / 4)
    for (int64_t row = 0; row < a.rows; ++row) {
        T* x = (T*)a.x + row * a.x_stride;
        const T* gate = (const T*)a.gate + row * a.gate_stride;
        for (int64_t d = 0; d < a.dim; d += W) {
            const int64_t left = a.dim - d;
            const vf factor = 1.0f / (1.0f + vexp(-load_up_to(gate + d, left)));
            store_up_to(x + d, load_up_to(x + d, left) * factor, left);
        }
    }
}

// N * W columns of one head's state, whose rows are `width` floats apart, in place: what k finds in it is
// corrected towards v. `out`: what q finds afterwards.
template <int N>
INLINE void delta_columns(float* state, int64_t width, const float* q, const float* k, const float* v,
                          int64_t keys, float decay, float beta, float* out) {
    vf sums[N] = {};
    for (int64_t i = 0; i < keys; ++i)
        UNROLL for (int n = 0; n < N; ++n) sums[n] += load(state + i * width + n * W) * k[i];
    vf added[N];
    UNROLL for (int n = 0; n < N; ++n) added[n] = (load(v + n * W) - sums[n] * decay) * beta;
    vf read[N] = {};
    for (int64_t i = 0; i < keys; ++i)
        UNROLL for (int n = 0; n < N; ++n) {
            float* at = state + i * width + n * W;
            const vf cell = load(at) * decay + added[n] * k[i];
            store(at, cell);
            read[n] += cell * q[i];
        }
    UNROLL for (int n = 0; n < N; ++n) store(out + n * W, read[n]);
}

// Memory of a thread; a row of values is padded to whole vectors, and the padding stays zero.
struct DeltaScratch {
    std::vector<float> state, q, k, v, read;
};

// One key head of one sequence.
template <class T>
struct DeltaTask {
    const DeltaArgs& a;
    const int64_t sequence, head;
    DeltaScratch& own;
    const int64_t shared = a.value_heads / a.key_heads;  // value heads of a key head
    const int64_t channels = 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
    const int64_t first = a.starts[sequence], rows = a.starts[sequence + 1] - first;
    const int64_t source = a.sources[sequence];
    const int64_t width = (a.value_dim + W - 1) / W * W, cells = a.key_dim * width;
    const int64_t q_at = head * a.key_dim, k_at = q_at + a.key_heads * a.key_dim;
    const int64_t v_at = 2 * a.key_heads * a.key_dim + head * shared * a.value_dim;

    // The row of `mixed` at `row` of this sequence, which may lie before its first; null: there is none.
    const T* mixed_at(int64_t row) const {
        if (row >= 0) return (const T*)a.mixed + (first + row) * a.mixed_stride;
        if (source < 0) return nullptr;
        return (const T*)a.last + source * a.last_stride + (a.taps - 1 + row) * channels;
    }

    // Channels [at, at + n) of the convolution's output for the row that sees the rows `seen`.
    void convolve(const T* const* seen, int64_t at, int64_t n, float* out) const {
        for (int64_t c = 0; c < n; c += W) {
            vf sum = {};
            for (int64_t tap = 0; tap < a.taps; ++tap) {
                if (!seen[tap]) continue;
                const float* weight = a.conv + tap * channels + at + c;
                sum += load_up_to(seen[tap] + at + c, n - c) * load_up_to(weight, n - c);
            }
            store(out + c, activated<SILU>(sum));
        }
    }

    // In place: a key or a query of length 1, times `factor`.
    void normalise(float* x, float factor) const {
        vf squares = {};
        for (int64_t d = 0; d < a.key_dim; d += W) squares += load(x + d) * load(x + d);
        const float scale = factor / std::sqrt(sum_lanes(squares) + 1e-6f);
        for (int64_t d = 0; d < a.key_dim; d += W) store(x + d, load(x + d) * scale);
    }

    void read_state(int64_t value_head, float* to) const {
        const float* from = a.state + source * a.state_stride + value_head * a.key_dim * a.value_dim;
        for (int64_t i = 0; i < a.key_dim; ++i)
            std::memcpy(to + i * width, from + i * a.value_dim, a.value_dim * sizeof(float));
    }

    void update(int64_t row, int64_t value_head, float* state) const {
        const T* ba = (const T*)a.ba + (first + row) * a.ba_stride;
        const float b = load_partial(ba + value_head, 1)[0];
        const float raw = load_partial(ba + a.value_heads + value_head, 1)[0] + a.dt_bias[value_head];
        const float step = raw > 20.0f ? raw : std::log1p(std::exp(raw));
        const float decay = std::exp(a.decay[value_head] * step), beta = 1.0f / (1.0f + std::exp(-b));
        const float *q = own.q.data(), *k = own.k.data();
        int64_t at = 0;
        const auto columns = [&](auto count) {
            constexpr int N = decltype(count)::value;
            for (; at + N * W <= width; at += N * W)
                delta_columns<N>(state + at, width, q, k, own.v.data() + at, a.key_dim, decay, beta,
                                 own.read.data() + at);
        };
        columns(std::integral_constant<int, 8>{});
        columns(std::integral_constant<int, 4>{});
        columns(std::integral_constant<int, 1>{});
    }

    // The norm of what was read, times silu(z).
    void put(int64_t row, int64_t value_head) const {
        const int64_t dim = a.value_dim, at = value_head * dim;
        const T* z = (const T*)a.z + (first + row) * a.z_stride + at;
        T* out = (T*)a.out + (first + row) * a.out_stride + at;
        const float* read = own.read.data();
        const float scale = norm_scale(read, dim, a.eps);
        for (int64_t d = 0; d < dim; d += W) {
            const int64_t left = dim - d;
            const vf value = load(read + d) * scale * load_up_to(a.norm + d, left);
            store_up_to(out + d, value * activated<SILU>(load_up_to(z + d, left)), left);
        }
    }

    // The state after the first `done` rows.
    void write(int64_t done, int64_t slot) const {
        for (int64_t n = 0; n < shared; ++n) {
            const int64_t value_head = head * shared + n;
            float* to = a.state + slot * a.state_stride + value_head * a.key_dim * a.value_dim;
            for (int64_t i = 0; i < a.key_dim; ++i)
                std::memcpy(to + i * a.value_dim, own.state.data() + n * cells + i * width,
                            a.value_dim * sizeof(float));
        }
        T* last = (T*)a.last + slot * a.last_stride;
        for (int64_t tap = 0; tap + 1 < a.taps; ++tap, last += channels) {
            const T* x = mixed_at(done - a.taps + 1 + tap);
            const auto copy = [&](int64_t at, int64_t n) {
                if (x)
                    std::memcpy(last + at, x + at, n * sizeof(T));
                else
                    std::memset((void*)(last + at), 0, n * sizeof(T));
            };
            copy(q_at, a.key_dim);
            copy(k_at, a.key_dim);
            copy(v_at, shared * a.value_dim);
        }
    }

    void run() const {
        const int64_t keys = (a.key_dim + W - 1) / W * W;
        own.state.assign(shared * cells, 0.0f);
        own.q.resize(keys), own.k.resize(keys);
        own.v.resize(width), own.read.resize(width);
        if (source >= 0)
            for (int64_t n = 0; n < shared; ++n)
                read_state(head * shared + n, own.state.data() + n * cells);
        int64_t next = a.write_starts[sequence];
        const int64_t end = a.write_starts[sequence + 1];
        const float q_factor = 1.0f / std::sqrt((float)a.key_dim);
        for (int64_t row = 0; row < rows; ++row) {
            const T* seen[MAX_TAPS];
            for (int64_t tap = 0; tap < a.taps; ++tap) seen[tap] = mixed_at(row - a.taps + 1 + tap);
            convolve(seen, q_at, a.key_dim, own.q.data());
            convolve(seen, k_at, a.key_dim, own.k.data());
            normalise(own.q.data(), q_factor);
            normalise(own.k.data(), 1.0f);
            for (int64_t n = 0; n < shared; ++n) {
                convolve(seen, v_at + n * a.value_dim, a.value_dim, own.v.data());
                update(row, head * shared + n, own.state.data() + n * cells);
                put(row, head * shared + n);
            }
            for (; next < end && a.write_after[next] == row + 1; ++next)
                write(row + 1, a.write_slots[next]);
        }
    }
};

template <class T>
void delta(const DeltaArgs& a) {
    const int64_t tasks = a.sequences * a.key_heads;
#pragma omp parallel num_threads((int)a.threads) if (tasks * a.key_dim * a.value_dim > GRAIN / 4)
    {
        static thread_local DeltaScratch own;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task)
            DeltaTask<T>{a, task / a.key_heads, task % a.key_heads, own}.run();
    }
}
