// A decode step as a list of operations, see snapstream/kernels/operations.py; program.py fills these structures.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace snapstream {

// A range of elements in every row of a buffer: `heads` times `size` of them. `row` and `stride` are the distances
// between rows and between heads, in elements. A row is a token of a slot: row `slot * tokens + token`.
struct Part {
  void* data;
  int64_t row, heads, size, stride;
};

enum Kind : int64_t {
  EMBED,
  ANGLES,
  NORM,
  PRODUCT,
  GATED_PRODUCT,
  HEAD_PRODUCT,
  ROTATE,
  STORE,
  ATTEND,
  CHOOSE,
  SORT,
  EXPERT_GATED_PRODUCT,
  EXPERT_PRODUCT,
  COMBINE,
  TAKE,
  GATE,
  VERIFY,
  COMMIT,
  ADVANCE,
};

struct Operation {
  int64_t kind;
  Part source, target, other;
  const void *weight, *bias;
  int64_t number[6];
  double real;
};

// One layer's cache, [slots, kv_heads, entries, size]; `values` may be `keys`. Tokens that are not certain yet are in
// the pending tensors, [slots, kv_heads, tokens, size].
struct Cache {
  void *keys, *values, *pending_keys, *pending_values;
};

struct Program {
  const Operation* operations;
  int64_t count;
  const Cache* caches;
  int64_t type, instructions;            // 0: float, 1: bfloat16; how they are multiplied
  int64_t slots, tokens;                 // tokens per slot
  int64_t kv_heads, entries, size;       // of the caches
  int64_t most_steps;                    // of a launch
  int64_t *token, *position;             // [slots, tokens] with slots token_row elements apart, [slots]
  int64_t token_row;
  int64_t *base, *cached, *limit;        // [slots], see snapstream/compression/layout.py
  const bool* active;                    // [slots]
  int64_t* forced;                       // [slots, most_steps]: tokens that must be taken next, -1 for none
  int64_t* taken;                        // [most_steps, slots]: tokens that were taken
  const int64_t* drafted;                // [slots]: guesses after each first token; null: as many as there is room for
  int64_t* accepted;                     // [slots]: how many of the tokens taken are certain
};

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

// The state of a launch: the active rows, the entry that each token is stored in, and how many entries it sees.
struct Step {
  explicit Step(const Program& program) : p(program), place(program.slots * program.tokens), seen(place.size()) {
    rows.reserve(place.size()), active.reserve(program.slots);
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
        const int64_t row = slot * p.tokens + t;
        rows.push_back(row);
        if (p.cached == nullptr) continue;
        const int64_t base = p.base[slot], limit = p.limit[slot], count = p.cached[slot] + t;
        place[row] = count < limit ? count : base + (count - base) % std::max<int64_t>(limit - base, 1);
        seen[row] = std::min(count + 1, limit);
      }
    }
  }

  int64_t row_count() const { return static_cast<int64_t>(rows.size()); }
  int64_t slot_count() const { return static_cast<int64_t>(active.size()); }

  const Program& p;
  int64_t number = 0;                // index of the step in its launch
  std::vector<int64_t> active;       // slots that are processed
  std::vector<int64_t> rows;         // their rows, for the tokens in use
  std::vector<int64_t> place, seen;  // per row: its entry in the cache, and how many entries it attends to
};

// The first element of a head of a row.
template <typename N>
inline N* at(const Part& part, int64_t row, int64_t head = 0) {
  return static_cast<N*>(part.data) + row * part.row + head * part.stride;
}

}  // namespace snapstream
