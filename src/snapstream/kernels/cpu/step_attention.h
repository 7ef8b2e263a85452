// Attention of a step: each token attends to its slot's cache as it is once the token and those before it are stored.
#pragma once
#include <atomic>
#include <memory>

#include "decode_attention.h"
#include "step.h"

namespace snapstream {

// `A` defines how to multiply, see vectors.h.
template <typename A>
class AttentionOperations {
 public:
  using T = typename A::Number;
  using Left = typename A::Left::Number;

  AttentionOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    int64_t heads = 0, columns = 0;
    for (int64_t i = 0; i < s.p.count; ++i) {
      const Operation& o = s.p.operations[i];
      if (o.kind != ATTEND) continue;
      heads = std::max(heads, o.source.heads), columns = std::max(columns, o.target.size);
    }
    if (heads == 0) return;
    splits = (s.p.entries + SPLIT - 1) / SPLIT, most_spans = s.p.slots * s.p.kv_heads * splits;
    query_size = heads / s.p.kv_heads * s.p.size, block_size = s.p.tokens > 1 ? ENTRIES * s.p.size : 0;
    queries = scratch.reserve<Left>(threads * query_size);
    blocks = scratch.reserve<T>(2 * threads * block_size);
    state = scratch.reserve<float>(s.p.slots * s.p.tokens * heads * splits * state_size(columns));
  }

  // Allocates what a launch needs besides its scratch.
  void prepare() {
    if (splits == 0) return;
    waiting.reset(new std::atomic<int64_t>[s.p.slots * s.p.kv_heads]);
    spans.reserve(most_spans);
  }

  // Only splits that hold valid entries become units, so short sequences and free slots cost nothing.
  int64_t plan() {
    spans.clear();
    for (const int64_t slot : s.active) {
      const int64_t valid = s.seen[slot * s.p.tokens + s.tokens_of(slot) - 1];
      const int64_t used = (valid + SPLIT - 1) / SPLIT;
      for (int64_t head = 0; head < s.p.kv_heads; ++head) {
        waiting[slot * s.p.kv_heads + head].store(used, std::memory_order_relaxed);
        for (int64_t split = 0; split < used; ++split) spans.push_back({slot, head, split});
      }
    }
    return static_cast<int64_t>(spans.size());
  }

  void attend(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t group = o.source.heads / s.p.kv_heads, width = state_size(o.target.size);
    for (int64_t i = begin; i < end; ++i) {
      const auto [slot, head, split] = spans[i];
      const int64_t first = slot * s.p.tokens, end_of_rows = first + s.tokens_of(slot);
      for (int64_t row = first; row < end_of_rows; ++row)
        if (split * SPLIT < s.seen[row]) attend_span(o, row, head, split, thread);
      // The thread that finishes the last part of a head merges all parts, always in the same order.
      if (waiting[slot * s.p.kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      for (int64_t row = first; row < end_of_rows; ++row) {
        for (int64_t g = 0; g < group; ++g)
          merge_states(state_of(o, row, head, 0) + g * width, (s.seen[row] + SPLIT - 1) / SPLIT, group * width,
                       o.target.size, at<T>(o.target, row, head * group + g));
      }
    }
  }

 private:
  struct Span {
    int64_t slot, head, split;
  };

  float* state_of(const Operation& o, int64_t row, int64_t head, int64_t split) {
    const int64_t group = o.source.heads / s.p.kv_heads;
    return state + ((row * s.p.kv_heads + head) * splits + split) * group * state_size(o.target.size);
  }

  void attend_span(const Operation& o, int64_t row, int64_t head, int64_t split, int64_t thread) {
    const int64_t slot = row / s.p.tokens, D = s.p.size, V = o.target.size, group = o.source.heads / s.p.kv_heads;
    const Cache& cache = s.p.caches[o.number[0]];
    float* states = state_of(o, row, head, split);
    Left* own = queries + thread * query_size;
    for (int64_t g = 0; g < group; ++g) {
      clear_state(states + g * state_size(V), V);
      A::prepare(at<T>(o.source, row, head * group + g), D, own + g * D);
    }
    const int64_t offset = (slot * s.p.kv_heads + head) * s.p.entries * D;
    const T *keys = static_cast<T*>(cache.keys) + offset, *values = static_cast<T*>(cache.values) + offset;
    const int64_t last = std::min((split + 1) * SPLIT, s.seen[row]);
    for (int64_t entry = split * SPLIT; entry < last; entry += ENTRIES) {
      const int64_t n = std::min(ENTRIES, last - entry);
      Entries<T> block{keys + entry * D, values + entry * D, D, D};
      if (s.p.tokens > 1) block = with_pending(cache, block, row, head, entry, n, thread);
      attend_block<A>(own, group, block, n, D, V, static_cast<float>(o.real), states);
    }
  }

  // A block as it will be once this row and those before it are stored: uncertain tokens are not in the cache yet.
  Entries<T> with_pending(const Cache& cache, const Entries<T>& block, int64_t row, int64_t head, int64_t entry, int64_t n,
                          int64_t thread) {
    const int64_t slot = row / s.p.tokens, D = s.p.size;
    T *keys = blocks + 2 * thread * block_size, *values = keys + block_size;
    bool copied = false;
    for (int64_t before = slot * s.p.tokens; before <= row; ++before) {
      const int64_t at = s.place[before] - entry;
      if (at < 0 || at >= n) continue;
      if (!copied) std::copy_n(block.keys, n * D, keys), std::copy_n(block.values, n * D, values), copied = true;
      const int64_t from = ((slot * s.p.kv_heads + head) * s.p.tokens + before - slot * s.p.tokens) * D;
      std::copy_n(static_cast<const T*>(cache.pending_keys) + from, D, keys + at * D);
      std::copy_n(static_cast<const T*>(cache.pending_values) + from, D, values + at * D);
    }
    return copied ? Entries<T>{keys, values, D, D} : block;
  }

  Step& s;
  int64_t splits = 0, most_spans = 0, query_size = 0, block_size = 0;
  Left* queries = nullptr;  // per thread, in the form in which they are multiplied
  T* blocks = nullptr;      // per thread, keys and values of a block with pending ones
  float* state = nullptr;   // per row, KV head, split and head of its group
  std::unique_ptr<std::atomic<int64_t>[]> waiting;  // parts of each slot's KV head that are not done
  std::vector<Span> spans;
};

}  // namespace snapstream
