// Attention of a step: each token attends to its slot's cache as it is once the token and those before it are stored.
#pragma once
#include <atomic>
#include <memory>

#include "decode_attention.h"
#include "step.h"

namespace snapstream {

// Attention of activations of type T; entries have the type of their cache.
template <typename T>
class AttentionOperations {
 public:
  AttentionOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    int64_t states = 0;
    const auto needs = [&](const auto& o) {
      if constexpr (std::is_same_v<std::decay_t<decltype(o)>, Attend>) {
        const Cache& cache = cache_of(o);
        states = std::max(states, o.query.heads * splits_of(cache) * state_size(o.target.size));
        most_spans = std::max(most_spans, s.p.slots * cache.kv_heads * splits_of(cache));
        most_heads = std::max(most_heads, cache.kv_heads);
        query_size = std::max(query_size, o.query.heads / cache.kv_heads * cache.size);
        if (s.p.tokens > 1) block_size = std::max(block_size, ENTRIES * cache.size);
      }
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) visit(s.p.operations[i], needs);
    queries = scratch.reserve<float>(threads * query_size);
    blocks = scratch.reserve<float>(2 * threads * block_size);
    state = scratch.reserve<float>(s.p.slots * s.p.tokens * states);
  }

  // Allocates what a launch needs besides its scratch.
  void prepare() {
    if (most_spans == 0) return;
    waiting.reset(new std::atomic<int64_t>[s.p.slots * most_heads]);
    spans.reserve(most_spans);
  }

  // Only splits that hold valid entries become units, so short sequences and free slots cost nothing.
  int64_t plan(const Attend& o) {
    const Cache& cache = cache_of(o);
    spans.clear();
    for (const int64_t slot : s.active) {
      const int64_t valid = s.sees(cache.group, slot * s.p.tokens + s.tokens_of(slot) - 1);
      const int64_t used = (valid + SPLIT - 1) / SPLIT;
      for (int64_t head = 0; head < cache.kv_heads; ++head) {
        waiting[slot * cache.kv_heads + head].store(used, std::memory_order_relaxed);
        for (int64_t split = 0; split < used; ++split) spans.push_back({slot, head, split});
      }
    }
    return static_cast<int64_t>(spans.size());
  }

  void run(const Attend& o, int64_t begin, int64_t end, int64_t thread) {
    with_arithmetic<T>(cache_of(o).type, s.p.instructions, [&](auto a) { attend<decltype(a)>(o, begin, end, thread); });
  }

 private:
  struct Span {
    int64_t slot, head, split;
  };

  const Cache& cache_of(const Attend& o) const { return s.p.caches[o.layer]; }

  static int64_t splits_of(const Cache& cache) { return (cache.entries + SPLIT - 1) / SPLIT; }

  template <typename A>
  void attend(const Attend& o, int64_t begin, int64_t end, int64_t thread) {
    const Cache& cache = cache_of(o);
    const int64_t group = o.query.heads / cache.kv_heads, width = state_size(o.target.size);
    const auto* sinks = static_cast<const float*>(o.sinks.data);
    for (int64_t i = begin; i < end; ++i) {
      const auto [slot, head, split] = spans[i];
      const int64_t first = slot * s.p.tokens, end_of_rows = first + s.tokens_of(slot);
      for (int64_t row = first; row < end_of_rows; ++row)
        if (split * SPLIT < s.sees(cache.group, row)) attend_span<A>(o, row, head, split, thread);
      // The thread that finishes the last part of a head merges all parts, always in the same order.
      if (waiting[slot * cache.kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      for (int64_t row = first; row < end_of_rows; ++row) {
        const int64_t used = (s.sees(cache.group, row) + SPLIT - 1) / SPLIT;
        for (int64_t g = 0; g < group; ++g)
          merge_states<typename A::Number>(state_of(o, row, head, 0) + g * width, used, group * width, o.target.size,
                                           sinks ? sinks + head * group + g : nullptr,
                                           at<T>(o.target, row, head * group + g));
      }
    }
  }

  float* state_of(const Attend& o, int64_t row, int64_t head, int64_t split) {
    const Cache& cache = cache_of(o);
    const int64_t group = o.query.heads / cache.kv_heads;
    return state + ((row * cache.kv_heads + head) * splits_of(cache) + split) * group * state_size(o.target.size);
  }

  template <typename A>
  void attend_span(const Attend& o, int64_t row, int64_t head, int64_t split, int64_t thread) {
    using N = typename A::Number;
    const Cache& cache = cache_of(o);
    const int64_t slot = row / s.p.tokens, D = cache.size, V = o.target.size, group = o.query.heads / cache.kv_heads;
    float* states = state_of(o, row, head, split);
    auto* own = reinterpret_cast<typename A::Left::Number*>(queries + thread * query_size);
    for (int64_t g = 0; g < group; ++g) {
      clear_state(states + g * state_size(V), V);
      A::prepare(at<T>(o.query, row, head * group + g), D, own + g * D);
    }
    const int64_t offset = (slot * cache.kv_heads + head) * cache.entries * D;
    const N *keys = static_cast<N*>(cache.keys) + offset, *values = static_cast<N*>(cache.values) + offset;
    const int64_t last = std::min((split + 1) * SPLIT, s.sees(cache.group, row));
    for (int64_t entry = split * SPLIT; entry < last; entry += ENTRIES) {
      const int64_t n = std::min(ENTRIES, last - entry);
      Entries<N> block{keys + entry * D, values + entry * D, D, D};
      if (s.p.tokens > 1) block = with_pending(cache, block, row, head, entry, n, thread);
      attend_block<A>(own, group, block, n, D, V, static_cast<float>(o.scale), static_cast<float>(o.cap), states);
    }
  }

  // A block as it will be once this row and those before it are stored: uncertain tokens are not in the cache yet.
  template <typename N>
  Entries<N> with_pending(const Cache& cache, const Entries<N>& block, int64_t row, int64_t head, int64_t entry, int64_t n,
                          int64_t thread) {
    const int64_t slot = row / s.p.tokens, D = cache.size;
    N *keys = reinterpret_cast<N*>(blocks + 2 * thread * block_size), *values = keys + ENTRIES * D;
    bool copied = false;
    for (int64_t before = slot * s.p.tokens; before <= row; ++before) {
      const int64_t at = s.place(cache.group, before) - entry;
      if (at < 0 || at >= n) continue;
      if (!copied) std::copy_n(block.keys, n * D, keys), std::copy_n(block.values, n * D, values), copied = true;
      const int64_t from = ((slot * cache.kv_heads + head) * s.p.tokens + before - slot * s.p.tokens) * D;
      std::copy_n(static_cast<const N*>(cache.pending_keys) + from, D, keys + at * D);
      std::copy_n(static_cast<const N*>(cache.pending_values) + from, D, values + at * D);
    }
    return copied ? Entries<N>{keys, values, D, D} : block;
  }

  Step& s;
  int64_t most_spans = 0, most_heads = 0, query_size = 0, block_size = 0;
  float* queries = nullptr;  // per thread, in the form in which they are multiplied, which takes no more than float
  float* blocks = nullptr;   // per thread, keys and values of a block with pending ones, in the type of the cache
  float* state = nullptr;    // per row, KV head, split and head of its group
  std::unique_ptr<std::atomic<int64_t>[]> waiting;  // parts of each slot's KV head that are not done
  std::vector<Span> spans;
};

}  // namespace snapstream
