// Neurons of an expert MLP, one row each, written into the packed layout that `linear` reads.

#pragma once

#include "matmul/linear.h"

struct UnpackArgs {
    int64_t dtype;
    const void* rows;  // [count][3 * hidden]: gate, up, down of one neuron
    int64_t row_stride;
    const int64_t* places;  // which neuron each row is
    int64_t count;
    void *gate_up, *down;  // packed [2 * inner, hidden] and [hidden, inner]
    int64_t hidden, inner;
};
LAYOUT(UnpackArgs,
       FIELD(dtype) FIELD(rows) FIELD(row_stride) FIELD(places) FIELD(count) FIELD(gate_up) FIELD(down)
       FIELD(hidden) FIELD(inner))

// Where output feature n of a packed weight begins, and how far its input features are apart: those
// of one run (two in bf16) lie side by side.
template <class T>
struct Packed {
    static constexpr int64_t run = sizeof(T) == 2 ? 2 : 1;
    T* data;
    int64_t depth;  // padded to whole runs
    Packed(void* data, int64_t depth) : data((T*)data), depth((depth + run - 1) / run * run) {}
    T* at(int64_t n, int64_t k) const {
        return data + n / PANEL * PANEL * depth + k / run * run * PANEL + n % PANEL * run + k % run;
    }
};

// Rows of gate (part 0) or up (part 1), a cache line of each at a time: they lie so far apart that
// whole rows would drive each other out of the cache, and what is written together lies together.
template <class T>
void unpack_rows(const UnpackArgs& a, int64_t first, int64_t count, int64_t part) {
    constexpr int64_t run = Packed<T>::run, line = 64 / sizeof(T);
    const Packed<T> to(a.gate_up, a.hidden);
    T* outs[PANEL];
    for (int64_t r = 0; r < count; ++r) outs[r] = to.at(part * a.inner + a.places[first + r], 0);
    for (int64_t k = 0; k < a.hidden; k += line) {
        const int64_t end = std::min(k + line, a.hidden);
        for (int64_t r = 0; r < count; ++r) {
            const T* values = (const T*)a.rows + (first + r) * a.row_stride + part * a.hidden;
            for (int64_t i = k; i < end; ++i) outs[r][i / run * run * PANEL + i % run] = values[i];
        }
    }
}

// Rows of down: each is one input feature of all output features, a panel of those at a time.
template <class T>
void unpack_columns(const UnpackArgs& a, int64_t first, int64_t count) {
    constexpr int64_t run = Packed<T>::run;
    const Packed<T> to(a.down, a.inner);
    for (int64_t n = 0; n < a.hidden; n += PANEL) {
        const int64_t width = std::min<int64_t>(PANEL, a.hidden - n);
        for (int64_t r = first; r < first + count; ++r) {
            const T* values = (const T*)a.rows + r * a.row_stride + 2 * a.hidden + n;
            T* out = to.at(n, a.places[r]);
            for (int64_t i = 0; i < width; ++i) out[i * run] = values[i];
        }
    }
}

template <class T>
void unpack_neurons(const UnpackArgs& a) {
    for (int64_t first = 0; first < a.count; first += PANEL) {
        const int64_t count = std::min<int64_t>(PANEL, a.count - first);
        unpack_rows<T>(a, first, count, 0);
        unpack_rows<T>(a, first, count, 1);
        unpack_columns<T>(a, first, count);
    }
}
