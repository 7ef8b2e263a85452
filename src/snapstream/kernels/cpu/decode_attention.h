// Attention of single tokens over the valid prefix of their caches. A decode step reads every valid entry once; stock
// kernels expand grouped heads and read invalid entries. The result of a token depends only on its own sequence, bit
// for bit.
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace snapstream {

constexpr int64_t SPLIT = 512;  // entries per unit of work: fixed, so that results do not depend on the batch
constexpr int64_t ENTRIES = 64;  // per softmax update: keys and values of a block stay in the first-level cache
constexpr int64_t AHEAD = 2 * ENTRIES;  // prefetch distance: to the second-level cache, which takes more requests
constexpr int HEADS_AT_ONCE = 4;

// Entries of one KV head, at most ENTRIES of them.
template <typename T>
struct Entries {
  const T *keys, *values;
  int64_t key_row, value_row;  // elements from one to the next
};

// Scores of KEYS keys for HEADS heads, whose queries are `size` elements apart.
template <typename A, int HEADS, int KEYS>
inline void score_keys(const typename A::Left::Number* queries, const Entries<typename A::Number>& entries, int64_t first,
                       int64_t size, float scale, float* scores) {
  vec dot[LANES] = {};
  const auto *keys = entries.keys + first * entries.key_row, *values = entries.values + first * entries.value_row;
  for (int64_t d = 0; d < size; d += PAIR) {
    typename A::Right k[KEYS];
    UNROLL for (int i = 0; i < KEYS; ++i) {
      k[i].read(keys + i * entries.key_row + d);
      __builtin_prefetch(values + (AHEAD + i) * entries.value_row + d, 0, 2);
    }
    UNROLL for (int h = 0; h < HEADS; ++h) {
      typename A::Left query;
      query.read(queries + h * size + d);
      query.hold();
      UNROLL for (int i = 0; i < KEYS; ++i) add_product(dot[h * KEYS + i], k[i], query);
    }
  }
  const vec all = sums(dot) * scale;
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int i = 0; i < KEYS; ++i) scores[h * ENTRIES + first + i] = all[h * KEYS + i];
  }
}

// Adds n rows of values, weighted, to PAIRS * 32 columns of each head's output (at `out`, heads `stride` apart).
template <typename T, int HEADS, int PAIRS>
inline void add_values(const float* weights, const T* values, int64_t row, const T* keys, int64_t key_row, int64_t n,
                       float* out, int64_t stride) {
  vec total[HEADS][2 * PAIRS];
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int j = 0; j < 2 * PAIRS; ++j) total[h][j] = load(out + h * stride + j * LANES);
  }
  for (int64_t i = 0; i < n; ++i) {
    UNROLL for (int j = 0; j < PAIRS; ++j) {
      vec low, high;
      load_pair(values + i * row + j * PAIR, low, high);
      __builtin_prefetch(keys + (AHEAD + i) * key_row + j * PAIR, 0, 2);
      UNROLL for (int h = 0; h < HEADS; ++h) total[h][2 * j] += low * weights[h * ENTRIES + i];
      UNROLL for (int h = 0; h < HEADS; ++h) total[h][2 * j + 1] += high * weights[h * ENTRIES + i];
    }
  }
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int j = 0; j < 2 * PAIRS; ++j) store(out + h * stride + j * LANES, total[h][j]);
  }
}

// The state of a head after some of its entries: maximum, sum, (padding,) output, with elements in the order of
// load_pair().
inline int64_t state_size(int64_t columns) { return LANES + columns; }

inline void clear_state(float* state, int64_t columns) {
  state[0] = -std::numeric_limits<float>::infinity();
  state[1] = 0.0f;
  std::fill_n(state + LANES, columns, 0.0f);
}

// Turns n scores of a head into weights, and brings its state to their scale; `cap` is the soft cap of logits, 0 for none.
inline void weigh(float* scores, int64_t n, int64_t columns, float cap, float* state) {
  if (cap > 0.0f)
    for (int64_t i = 0; i < n; i += LANES) store(scores + i, capped(load(scores + i), cap));
  for (int64_t i = n; i < ENTRIES; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  vec most = load(scores);
  for (int64_t i = LANES; i < ENTRIES; i += LANES) most = larger(most, load(scores + i));
  const float highest = std::max(state[0], largest(most));
  const vec shift = exp_nonpositive(vec{} + std::max(state[0] - highest, -100.0f));
  const float rescale = state[0] == highest ? 1.0f : shift[0];
  vec added = {};
  for (int64_t i = 0; i < ENTRIES; i += LANES) {
    const vec p = exp_nonpositive(load(scores + i) - highest);
    store(scores + i, p);
    added += p;
  }
  state[1] = state[1] * rescale + sum(added);
  if (rescale != 1.0f)
    for (int64_t d = 0; d < columns; d += LANES) store(state + LANES + d, load(state + LANES + d) * rescale);
  state[0] = highest;
}

// Adds n entries to the states of HEADS heads.
template <typename A, int HEADS>
inline void attend_block(const typename A::Left::Number* queries, const Entries<typename A::Number>& entries, int64_t n,
                         int64_t size, int64_t columns, float scale, float cap, float* states) {
  constexpr int KEYS = MANY_REGISTERS ? 4 : 2;
  const int64_t stride = state_size(columns);
  alignas(64) float scores[HEADS][ENTRIES];
  int64_t i = 0;
  for (; i + KEYS <= n; i += KEYS) score_keys<A, HEADS, KEYS>(queries, entries, i, size, scale, scores[0]);
  for (; i < n; ++i) score_keys<A, HEADS, 1>(queries, entries, i, size, scale, scores[0]);
  for (int h = 0; h < HEADS; ++h) weigh(scores[h], n, columns, cap, states + h * stride);
  const auto* values = entries.values;
  constexpr int PAIRS = MANY_REGISTERS ? 2 : 1;  // of columns of each head that stay in registers
  int64_t d = 0;
  for (; d + PAIRS * PAIR <= columns; d += PAIRS * PAIR)
    add_values<typename A::Number, HEADS, PAIRS>(scores[0], values + d, entries.value_row, entries.keys + d, entries.key_row, n,
                                             states + LANES + d, stride);
  for (; d < columns; d += PAIR)
    add_values<typename A::Number, HEADS, 1>(scores[0], values + d, entries.value_row, entries.keys + d, entries.key_row, n,
                                             states + LANES + d, stride);
}

// The same for all `heads` heads that share a KV head; their states are contiguous.
template <typename A>
inline void attend_block(const typename A::Left::Number* queries, int64_t heads, const Entries<typename A::Number>& entries,
                         int64_t n, int64_t size, int64_t columns, float scale, float cap, float* states) {
  for (int64_t h = 0; h < heads; h += HEADS_AT_ONCE) {
    const auto* q = queries + h * size;
    float* s = states + h * state_size(columns);
    switch (heads - h) {
      case 1: attend_block<A, 1>(q, entries, n, size, columns, scale, cap, s); break;
      case 2: attend_block<A, 2>(q, entries, n, size, columns, scale, cap, s); break;
      case 3: attend_block<A, 3>(q, entries, n, size, columns, scale, cap, s); break;
      default: attend_block<A, 4>(q, entries, n, size, columns, scale, cap, s);
    }
  }
}

// The sum of all weights, and what a sink has of it.
struct Merged {
  float total, sink;
};

// Merges the states of a head, `distance` apart, into the first one, whose elements are not divided by the sum yet. `sink`
// is one extra logit of the softmax, without a value; no pointer: there is none.
inline Merged merge_states(float* states, int64_t count, int64_t distance, int64_t columns, const float* sink) {
  float top = sink ? std::max(*sink, states[0]) : states[0];
  for (int64_t s = 1; s < count; ++s) top = std::max(top, states[s * distance]);
  const float own = sink ? std::exp(*sink - top) : 0.0f;
  float total = own;
  for (int64_t s = 0; s < count; ++s) {
    float* state = states + s * distance;
    const float weight = std::exp(state[0] - top);
    total += weight * state[1];
    for (int64_t d = LANES; d < state_size(columns); d += LANES)
      store(states + d, s ? load(states + d) + load(state + d) * weight : load(state + d) * weight);
  }
  return {total, own};
}

// Writes the output of a merged state; N is the type of entries.
template <typename N, typename T>
inline void write_output(const float* state, float total, int64_t columns, T* out) {
  for (int64_t d = 0; d < columns; d += PAIR)
    store_pair_from<N>(out + d, load(state + LANES + d) / total, load(state + LANES + d + LANES) / total);
}

}  // namespace snapstream
