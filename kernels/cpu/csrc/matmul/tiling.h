// How a product with a packed weight is cut: blocks of rows that are laid out at once, tiles of rows
// whose accumulators fit the registers, and parts and panels that threads share. A row's result
// depends on none of it.

#pragma once

#include <omp.h>

#include <atomic>

#include "products.h"

constexpr int64_t BLOCK = 8 * MAX_ROWS;  // rows of x that are laid out at once

template <class T>
INLINE void grow(std::vector<T>& memory, size_t count) {
    if (memory.size() < count) memory.resize(count);
}

// Parts and panels of a product, which threads share. Each walks through a stretch of its own, since
// what follows a panel is prefetched, and helps the others when it is through.
class Shares {
    static constexpr int MOST = 64;  // threads beyond only help
    struct alignas(64) Stretch {
        std::atomic<int64_t> next;
        int64_t end;
    };
    Stretch stretches[MOST];
    int count;
    int64_t panels;

   public:
    // Before any thread takes of them.
    void cut(int64_t parts, int64_t num_panels, int threads) {
        panels = num_panels;
        count = std::clamp(threads, 1, MOST);
        for (int i = 0; i < count; ++i) {
            stretches[i].next = parts * panels * i / count;
            stretches[i].end = parts * panels * (i + 1) / count;
        }
    }
    // body(part, panel) for one after the other, until all of them are taken.
    template <class Body>
    INLINE void take(Body&& body) {
        const int own = omp_get_thread_num();
        for (int i = 0; i < count; ++i) {
            Stretch& stretch = stretches[(own + i) % count];
            for (int64_t item; (item = stretch.next++) < stretch.end;)
                body(item / panels, item % panels);
        }
    }
};

// Call body(std::integral_constant<int, n>) for a run-time n that is 1 or even, up to MAX.
template <int MAX, class Body>
INLINE void with_width(int64_t n, Body&& body) {
    if constexpr (MAX <= 2) {
        if (n == 1)
            body(std::integral_constant<int, 1>{});
        else
            body(std::integral_constant<int, 2>{});
    } else {
        if (n == MAX)
            body(std::integral_constant<int, MAX>{});
        else
            with_width<MAX - 2>(n, body);
    }
}

// A tile is one row wide or an even number (each width is code of its own): the last row of an odd
// one is computed in vain.
struct Tiling {
    int64_t rows, tile, parts, part_rows;

    Tiling(int64_t rows, int64_t panels, int threads, int most = MAX_ROWS)
        : rows(rows), tile(even(rows_per_tile(rows, most))) {
        // Rows are cut, too, where there are fewer panels than threads could share evenly.
        const int64_t tiles = (rows + tile - 1) / tile;
        parts = std::clamp<int64_t>(4 * threads / panels, 1, tiles);
        part_rows = (tiles + parts - 1) / parts * tile;
    }
    static int64_t even(int64_t n) { return n == 1 ? 1 : (n + 1) / 2 * 2; }
    int64_t first_of(int64_t row) const { return row / tile * tile; }
    int64_t width_at(int64_t first) const { return even(std::min(tile, rows - first)); }

    int64_t tiles_of(int64_t part) const {
        return std::max<int64_t>(0, (std::min(part_rows, rows - part * part_rows) + tile - 1) / tile);
    }
    // body(first row, rows, width) for the tiles of a part.
    template <class Body>
    INLINE void each_tile(int64_t part, Body&& body) const {
        const int64_t end = std::min(rows, (part + 1) * part_rows);
        for (int64_t row = part * part_rows; row < end; row += tile)
            with_width<MAX_ROWS>(width_at(row), [&](auto width) {
                body(row, std::min(tile, rows - row), width);
            });
    }
};
