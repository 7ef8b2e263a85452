// A decode step as a list of operations, see snapstream/kernels/operations.py; program.py fills these structures.
#pragma once
#include <cstdint>

namespace snapstream {

// Numbers of every row of a buffer: `heads` times `size` of them, a row and a head so many numbers apart. A row is a token
// of a slot: row `slot * tokens + token`.
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
};

struct Operation {
  int64_t kind;
  Part source, target, other;
  const void *weight, *bias;
  int64_t number[6];
  double real;
};

// One layer's cache, [slots, kv_heads, entries, size]; `values` may be `keys`. Tokens that are not certain yet wait in
// pending ones, [slots, kv_heads, tokens, size].
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
  int64_t *token, *position;             // [slots, tokens], [slots]
  int64_t *base, *cached, *limit;        // [slots], see snapstream/compression/layout.py
  const bool* active;                    // [slots]
  int64_t* forced;                       // [slots, most_steps]: tokens that must be taken next, -1 for none
  int64_t* taken;                        // [most_steps, slots]: tokens that were taken
};

}  // namespace snapstream
