// Attention of a step: each token attends to its slot's cache as it is once the token and those before it are stored.
#pragma once
#include <atomic>
#include <memory>
#include <utility>

#include "attention_tiles.h"
#include "coded_attention.h"
#include "step.h"

namespace snapstream {

// Attention of activations of type T; entries have the type of their cache.
template <typename T>
class AttentionOperations {
 public:
  AttentionOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    if (s.p.certain) return;  // see prefill_attention.h
    int64_t states = 0;
    const auto needs = [&](const auto& o) {
      if constexpr (std::is_same_v<std::decay_t<decltype(o)>, Attend>) {
        const Cache& cache = cache_of(o);
        states = std::max(states, o.query.heads * splits_of(cache) * state_size(o.target.size));
        most_spans = std::max(most_spans, s.p.slots * cache.kv_heads * splits_of(cache));
        most_heads = std::max(most_heads, cache.kv_heads);
#if defined(SNAPSTREAM_TILES)
        if (in_tiles(o)) columns.fit(s.p.tokens * o.query.heads / cache.kv_heads, cache.size, o.target.size);
#endif
        if (!in_tiles(o)) query_size = std::max(query_size, o.query.heads / cache.kv_heads * query_bytes(cache));
        if (s.p.tokens > 1) block_size = std::max(block_size, ENTRIES * (cache.key_row + cache.value_row));
      }
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) visit(s.p.operations[i], needs);
    query_size = round_up(query_size, 64), block_size = round_up(block_size, 64);
    queries = scratch.reserve<char>(threads * s.p.tokens * query_size);
    blocks = scratch.reserve<uint8_t>(threads * block_size);
    state = scratch.reserve<float>(s.p.slots * s.p.tokens * states);
#if defined(SNAPSTREAM_TILES)
    columns.reserve(threads, scratch);
#endif
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
    const Cache& cache = cache_of(o);
    if (is_coded(cache.type)) {
      with_codes(cache.type, [&](auto k) {
        with_codes(cache.value_type, [&](auto v) { attend<OneByOne<OfCodes<decltype(k), decltype(v)>>>(o, begin, end, thread); });
      });
      return;
    }
#if defined(SNAPSTREAM_TILES)
    if constexpr (std::is_same_v<T, bfloat16>)
      if (in_tiles(o)) {
        const TileSession session;
        return attend<Together>(o, begin, end, thread);
      }
#endif
    with_arithmetic<T>(cache.type, s.p.instructions, [&](auto a) { attend<OneByOne<OfNumbers<decltype(a)>>>(o, begin, end, thread); });
  }

 private:
  struct Span {
    int64_t slot, head, split;
  };

  const Cache& cache_of(const Attend& o) const { return s.p.caches[o.layer]; }

  // Whether heads are multiplied in tile registers, which pay if many share a KV head. Tiles add up in another order, so that
  // must depend neither on other slots nor on how many tokens a step reads.
  bool in_tiles(const Attend& o) const {
    constexpr int64_t HEADS_OF_VECTORS = 8;  // up to so many, vectors are as fast for one token
    const Cache& cache = cache_of(o);
    return std::is_same_v<T, bfloat16> && cache.type == BFLOAT16 && s.p.instructions == TILES &&
           o.query.heads / cache.kv_heads > HEADS_OF_VECTORS;
  }

  static int64_t splits_of(const Cache& cache) { return (cache.entries + SPLIT - 1) / SPLIT; }

  // Bytes of a query in the form in which it is multiplied.
  static int64_t query_bytes(const Cache& cache) {
    if (!is_coded(cache.type)) return cache.size * static_cast<int64_t>(sizeof(float));
    return sizeof(CodedQuery);
  }

  // Entries of some slot's KV head, in whatever form.
  struct Block {
    const uint8_t *keys, *values;
  };

  // Attention over numbers.
  template <typename A>
  struct OfNumbers {
    using N = typename A::Number;
    static void prepare(const Attend& o, const Cache& cache, const T* query, const float*, char* to) {
      A::prepare(query, cache.size, reinterpret_cast<typename A::Left::Number*>(to));
    }
    static int64_t query_bytes(const Cache& cache) { return cache.size * static_cast<int64_t>(sizeof(typename A::Left::Number)); }
    static void add(const Attend& o, const Cache& cache, const char* queries, const Block& block, int64_t n, float* states) {
      const Entries<N> entries{reinterpret_cast<const N*>(block.keys), reinterpret_cast<const N*>(block.values), cache.size,
                               cache.size};
      attend_block<A>(reinterpret_cast<const typename A::Left::Number*>(queries), o.query.heads / cache.kv_heads, entries, n,
                      cache.size, o.target.size, static_cast<float>(o.scale), static_cast<float>(o.cap), states);
    }
    static void write(const Attend& o, const Cache&, float* state, float total, float, const float*, T* out) {
      write_output<N>(state, total, o.target.size, out);
    }
  };

  // Attention over codes.
  template <typename K, typename V>
  struct OfCodes {
    static void prepare(const Attend& o, const Cache& cache, const T* query, const float* frame, char* to) {
      CodedQuery::prepare<K>(query, cache.size, frame, cache.rotation, static_cast<float>(o.scale), reinterpret_cast<CodedQuery*>(to));
    }
    static int64_t query_bytes(const Cache&) { return sizeof(CodedQuery); }
    static void add(const Attend& o, const Cache& cache, const char* queries, const Block& block, int64_t n, float* states) {
      const CodedEntries entries{block.keys, block.values, cache.key_row, cache.value_row};
      attend_coded<K, V>(reinterpret_cast<const CodedQuery*>(queries), o.query.heads / cache.kv_heads, entries, n, cache.size, o.target.size,
                         static_cast<float>(o.cap), states);
    }
    // Takes the rotation back; values that are part of keys have a frame, too.
    static void write(const Attend& o, const Cache& cache, float* state, float total, float sink, const float* frame, T* out) {
      float* x = state + LANES;
      rotate_channels(x, o.target.size, cache.rotation);
      const bool is_latent = cache.values == cache.keys;
      for (int64_t d = 0; d < o.target.size; ++d) {
        const float number = is_latent ? x[d] * frame[cache.size + d] + frame[d] * (total - sink) : x[d];
        out[d] = static_cast<T>(number / total);
      }
    }
  };

  // Rows of a slot whose heads are multiplied row by row.
  template <typename F>
  struct OneByOne {
    using Form = F;
    AttentionOperations& all;
    const Attend& o;
    const Span& span;
    const Cache& cache = all.cache_of(o);
    char* own;  // queries

    OneByOne(AttentionOperations& all, const Attend& o, const Span& span, int64_t thread)
        : all(all), o(o), span(span), own(all.queries + thread * all.s.p.tokens * all.query_size) {}

    void begin(int64_t row) {
      const int64_t group = o.query.heads / cache.kv_heads;
      for (int64_t g = 0; g < group; ++g) {
        clear_state(states(row) + g * state_size(o.target.size), o.target.size);
        Form::prepare(o, cache, all.query_of(o, span, row, g), frame_of(cache, span.slot, span.head),
                      own + row * all.query_size + g * Form::query_bytes(cache));
      }
    }

    template <typename Seen>
    void add(const Block& block, int64_t first, int64_t end, const Seen& seen) {
      for (int64_t row = first; row < end; ++row)
        if (seen(row) > 0) Form::add(o, cache, own + row * all.query_size, block, seen(row), states(row));
    }

    void end(int64_t) {}

   private:
    float* states(int64_t row) { return all.state_of(o, span, row); }
  };

#if defined(SNAPSTREAM_TILES)
  // Rows of a slot whose heads are multiplied together, in tile registers.
  struct Together {
    using Form = OfNumbers<Widened<bfloat16>>;
    AttentionOperations& all;
    const Attend& o;
    const Span& span;
    const Cache& cache = all.cache_of(o);
    const int64_t group = o.query.heads / cache.kv_heads;
    AttentionColumns own;

    Together(AttentionOperations& all, const Attend& o, const Span& span, int64_t thread)
        : all(all), o(o), span(span), own(all.columns.of(thread, cache.size, o.target.size)) {}

    void begin(int64_t row) {
      for (int64_t g = 0; g < group; ++g) own.begin(row * group + g, all.query_of(o, span, row, g));
    }

    // All of these rows that see any entries see the same ones: memory behind those may hold anything.
    template <typename Seen>
    void add(const Block& block, int64_t first, int64_t end, const Seen& seen) {
      const int64_t count = seen(end - 1);
      if (count <= 0) return;
      const Entries<bfloat16> entries{reinterpret_cast<const bfloat16*>(block.keys), reinterpret_cast<const bfloat16*>(block.values),
                                      cache.size, cache.size};
      own.add(entries, count, first * group, end * group, static_cast<float>(o.scale), static_cast<float>(o.cap),
              [&](int64_t column) { return seen(column / group); });
    }

    void end(int64_t row) {
      std::copy_n(own.state(row * group), group * state_size(o.target.size), all.state_of(o, span, row));
    }
  };
#endif

  template <typename Rows>
  void attend(const Attend& o, int64_t begin, int64_t end, int64_t thread) {
    using Form = typename Rows::Form;
    const Cache& cache = cache_of(o);
    const int64_t group = o.query.heads / cache.kv_heads, width = state_size(o.target.size);
    const auto* sinks = static_cast<const float*>(o.sinks.data);
    for (int64_t i = begin; i < end; ++i) {
      const auto [slot, head, split] = spans[i];
      attend_span<Rows>(o, spans[i], thread);
      // The thread that finishes the last part of a head merges all parts, always in the same order.
      if (waiting[slot * cache.kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      for (int64_t row = 0; row < s.tokens_of(slot); ++row) {
        const int64_t used = (s.sees(cache.group, slot * s.p.tokens + row) + SPLIT - 1) / SPLIT;
        for (int64_t g = 0; g < group; ++g) {
          float* states = state_of(o, {slot, head, 0}, row) + g * width;
          const Merged merged = merge_states(states, used, group * width, o.target.size, sinks ? sinks + head * group + g : nullptr);
          Form::write(o, cache, states, merged.total, merged.sink, frame_of(cache, slot, head),
                      at<T>(o.target, slot * s.p.tokens + row, head * group + g));
        }
      }
    }
  }

  // The query of a head of the group of a span, for a token of its slot.
  const T* query_of(const Attend& o, const Span& span, int64_t row, int64_t g) const {
    return at<T>(o.query, span.slot * s.p.tokens + row, span.head * (o.query.heads / cache_of(o).kv_heads) + g);
  }

  // The states of the heads of a span, for a token of its slot.
  float* state_of(const Attend& o, const Span& span, int64_t row) {
    const Cache& cache = cache_of(o);
    const int64_t group = o.query.heads / cache.kv_heads, head = (span.slot * s.p.tokens + row) * cache.kv_heads + span.head;
    return state + (head * splits_of(cache) + span.split) * group * state_size(o.target.size);
  }

  // Adds the entries of a split to the states of all rows of its slot: a block of entries is read once for all of them.
  template <typename Rows>
  void attend_span(const Attend& o, const Span& span, int64_t thread) {
    const Cache& cache = cache_of(o);
    const int64_t first_row = span.slot * s.p.tokens, rows = s.tokens_of(span.slot), begin = span.split * SPLIT;
    Rows own(*this, o, span, thread);
    for (int64_t row = 0; row < rows; ++row) own.begin(row);
    const int64_t first = (span.slot * cache.kv_heads + span.head) * cache.entries;
    const auto *keys = static_cast<const uint8_t*>(cache.keys), *values = static_cast<const uint8_t*>(cache.values);
    const int64_t last = std::min(begin + SPLIT, s.sees(cache.group, first_row + rows - 1));
    for (int64_t entry = begin; entry < last; entry += ENTRIES) {
      Block block{keys + (first + entry) * cache.key_row, values + (first + entry) * cache.value_row};
      const int64_t count = std::min(ENTRIES, last - entry);
      const auto seen = [&](int64_t row) { return std::min(count, s.sees(cache.group, first_row + row) - entry); };
      const auto place = [&](int64_t row) { return s.place(cache.group, first_row + row) - entry; };
      const auto is_stored_here = [&](int64_t row) { return place(row) >= 0 && place(row) < ENTRIES; };
      int64_t added = 0;
      // Uncertain tokens are not in the cache yet: a row sees the block as it will be once the row is stored.
      if (s.p.tokens > 1) {
        bool copied = false;
        for (int64_t row = 0; row < rows; ++row) {
          if (!is_stored_here(row)) continue;
          if (row > added) own.add(block, added, row, seen);
          if (!std::exchange(copied, true)) block = copy_of(cache, block, count, thread);
          store_pending(cache, first_row + row, span.head, place(row), thread);
          added = row;
        }
      }
      own.add(block, added, rows, seen);
    }
    for (int64_t row = 0; row < rows; ++row) own.end(row);
  }

  // A thread's own copy of n entries, in which uncertain tokens are stored.
  Block copy_of(const Cache& cache, const Block& block, int64_t n, int64_t thread) {
    uint8_t *keys = blocks + thread * block_size, *values = keys + ENTRIES * cache.key_row;
    std::copy_n(block.keys, n * cache.key_row, keys), std::copy_n(block.values, n * cache.value_row, values);
    return {keys, values};
  }

  void store_pending(const Cache& cache, int64_t row, int64_t head, int64_t place, int64_t thread) {
    const int64_t slot = row / s.p.tokens, from = (slot * cache.kv_heads + head) * s.p.tokens + row % s.p.tokens;
    uint8_t *keys = blocks + thread * block_size, *values = keys + ENTRIES * cache.key_row;
    std::copy_n(static_cast<const uint8_t*>(cache.pending_keys) + from * cache.key_row, cache.key_row, keys + place * cache.key_row);
    std::copy_n(static_cast<const uint8_t*>(cache.pending_values) + from * cache.value_row, cache.value_row, values + place * cache.value_row);
  }

  Step& s;
  int64_t most_spans = 0, most_heads = 0, query_size = 0, block_size = 0;
  char* queries = nullptr;    // per thread and token, in the form in which they are multiplied
  uint8_t* blocks = nullptr;  // per thread, keys and values of a block with pending ones, as the cache has them
#if defined(SNAPSTREAM_TILES)
  ColumnsMemory columns;      // per thread
#endif
  float* state = nullptr;     // per row, KV head, split and head of its group
  std::unique_ptr<std::atomic<int64_t>[]> waiting;  // parts of each slot's KV head that are not done
  std::vector<Span> spans;
};

}  // namespace snapstream
