// The matrix unit of newer Intel CPUs (AMX): tiles of 16 rows of 64 bytes, and products of two tiles.
// Multiplies bytes in groups of four (four codes, or two bf16) into sums of four bytes; no scales.
//
// A panel as linear.h and linear_int8.h pack it is already what the unit reads: [groups][2 W][4]
// bytes, 16 groups of 16 output features a tile. Rows of x are read where they are, or laid out in tiles
// of 16 rows, zeros past K; rows of a tile that are not needed are computed all the same. The unit adds up
// each element in one order, whatever the other rows are.

#pragma once

#include "matmul/tiling.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAVE_AMX 0
#endif

constexpr int TILE_ROWS = 16, TILE_BYTES = 1024;
constexpr int64_t AMX_ROWS = 2 * TILE_ROWS;      // of x that one pass through a panel serves
constexpr int64_t AMX_BLOCK = 4 * AMX_ROWS;      // that are laid out at once
constexpr int64_t AMX_STEP = TILE_ROWS * 8 * W;  // bytes of a panel that are multiplied at once

#if HAVE_AMX
// Whether the kernel lets this process use the unit: it saves 8 KB more for each thread that does.
inline bool amx_usable() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return granted;
}

// GCC's loads and stores of tiles do not say that they touch memory: what is at `p` is written out
// before this, and read again after it.
INLINE void through_memory(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// All eight tiles at their full size, for as long as this lives. Sums are in 0 to 3 ([row][column]), x
// in 4 and 5, the panel in 6 and 7.
class AmxTiles {
   public:
    AmxTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 64, shape.rows[i] = TILE_ROWS;
        through_memory(&shape);
        _tile_loadconfig(&shape);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
};

struct Bf16Products {
    INLINE static void first() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    INLINE static void second() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
struct SignedProducts {  // signed x, unsigned weights
    INLINE static void first() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    INLINE static void second() {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
};

// 16 rows of x, and how many bytes their rows and their steps are apart: laid out, or as they came.
struct AmxRows {
    const uint8_t* at;
    int64_t row_bytes = 64, step_bytes = TILE_BYTES;

    INLINE AmxRows from(int64_t step) const { return {at + step * step_bytes, row_bytes, step_bytes}; }
};

// What a pass prefetches meanwhile: cache lines per step, a multiple of four, of four stretches in
// turn (see prefetch_ahead).
struct AmxAhead {
    const uint8_t* at;
    int64_t lines;
    int64_t stretch = 0;   // in lines
    bool is_walk = false;  // `at` is where the pass itself reads

    INLINE void prefetch(int64_t step) const {
        if (is_walk) {
            for (int64_t i = 0; i < AMX_STEP; i += 64) prefetch_ahead(at + step * AMX_STEP + i);
            return;
        }
        for (int64_t i = step * lines; i < (step + 1) * lines; i += 4)
            UNROLL for (int j = 0; j < 4; ++j) __builtin_prefetch(at + 64 * (i / 4 + j * stretch));
    }
};

// sums[rows][PANEL] = up to 32 rows, 16 of x and those of `second`, times one panel, in steps of 16
// groups; or += if it `goes_on`. Arguments by value stay in registers across through_memory.
template <class Products>
INLINE void amx_panel(AmxRows x, AmxRows second, int64_t rows, const uint8_t* panel,
                      int64_t groups, AmxAhead ahead, bool goes_on, void* sums) {
    const int64_t steps = (groups + TILE_ROWS - 1) / TILE_ROWS;
    const bool two = rows > TILE_ROWS;
    alignas(64) uint8_t tail[AMX_STEP];
    uint8_t* const lower = (uint8_t*)sums + TILE_ROWS * 8 * W;
    if (goes_on) {
        through_memory(sums);
        _tile_loadd(0, sums, 8 * W);
        _tile_loadd(1, (uint8_t*)sums + 4 * W, 8 * W);
        _tile_loadd(2, lower, 8 * W);
        _tile_loadd(3, lower + 4 * W, 8 * W);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    through_memory(tail);
    for (int64_t step = 0; step < steps; ++step) {
        const uint8_t* from = panel + step * AMX_STEP;
        const int64_t left = (groups - step * TILE_ROWS) * 8 * W;
        if (left < AMX_STEP) {
            std::memcpy(tail, from, left);
            std::memset(tail + left, 0, AMX_STEP - left);
            from = tail;
            through_memory(tail);
        }
        _tile_loadd(6, from, 8 * W);
        _tile_loadd(7, from + 4 * W, 8 * W);
        _tile_loadd(4, x.at + step * x.step_bytes, x.row_bytes);
        ahead.prefetch(step);
        Products::first();
        if (two) {
            _tile_loadd(5, second.at + step * second.step_bytes, second.row_bytes);
            Products::second();
        }
    }
    _tile_stored(0, sums, 8 * W);
    _tile_stored(1, (uint8_t*)sums + 4 * W, 8 * W);
    if (two) {
        _tile_stored(2, lower, 8 * W);
        _tile_stored(3, lower + 4 * W, 8 * W);
    }
    through_memory(sums);
}

// Where 64 bytes of a row of a block lie, from byte 64 * step on.
INLINE uint8_t* amx_place(uint8_t* block, int64_t row, int64_t step, int64_t steps) {
    return block + (row / TILE_ROWS * steps + step) * TILE_BYTES + row % TILE_ROWS * 64;
}

// Rows of `bytes` bytes into tiles, zeros after them.
INLINE void amx_lay_out(uint8_t* block, int64_t row, int64_t steps, const void* from, int64_t bytes) {
    for (int64_t step = 0; step < steps; ++step) {
        uint8_t* to = amx_place(block, row, step, steps);
        const int64_t count = std::min<int64_t>(64, bytes - 64 * step);
        if (count == 64) {  // known here, so that it is one move and no call
            std::memcpy(to, (const uint8_t*)from + 64 * step, 64);
            continue;
        }
        std::memcpy(to, (const uint8_t*)from + 64 * step, count);
        std::memset(to + count, 0, 64 - count);
    }
}

// How a block of rows is cut where there are fewer panels than threads could share evenly.
struct AmxCut {
    int64_t rows, parts, part_rows;

    AmxCut(int64_t rows, int64_t panels, int threads) : rows(rows) {
        const int64_t passes = (rows + AMX_ROWS - 1) / AMX_ROWS;
        parts = std::clamp<int64_t>(4 * threads / panels, 1, passes);
        part_rows = (passes + parts - 1) / parts * AMX_ROWS;
    }
};

// A panel as the passes for `rows` rows go through it: in pieces that stay in the L2 cache from one
// pass to the next, the sums kept in memory meanwhile.
struct AmxPieces {
    int64_t passes, steps;  // through each piece, of each but the last

    AmxPieces(int64_t rows, int64_t all) : passes((rows + AMX_ROWS - 1) / AMX_ROWS), steps(all) {
        constexpr int64_t MOST = (256 << 10) / AMX_STEP;
        const int64_t count = (all + MOST - 1) / MOST;
        if (passes > 1) steps = (all + count - 1) / count;
    }
    // Several passes prefetch the next piece, a part of it each, so that the memory is busy in all of
    // them; a single one prefetches what is a little further on.
    INLINE AmxAhead ahead(const uint8_t* piece, int64_t pass, bool is_last) const {
        constexpr int64_t LINES = AMX_STEP / 64;
        if (passes == 1) return {piece, LINES, 0, true};
        if (is_last) return {piece, 0};
        const int64_t lines = (LINES / passes + 3) / 4 * 4;
        return {piece + steps * (AMX_STEP + pass * lines * 64), lines, steps * lines / 4};
    }
};

// The sums of rows `first` to `end` with one panel. rows_at(row): 16 rows, finish(row, sums): takes them.
template <class Products, class RowsAt, class Finish>
INLINE void amx_passes(int64_t first, int64_t end, const uint8_t* panel, int64_t groups, bool is_last,
                       RowsAt&& rows_at, Finish&& finish) {
    const int64_t steps = std::max<int64_t>(1, (groups + TILE_ROWS - 1) / TILE_ROWS);  // of K = 0, too
    const AmxPieces pieces(end - first, steps);
    alignas(64) uint8_t sums[AMX_BLOCK * 8 * W];
    for (int64_t step = 0; step < steps; step += pieces.steps) {
        const uint8_t* piece = panel + step * AMX_STEP;
        const int64_t left = groups - step * TILE_ROWS, most = pieces.steps * TILE_ROWS;
        const bool ends = left <= most;
        for (int64_t row = first, pass = 0; row < end; row += AMX_ROWS, ++pass) {
            uint8_t* to = sums + pass * AMX_ROWS * 8 * W;
            amx_panel<Products>(rows_at(row).from(step), rows_at(row + TILE_ROWS).from(step),
                                end - row, piece, std::min(left, most),
                                pieces.ahead(piece, pass, ends && is_last), step > 0, to);
            if (!ends) continue;
            for (int64_t r = 0; r < std::min(AMX_ROWS, end - row); ++r) finish(row + r, to + r * 8 * W);
        }
    }
}

// A whole product: prepare(start, row, block) lays out a row, finish(start, row, panel, sums) takes its
// sums with one panel, [PANEL] of 4 bytes. `ready`: rows that can be read where they are (null: none
// can); of these only such as do not fill a tile are laid out.
template <class Products, class Prepare, class Finish>
INLINE void amx_linear(int64_t num_rows, int64_t columns, int64_t depth, int64_t groups, int threads,
                       const uint8_t* packed, const AmxRows& ready, Prepare&& prepare,
                       Finish&& finish) {
    static thread_local std::vector<uint8_t> own;
    static thread_local Shares own_shares;
    std::vector<uint8_t>& block = own;  // the caller's, for all threads
    Shares& shares = own_shares;
    const int64_t panels = (columns + 2 * W - 1) / (2 * W), steps = (groups + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t most = (std::min(num_rows, AMX_BLOCK) + TILE_ROWS - 1) / TILE_ROWS;
    grow(block, most * steps * TILE_BYTES + 64);
    uint8_t* x = block.data() + (64 - (uintptr_t)block.data() % 64) % 64;
#pragma omp parallel num_threads(threads) if (columns * depth * num_rows > GRAIN)
    {
        const AmxTiles tiles;
        for (int64_t start = 0; start < num_rows; start += AMX_BLOCK) {
            const AmxCut cut(std::min(AMX_BLOCK, num_rows - start), panels, threads);
            const int64_t in_place = ready.at ? cut.rows / TILE_ROWS * TILE_ROWS : 0;
            const auto rows_at = [&](int64_t row) -> AmxRows {
                if (row >= in_place) return {amx_place(x, row, 0, steps)};
                return {ready.at + (start + row) * ready.row_bytes, ready.row_bytes, ready.step_bytes};
            };
#pragma omp single nowait
            shares.cut(cut.parts, panels, threads);
#pragma omp for schedule(static)
            for (int64_t row = in_place; row < cut.rows; ++row) prepare(start, row, x);
            shares.take([&](int64_t part, int64_t p) {
                const int64_t first = part * cut.part_rows;
                const int64_t end = std::min(cut.rows, first + cut.part_rows);
                amx_passes<Products>(
                    first, end, packed + p * groups * 8 * W, groups, p + 1 == panels, rows_at,
                    [&](int64_t row, const uint8_t* sums) { finish(start, row, p, sums); });
            });
            if (start + AMX_BLOCK < num_rows) {
#pragma omp barrier
            }
        }
    }
}
#else
inline bool amx_usable() { return false; }
#endif
