// Columns of a matrix from several processes, put together in memory that they share.
//
// Each process copies its columns in, says so, waits for the others, and copies all columns out. The
// memory is one of two that take turns: who writes it again has seen everybody arrive at the call in
// between, and so leave this one.

#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "export.h"

constexpr int64_t RANK_STRIDE = 8;  // numbers between the counters of two ranks: a cache line
// Among a rank's numbers, behind its calls:
constexpr int64_t WAITED = 1;    // ns that it has waited for others
constexpr int64_t RECEIVED = 2;  // bytes that it has copied out, of columns of others
constexpr int64_t SPINS = 2000;     // looks before the core is offered to others

struct GatherArgs {
    const uint8_t* own;  // [rows] of own_bytes
    int64_t own_stride, own_bytes;
    uint8_t* shared;  // [rows] of all_bytes, dense
    int64_t at, all_bytes;  // where the own ones begin in a row; strides are in bytes, too
    uint8_t* out;           // [rows] of all_bytes; none: not wanted
    int64_t out_stride, rows;
    int64_t* arrived;  // [ranks], RANK_STRIDE apart, shared: calls that each has arrived at
    int64_t* calls;    // of this process
    int64_t rank, ranks;
};
LAYOUT(GatherArgs,
       FIELD(own) FIELD(own_stride) FIELD(own_bytes) FIELD(shared) FIELD(at) FIELD(all_bytes) FIELD(out)
       FIELD(out_stride) FIELD(rows) FIELD(arrived) FIELD(calls) FIELD(rank) FIELD(ranks))

inline void gather(const GatherArgs& a) {
    for (int64_t row = 0; row < a.rows; ++row)
        std::memcpy(a.shared + row * a.all_bytes + a.at, a.own + row * a.own_stride, a.own_bytes);
    const int64_t call = ++*a.calls;
    const auto counter = [&](int64_t rank) {
        return reinterpret_cast<std::atomic<int64_t>*>(a.arrived + rank * RANK_STRIDE);
    };
    counter(a.rank)->store(call, std::memory_order_release);
    const auto began = std::chrono::steady_clock::now();
    for (int64_t rank = 0; rank < a.ranks; ++rank)
        for (int64_t looks = 0; counter(rank)->load(std::memory_order_acquire) < call; ++looks)
            if (looks > SPINS) sched_yield();
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - began;
    a.arrived[a.rank * RANK_STRIDE + WAITED] += waited.count();
    if (!a.out) return;
    a.arrived[a.rank * RANK_STRIDE + RECEIVED] += a.rows * (a.all_bytes - a.own_bytes);
    for (int64_t row = 0; row < a.rows; ++row)
        std::memcpy(a.out + row * a.out_stride, a.shared + row * a.all_bytes, a.all_bytes);
}
