// The tile instructions of AMX in plain C++, so that the code for the matrix unit runs on any CPU with
// AVX-512. Included before the library's sources, with __AMX_INT8__ and __AMX_BF16__ defined.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated {

constexpr int ROWS = 16, BYTES = 64;
inline thread_local uint8_t tiles[8][ROWS][BYTES];

inline void load(int tile, const void* from, long stride) {
    for (int row = 0; row < ROWS; ++row)
        std::memcpy(tiles[tile][row], (const char*)from + row * stride, BYTES);
}

inline void store(int tile, void* to, long stride) {
    for (int row = 0; row < ROWS; ++row)
        std::memcpy((char*)to + row * stride, tiles[tile][row], BYTES);
}

// to[m][n] += the sum over k and i of left[m][4 k + i] * right[k][4 n + i].
template <class Left>
void multiply(int to, int left, int right) {
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < ROWS; ++n) {
            int32_t sum;
            std::memcpy(&sum, &tiles[to][m][4 * n], 4);
            for (int at = 0; at < BYTES; ++at)
                sum += (int32_t)(Left)tiles[left][m][at] * tiles[right][at / 4][4 * n + at % 4];
            std::memcpy(&tiles[to][m][4 * n], &sum, 4);
        }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) ((void)(shape))
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define _tile_dpbsud(to, left, right) emulated::multiply<int8_t>(to, left, right)
#define _tile_dpbuud(to, left, right) emulated::multiply<uint8_t>(to, left, right)
#define _tile_dpbf16ps(to, left, right) std::abort()  // its order of summation is the unit's own
#define syscall(...) 0  // amx_usable: the kernel lets us
