// A decode step as a list of operations, see snapstream/kernels/operations.py and interface.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "interface.h"

namespace snapstream {

// Memory for temporaries: counts their bytes, and assigns their addresses.
class Scratch {
 public:
  explicit Scratch(char* memory) : memory(memory) {}

  template <typename T>
  T* reserve(int64_t count) {
    constexpr int64_t LINE = 64;
    T* place = reinterpret_cast<T*>(memory + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + LINE - 1) / LINE * LINE;
    return place;
  }

  int64_t bytes = 0;

 private:
  char* memory;
};

// The state of a launch: the active rows, the entry that each token is stored in, and how many entries it sees. A row is
// a token of a slot: row `slot * tokens + token`.
struct Step {
  explicit Step(const Program& program)
      : p(program), row_limit(p.slots * p.tokens), places(std::max<int64_t>(p.groups, 1) * row_limit), seen(places.size()) {
    rows.reserve(row_limit), active.reserve(p.slots);
  }

  int64_t tokens_of(int64_t slot) const {
    return p.drafted == nullptr ? p.tokens : std::min(p.drafted[slot] + 1, p.tokens);
  }

  // Sets up the next tokens of each slot.
  void begin() {
    rows.clear(), active.clear();
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      if (p.active != nullptr && !p.active[slot]) continue;
      active.push_back(slot);
      for (int64_t t = 0; t < tokens_of(slot); ++t) {
        rows.push_back(slot * p.tokens + t);
        for (int64_t group = 0; group < p.groups; ++group) place_token(group, slot, t);
      }
    }
  }

  // The entry of a row's token in caches of a group.
  int64_t place(int64_t group, int64_t row) const { return places[group * row_limit + row]; }

  // How many entries of such caches a row attends to.
  int64_t sees(int64_t group, int64_t row) const { return seen[group * row_limit + row]; }

  // Advances a slot by `count` tokens, of which `token` is the last.
  void go_on(int64_t slot, int64_t token, int64_t count) {
    int64_t* forced = p.forced + slot * p.most_steps;
    std::fill(std::copy(forced + count, forced + p.most_steps, forced), forced + p.most_steps, -1);
    p.token[slot * p.token_row] = token, p.position[slot] += count;
    for (int64_t group = 0; group < p.groups; ++group) p.cached[group * p.slots + slot] += count;
  }

  int64_t row_count() const { return static_cast<int64_t>(rows.size()); }
  int64_t slot_count() const { return static_cast<int64_t>(active.size()); }

  const Program& p;
  int64_t number = 0;           // index of the step in its launch
  int64_t phase = 0;            // number of the operation since the launch began
  int64_t row_limit;            // rows if all slots are active and full
  std::vector<int64_t> active;  // slots that are processed
  std::vector<int64_t> rows;    // their rows, for the tokens in use

 private:
  void place_token(int64_t group, int64_t slot, int64_t t) {
    const int64_t at = group * p.slots + slot, row = group * row_limit + slot * p.tokens + t;
    const int64_t base = p.base[at], limit = p.limit[at], count = p.cached[at] + t;
    places[row] = count < limit ? count : base + (count - base) % std::max<int64_t>(limit - base, 1);
    seen[row] = std::min(count + 1, limit);
  }

  std::vector<int64_t> places, seen;  // [groups, slots, tokens]
};

// The first element of a head of a row.
template <typename N>
inline N* at(const BufferView& part, int64_t row, int64_t head = 0) {
  return static_cast<N*>(part.data) + row * part.row + head * part.stride;
}

// The frame of a slot's KV head, or null if entries are not codes.
inline const float* frame_of(const Cache& cache, int64_t slot, int64_t head) {
  return cache.frames == nullptr ? nullptr : cache.frames + (slot * cache.kv_heads + head) * 2 * cache.size;
}

// Numbers of type N, or null.
template <typename N>
inline const N* numbers(const Vector& vector) {
  return static_cast<const N*>(vector.data);
}

// Rows of a weight, whatever their formats.
inline int64_t all_rows(const Weight& weight) {
  return weight.rows + (weight.more == nullptr ? 0 : all_rows(*static_cast<const Weight*>(weight.more)));
}

// The part of a weight that has a row, whose number becomes one of that part.
inline const Weight& part_of(const Weight& weight, int64_t& row) {
  if (row < weight.rows || weight.more == nullptr) return weight;
  row -= weight.rows;
  return part_of(*static_cast<const Weight*>(weight.more), row);
}

// The first number of a row of a matrix.
template <typename N>
inline const N* row_of(const Weight& weight, int64_t matrix, int64_t row) {
  return static_cast<const N*>(weight.data) + (matrix * weight.step + row) * weight.columns;
}

}  // namespace snapstream
