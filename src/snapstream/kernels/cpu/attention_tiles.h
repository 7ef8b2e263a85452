// Attention of many heads to the entries of one KV head in tile registers. The heads of all tokens of a slot are columns, of
// which sixteen are multiplied at once.
#pragma once
#include "decode_attention.h"
#include "step.h"
#include "tiles.h"

#if defined(SNAPSTREAM_TILES)
namespace snapstream {

// Columns that attend to the entries of one KV head, in memory of one thread. As long as all entries are finite, the result of
// a column depends neither on the other ones nor on their number, bit for bit.
struct AttentionColumns {
  bfloat16* queries;  // packed as rows of TileProduct<LANES>
  float* states;      // see state_size()
  bfloat16* weights;  // of a block, [columns][ENTRIES]
  bfloat16* keys;     // LANES rows for the last entries, behind which memory may end
  int64_t size, V;    // elements of a key, and of a value

  float* state(int64_t column) { return states + column * state_size(V); }

  // Begins a column, after those before it.
  void begin(int64_t column, const bfloat16* query) {
    if (column % LANES == 0)
      for (int64_t c = column; c < column + LANES; ++c) clear_state(state(c), V);
    TileProduct<LANES>::pack(query, size, column, queries);
  }

  // Adds the first `count` entries to columns first .. end, of which column c sees seen(c), maybe none.
  template <typename Seen>
  void add(const Entries<bfloat16>& entries, int64_t count, int64_t first, int64_t end, float scale, float cap, const Seen& seen) {
    const int64_t begin = first / LANES * LANES;
    std::fill_n(weights + begin * ENTRIES, (round_up(end, LANES) - begin) * ENTRIES, bfloat16());
    for (int64_t group = begin; group < end; group += LANES) {
      alignas(64) float scores[LANES][ENTRIES];
      const int64_t stop = std::min<int64_t>(end, group + LANES);
      score(queries + group * size, entries, count, stop - group, scale, scores);
      for (int64_t c = std::max(first, group); c < stop; ++c) {
        const int64_t n = seen(c);
        if (n <= 0) continue;
        float* own = scores[c - group];
        weigh(own, n, V, cap, state(c));
        for (int64_t i = 0; i < ENTRIES; i += LANES) store_numbers(weights + c * ENTRIES + i, load(own + i));
      }
    }
    add_values(entries, count, begin, end);
  }

 private:
  // The compiler does not know that tiles are read from memory.
  static void finish_stores() { asm volatile("" ::: "memory"); }

  // Scores of the first columns of a group. Registers 0 to 3 are for sums, 4 and 5 for keys, 6 for queries.
  void score(const bfloat16* group, const Entries<bfloat16>& entries, int64_t count, int64_t columns, float scale,
             float (*scores)[ENTRIES]) {
    static_assert(ENTRIES == 4 * LANES);
    const int64_t bytes = entries.key_row * static_cast<int64_t>(sizeof(bfloat16));
    const bfloat16* rows[ENTRIES / LANES];
    for (int64_t i = 0; i < ENTRIES; i += LANES) {
      rows[i / LANES] = i + LANES <= count ? entries.keys + i * entries.key_row : keys;
      if (i < count && count < i + LANES) std::copy_n(entries.keys + i * entries.key_row, (count - i) * entries.key_row, keys);
    }
    const auto prefetch = [&](const bfloat16* from) {
      for (int64_t n = 0; n < LANES; ++n) __builtin_prefetch(reinterpret_cast<const char*>(from) + n * bytes + AHEAD_BYTES, 0, 2);
    };
    finish_stores();
    clear_tiles();
    for (int64_t k = 0; k < size; k += PAIR) {
      _tile_loadd(6, group + k * LANES, sizeof(vec));
      prefetch(rows[0] + k);
      _tile_loadd(4, rows[0] + k, bytes);
      _tile_dpbf16ps(0, 4, 6);
      prefetch(rows[1] + k);
      _tile_loadd(5, rows[1] + k, bytes);
      _tile_dpbf16ps(1, 5, 6);
      prefetch(rows[2] + k);
      _tile_loadd(4, rows[2] + k, bytes);
      _tile_dpbf16ps(2, 4, 6);
      prefetch(rows[3] + k);
      _tile_loadd(5, rows[3] + k, bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
    alignas(64) float sums[2][LANES][LANES];
    const auto kept = [&](const float (*sums)[LANES], int64_t first) {
      columns <= 4 ? keep<4>(sums, scale, scores, first) : columns <= 8 ? keep<8>(sums, scale, scores, first) : keep<LANES>(sums, scale, scores, first);
    };
    _tile_stored(0, sums[0], sizeof(vec));
    _tile_stored(1, sums[1], sizeof(vec));
    kept(sums[0], 0);
    _tile_stored(2, sums[0], sizeof(vec));
    kept(sums[1], LANES);
    _tile_stored(3, sums[1], sizeof(vec));
    kept(sums[0], 2 * LANES);
    kept(sums[1], 3 * LANES);
  }

  // The sums of sixteen entries as scores of the first COLUMNS columns.
  template <int COLUMNS>
  static void keep(const float (*sums)[LANES], float scale, float (*scores)[ENTRIES], int64_t first) {
    const void* rows[LANES];
    vec_u32 all[COLUMNS];
    UNROLL for (int i = 0; i < LANES; ++i) rows[i] = sums[i];
    load_transposed<COLUMNS>(rows, all);
    UNROLL for (int c = 0; c < COLUMNS; ++c) store(scores[c] + first, (vec)all[c] * scale);
  }

  // Adds the values of a block, weighted, to columns begin .. end. Registers 0 and 1 are for outputs, 4 and 5 for weights.
  void add_values(const Entries<bfloat16>& entries, int64_t count, int64_t begin, int64_t end) {
    static_assert(ENTRIES == 2 * PAIR);
    constexpr int64_t TILE = LANES * LANES;
    const int64_t bytes = state_size(V) * static_cast<int64_t>(sizeof(float));
    for (int64_t d = 0; d < V; d += PAIR) {
      alignas(64) uint32_t low[2 * TILE], high[2 * TILE];  // [ENTRIES / 2][LANES] pairs of entries, in the order of load_pair()
      pack_values(entries.values + d, entries.value_row, count, low, high);
      finish_stores();
      _tile_loadd(6, low, sizeof(vec));
      _tile_loadd(7, high, sizeof(vec));
      for (int64_t group = begin; group < end; group += LANES) {
        float* out = state(group) + LANES + d;
        const bfloat16* own = weights + group * ENTRIES;
        _tile_loadd(4, own, ENTRIES * sizeof(bfloat16));
        _tile_loadd(0, out, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(1, out + LANES, bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, own + PAIR, ENTRIES * sizeof(bfloat16));
        _tile_loadd(2, low + TILE, sizeof(vec));
        _tile_dpbf16ps(0, 5, 2);
        _tile_loadd(3, high + TILE, sizeof(vec));
        _tile_dpbf16ps(1, 5, 3);
        _tile_stored(0, out, bytes);
        _tile_stored(1, out + LANES, bytes);
      }
    }
  }

  // Packs PAIR columns of values. Entries from `count` on are zeros: memory there may hold anything, and 0 times infinity is
  // no number.
  static void pack_values(const bfloat16* from, int64_t row, int64_t count, uint32_t* low, uint32_t* high) {
    constexpr uint32_t UPPER = 0xFFFF0000u;
    for (int64_t i = 0; i < ENTRIES; i += 2, from += 2 * row, low += LANES, high += LANES) {
      const vec_u32 a = i < count ? load_as<vec_u32>(from) : vec_u32{};
      const vec_u32 b = i + 1 < count ? load_as<vec_u32>(from + row) : vec_u32{};
      __builtin_prefetch(from + AHEAD * row, 0, 2);
      __builtin_prefetch(from + (AHEAD + 1) * row, 0, 2);
      store_u32(low, (a & ~UPPER) | (b << 16));
      store_u32(high, (a >> 16) | (b & UPPER));
    }
  }
};

// Memory of all threads for the largest columns.
class ColumnsMemory {
 public:
  void fit(int64_t columns, int64_t size, int64_t V) {
    columns = round_up(columns, LANES);
    queries = std::max(queries, columns * size), states = std::max(states, columns * state_size(V));
    weights = std::max(weights, columns * ENTRIES), keys = std::max(keys, LANES * size);
  }

  void reserve(int64_t threads, Scratch& scratch) { memory = scratch.reserve<char>(threads * bytes()); }

  AttentionColumns of(int64_t thread, int64_t size, int64_t V) const {
    auto* floats = reinterpret_cast<float*>(memory + thread * bytes());
    auto* numbers = reinterpret_cast<bfloat16*>(floats + states);
    return {numbers, floats, numbers + queries, numbers + queries + weights, size, V};
  }

 private:
  int64_t bytes() const { return states * sizeof(float) + (queries + weights + keys) * sizeof(bfloat16); }

  int64_t queries = 0, states = 0, weights = 0, keys = 0;  // elements of a thread
  char* memory = nullptr;
};

}  // namespace snapstream
#endif
