// How decode attention cuts its work: contexts into splits at absolute positions, splits into pieces that
// threads take in turn, pieces into steps of one tile and one kv head.

#pragma once

#include "attention/order.h"

struct Split {
    int64_t b, begin, end, index, num_splits;
    bool sinks;  // the keys before the sink end, which are scored with `q_sink`
};

// Some kv heads of a split. A step is a tile of one head: a tile of all heads, then the next tile, as the
// keys of a block lie side by side.
struct Piece {
    const Split* split;
    int64_t first, last;

    int64_t steps() const {
        if (split->begin >= split->end) return 0;
        return ((split->end - 1) / KEY_TILE - split->begin / KEY_TILE + 1) * (last - first);
    }
    int64_t head(int64_t step) const { return first + step % (last - first); }
    int64_t tile(int64_t step) const {
        return (split->begin / KEY_TILE + step / (last - first)) * KEY_TILE;
    }
};

// A step of piece `piece`.
struct Step {
    int64_t piece, step;
    bool operator==(const Step& other) const { return piece == other.piece && step == other.step; }
};

// The work of a call, in the order in which threads take it.
struct Pieces {
    const Split* splits;
    int64_t taken, turns, count;  // heads a piece, pieces a split, pieces
    int64_t threads;

    Piece at(int64_t i) const {
        return {splits + i / turns, i % turns * taken, (i % turns + 1) * taken};
    }
    // What a thread is likely to compute after `now`, as threads take turns; or a piece that there is not.
    Step after(Step now) const {
        if (now.piece >= count || ++now.step < at(now.piece).steps()) return now;
        do now.piece += threads;
        while (now.piece < count && at(now.piece).steps() == 0);
        return {now.piece, 0};
    }
};

// Fills `splits`, those of a sequence in order; returns the number of (key, query head) pairs, the work.
INLINE int64_t cut_contexts(const AttentionArgs& a, std::vector<Split>& splits) {
    int64_t pairs = 0;
    splits.clear();
    for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t len = a.lens[b], start = a.window_starts ? a.window_starts[b] : 0;
        const int64_t begin = std::max(start, a.window ? len - a.window : 0), first = begin / SPLIT;
        const int64_t sinks = a.sink_ends ? std::min<int64_t>(a.sink_ends[b], len) : 0;
        const int64_t ahead = sinks > 0;  // splits before those of the window
        // A row without any key has one empty split, which makes its result 0.
        const int64_t count = begin < len ? (len - 1) / SPLIT - first + 1 : 1 - ahead;
        if (ahead) splits.push_back({b, 0, sinks, 0, count + 1, true});
        for (int64_t s = 0; s < count; ++s)
            splits.push_back({b, std::max(begin, (first + s) * SPLIT),
                              std::min(len, (first + s + 1) * SPLIT), ahead + s, ahead + count, false});
        pairs += (sinks + std::max<int64_t>(len - begin, 0)) * a.heads;
    }
    return pairs;
}
