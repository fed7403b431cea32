// Earlier places in a text where its newest tokens occurred, by chains of equal hashes (as in LZ77
// coders). The text is a ring: position p lies at p & (capacity - 1), and the oldest are overwritten.
//
// `heads` has the newest position of each hash of three tokens, plus one; `before` at a position the
// next older one. `short_heads` has the newest of each one and two tokens that something follows, plus
// one. The work of a search is bounded: CANDIDATES places, DEPTH tokens of each, among the LOOKS newest
// of the hash, of which some may be of other tokens; then, if none of them matches, two places.

#pragma once

#include <cstdint>

#include "export.h"

constexpr int64_t CANDIDATES = 8;
constexpr int64_t LOOKS = 64;
constexpr int64_t DEPTH = 32;
constexpr int64_t GRAM = 3;

struct IndexTextArgs {
    const int32_t* tokens;  // [capacity], a power of two
    int32_t *heads, *before;  // [1 << head_bits], zeroed; [capacity]
    int32_t* short_heads;     // [2 << head_bits], zeroed
    int64_t capacity, head_bits, begin, end;  // positions to be added
};
LAYOUT(IndexTextArgs,
       FIELD(tokens) FIELD(heads) FIELD(before) FIELD(short_heads) FIELD(capacity) FIELD(head_bits)
       FIELD(begin) FIELD(end))

struct MatchTextArgs {
    const int32_t *tokens, *heads, *before, *short_heads;
    int64_t capacity, head_bits, end;  // positions [0, end) are indexed
    const int32_t* newest;             // [num_newest]: what is searched for ends here
    int64_t num_newest, is_own;        // is_own: they are the text's own last tokens
    int32_t* out;                      // [most]: what followed
    int64_t most;
    int64_t* found;  // [2]: tokens that matched, tokens in `out`
};
LAYOUT(MatchTextArgs,
       FIELD(tokens) FIELD(heads) FIELD(before) FIELD(short_heads) FIELD(capacity) FIELD(head_bits) FIELD(end)
       FIELD(newest) FIELD(num_newest) FIELD(is_own) FIELD(out) FIELD(most) FIELD(found))

inline int64_t gram_hash(int32_t a, int32_t b, int32_t c, int64_t bits) {
    uint64_t mixed = (uint64_t)(uint32_t)a * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 29) ^ (uint32_t)b) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 32) ^ (uint32_t)c) * 0x94D049BB133111EBu;
    return (int64_t)(mixed >> (64 - bits));
}

// Of `size` tokens, 1 or 2: a and b, or b alone.
inline int64_t short_hash(int32_t a, int32_t b, int size, int64_t head_bits) {
    return gram_hash(size == 2 ? a : -2, b, size, head_bits + 1);
}

inline void index_text(const IndexTextArgs& a) {
    const int64_t mask = a.capacity - 1;
    // What follows the last token is not known before the next call.
    for (int64_t p = a.begin ? a.begin - 1 : 0; p < a.end - 1; ++p)
        for (int size = 1; size <= 2 && size <= p + 1; ++size)
            a.short_heads[short_hash(a.tokens[(p - 1) & mask], a.tokens[p & mask], size, a.head_bits)] =
                (int32_t)(p + 1);
    for (int64_t p = a.begin < GRAM - 1 ? GRAM - 1 : a.begin; p < a.end; ++p) {
        const int64_t hash = gram_hash(a.tokens[(p - 2) & mask], a.tokens[(p - 1) & mask],
                                       a.tokens[p & mask], a.head_bits);
        a.before[p & mask] = a.heads[hash];
        a.heads[hash] = (int32_t)(p + 1);
    }
}

// How many tokens up to position p agree with those up to the end of `newest`, at most DEPTH.
inline int64_t match_length(const MatchTextArgs& a, int64_t p) {
    const int64_t oldest = a.end > a.capacity ? a.end - a.capacity : 0;
    int64_t length = 0;
    while (length < DEPTH && length < a.num_newest && p - length >= oldest &&
           a.tokens[(p - length) & (a.capacity - 1)] == a.newest[a.num_newest - 1 - length])
        ++length;
    return length;
}

struct Place {
    int64_t at, length;  // tokens that match up to the position `at`; 0: none do
};

// The longest match; of equally long ones, one before the most frequent next token; then the newest.
inline Place long_match(const MatchTextArgs& a) {
    if (a.num_newest < GRAM) return {};
    const int64_t mask = a.capacity - 1, oldest = a.end > a.capacity ? a.end - a.capacity : 0;
    const int32_t* last = a.newest + a.num_newest - GRAM;
    int64_t places[CANDIDATES], lengths[CANDIDATES], count = 0, longest = 0;
    int64_t p = (int64_t)a.heads[gram_hash(last[0], last[1], last[2], a.head_bits)] - 1;
    for (int64_t looks = 0; looks < LOOKS && count < CANDIDATES && p >= oldest; ++looks) {
        const bool is_last = p + 1 >= a.end;  // nothing has followed it
        const int64_t length = is_last ? 0 : match_length(a, p);
        if (length >= GRAM) {
            places[count] = p;
            lengths[count++] = length;
            if (length > longest) longest = length;
        }
        const int64_t older = (int64_t)a.before[p & mask] - 1;
        if (older >= p) break;  // the slot has been overwritten
        p = older;
    }
    int64_t best = 0, votes = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (lengths[i] < longest) continue;
        int64_t own = 0;
        for (int64_t j = 0; j < count; ++j)
            own += lengths[j] == longest &&
                   a.tokens[(places[j] + 1) & mask] == a.tokens[(places[i] + 1) & mask];
        if (own > votes) best = places[i], votes = own;
    }
    return {best, longest};
}

// The newest match of two tokens, or else of one; another hash may have taken its slot.
inline Place short_match(const MatchTextArgs& a) {
    const int64_t mask = a.capacity - 1, oldest = a.end > a.capacity ? a.end - a.capacity : 0;
    const int32_t* last = a.newest + a.num_newest - 1;
    for (int size = a.num_newest > 1 ? 2 : 1; size >= 1; --size) {
        const int64_t hash = short_hash(size == 2 ? last[-1] : 0, last[0], size, a.head_bits);
        const int64_t p = (int64_t)a.short_heads[hash] - 1;
        if (p < oldest || p + 1 >= a.end || a.tokens[(p + 1) & mask] < 0) continue;
        const int64_t length = match_length(a, p);
        if (length >= size) return {p, length};
    }
    return {};
}

inline void match_text(const MatchTextArgs& a) {
    a.found[0] = a.found[1] = 0;
    Place match = long_match(a);
    if (!match.length && a.num_newest) match = short_match(a);
    if (!match.length) return;
    const int64_t mask = a.capacity - 1;
    const int64_t first = match.at + 1, period = a.end - first;
    int64_t n = 0;
    for (; n < a.most; ++n) {
        if (n >= period && !a.is_own) break;
        // Beyond its end a text is taken to repeat what it repeats.
        const int32_t token = n < period ? a.tokens[(first + n) & mask] : a.out[n - period];
        if (token < 0) break;  // the end of an answer
        a.out[n] = token;
    }
    a.found[0] = match.length;
    a.found[1] = n;
}
