// Rows of a pass, and the path of each: the slots of its keys and values by position, its own last.
//
// A path is a prefix of its request's slot table, then a branch: the slots of guesses from the table's end to the row. A
// prompt's row has no branch. Rows of one request share the table, and so the work on its tiles.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace paceline {

constexpr int KEY_TILE = 16;  // positions whose keys are multiplied together

struct Rows {  // part of the C interface; see `RowsSpec` in packed_rows.py
    int32_t count;
    const int32_t* positions;
    const int32_t* const* tables;
    const int32_t* prefix_lengths;
    const int32_t* const* branches;
    const int32_t* branch_lengths;

    int length(int row) const { return prefix_lengths[row] + branch_lengths[row]; }
    int slot(int row, int position) const {
        int below = position - prefix_lengths[row];
        return below < 0 ? tables[row][position] : branches[row][below];
    }
    int own_slot(int row) const { return slot(row, length(row) - 1); }
};

struct Chunk {  // neighbouring rows [first, end) of one table
    int first, end;
};

// All rows in chunks of at most `most`.
inline std::vector<Chunk> chunks_of(const Rows& rows, int most) {
    std::vector<Chunk> chunks;
    for (int r = 0; r < rows.count; r++) {
        bool joins = r && rows.tables[r] == rows.tables[r - 1] && r - chunks.back().first < most;
        if (!joins) chunks.push_back({r, r});
        chunks.back().end = r + 1;
    }
    return chunks;
}

// The positions of its path that a row sees, and their tiles.
struct VisibleRange {
    int begin, end;              // positions
    int first_tile, last_tile;   // tiles [first, last)
    VisibleRange() = default;
    VisibleRange(const Rows& rows, int row, int window) {
        end = rows.length(row);
        begin = window && end > window ? end - window : 0;
        first_tile = begin / KEY_TILE;
        last_tile = (end + KEY_TILE - 1) / KEY_TILE;
    }
};

// Calls `load(slots)` with the slots of a tile, then `use(rows, count, tile)` with the rows that see the tile at these
// slots: the rows of the chunk that have the tile in the table together, each other row alone. A position past a path's end
// repeats its last slot. `prefetch(slot)` is called well before a slot of the table is loaded: slots are scattered.
template <class Prefetch, class Load, class Use>
void for_each_tile(const Rows& rows, Chunk chunk, int window, Prefetch prefetch, Load load, Use use) {
    constexpr int DISTANCE = 2 * KEY_TILE;
    int longest = chunk.first, first = INT32_MAX, last = 0;
    for (int r = chunk.first; r < chunk.end; r++) {
        if (rows.prefix_lengths[r] > rows.prefix_lengths[longest]) longest = r;
        VisibleRange visible(rows, r, window);
        first = std::min(first, visible.first_tile);
        last = std::max(last, visible.last_tile);
    }
    int32_t slots[KEY_TILE];
    std::vector<int> together;
    for (int tile = first; tile < last; tile++) {
        auto sees = [&](int r) {
            VisibleRange visible(rows, r, window);
            return visible.first_tile <= tile && tile < visible.last_tile;
        };
        auto in_table = [&](int r) { return !rows.branch_lengths[r] || rows.prefix_lengths[r] >= (tile + 1) * KEY_TILE; };
        together.clear();
        for (int r = chunk.first; r < chunk.end; r++)
            if (sees(r) && in_table(r)) together.push_back(r);
        if (!together.empty()) {
            int end = rows.prefix_lengths[longest] - 1;
            const int32_t* table = rows.tables[longest];
            for (int i = 0; i < KEY_TILE; i++) slots[i] = table[std::min(tile * KEY_TILE + i, end)];
            for (int i = 0; i < KEY_TILE; i++) prefetch(table[std::min(tile * KEY_TILE + DISTANCE + i, end)]);
            load(slots);
            use(together.data(), (int)together.size(), tile);
        }
        for (int r = chunk.first; r < chunk.end; r++) {
            if (!sees(r) || in_table(r)) continue;
            int end = rows.length(r) - 1;
            for (int i = 0; i < KEY_TILE; i++) slots[i] = rows.slot(r, std::min(tile * KEY_TILE + i, end));
            load(slots);
            use(&r, 1, tile);
        }
    }
}

}  // namespace paceline
