// Causal attention of a prefill chunk to everything before it and to itself, at the speed of the multipliers.
//
// The queries of all heads that share a KV head are rows of one matrix, tokens first. A task is up to 256 such rows of
// one KV head. Threads take one task at a time, see team.h, so a thread that is descheduled delays only one task.
// A task passes over the keys block by block with a running maximum per row (online softmax, Milakov and Gimelshein,
// arXiv 1805.02867), from the first key in the window of its first row up to the position of its last row. The result
// of a row depends only on the row, the keys that it sees, and the multiples of BLOCK: it is the same, bit for bit, for
// all chunks, starts, other rows and threads.
#include <algorithm>
#include <utility>

#include "memory.h"
#include "prefill_attention.h"
#include "prefill_kernels.h"

#if defined(SNAPSTREAM_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace snapstream {
namespace {

constexpr int64_t MOST_ROWS = 256;          // of a task
constexpr int64_t TASK_BYTES = 256 * 1024;  // of its queries and outputs: they should stay in the second-level cache

// Whether the system lets this process use tile registers, which must be requested.
bool tiles_allowed() {
#if defined(SNAPSTREAM_TILES)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
#else
  return false;
#endif
}

// Rows of one task, in memory of one thread.
template <typename K>
class Rows {
 public:
  using T = typename K::Number;
  using Operand = typename K::Operand;

  Rows(const Problem<T>& problem, int64_t most)
      : p(problem), group(problem.heads / problem.kv_heads), tile_queries(problem.size / K::PER_OPERAND * QUERIES) {
    const int64_t tiles = most / QUERIES;
    int64_t bytes = 0;
    auto reserve = [&](int64_t size) { return std::exchange(bytes, bytes + round_up(size, 64)); };
    const int64_t queries_at = reserve(tiles * tile_queries * sizeof(Operand));
    const int64_t outputs_at = reserve(tiles * QUERIES * p.columns * sizeof(float));
    const int64_t maxima_at = reserve(tiles * QUERIES * sizeof(float));
    const int64_t sums_at = reserve(tiles * QUERIES * sizeof(float));
    const int64_t scores_at = reserve(BLOCK * QUERIES * sizeof(float));
    const int64_t block_at = reserve(K::scratch(p.size, p.columns));
    memory.resize(bytes);
    char* base = memory.get();
    queries = reinterpret_cast<Operand*>(base + queries_at);
    outputs = reinterpret_cast<float*>(base + outputs_at);
    maxima = reinterpret_cast<float*>(base + maxima_at);
    sums = reinterpret_cast<float*>(base + sums_at);
    scores = reinterpret_cast<float*>(base + scores_at);
    block_memory = base + block_at;
  }

  // Computes attention for rows first .. end of a KV head, and writes the output.
  void attend(int64_t kv_head, int64_t first, int64_t end) {
    begin_rows(kv_head, first, end);
    const int64_t entries = position(end - 1) + 1;
    // Outputs of a tile stay in the first-level cache for a span of keys, which is widened once for all tiles.
    constexpr int64_t SPAN = (K::PACKS ? 16 : 1) * BLOCK;
    for (int64_t span = oldest(first) / BLOCK * BLOCK; span < entries; span += SPAN) {
      auto numbers = K::read(p, kv_head, span, std::min(BLOCK, entries - span), block_memory);
      for (int64_t row = first; row < end; row += QUERIES) {
        const int64_t last_row = std::min(row + QUERIES, end) - 1, lowest = position(row), highest = position(last_row);
        const int64_t tile = (row - first) / QUERIES;
        const int64_t edge = oldest(last_row), begin = std::max(span, oldest(row) / BLOCK * BLOCK);
        for (int64_t block = begin; block < std::min(span + SPAN, highest + 1); block += BLOCK) {  // to the diagonal
          if (K::PACKS) numbers = K::read(p, kv_head, block, std::min(BLOCK, entries - block), block_memory);
          const int64_t keys = std::min(BLOCK, highest + 1 - block);
          if (lowest < block + BLOCK - 1 || block < edge)
            attend_tile<true>(numbers, block, keys, tile, row, last_row);
          else
            attend_tile<false>(numbers, block, keys, tile, row, last_row);
        }
      }
    }
    finish_rows(kv_head, first, end);
  }

 private:
  int64_t position(int64_t row) const { return p.start + row / group; }

  // The first key that a row sees.
  int64_t oldest(int64_t row) const { return p.window ? std::max<int64_t>(position(row) + 1 - p.window, 0) : 0; }

  int64_t query_at(int64_t kv_head, int64_t row) const {
    return row / group * p.query_token + (kv_head * group + row % group) * p.query_head;
  }

  // Packs queries and clears outputs. A row's sum and maximum begin with its sink, if there is one.
  void begin_rows(int64_t kv_head, int64_t first, int64_t end) {
    pack_queries<K>(end - first, p.size, queries, [&](int64_t row) { return p.query + query_at(kv_head, first + row); });
    const int64_t tiles = (end - first + QUERIES - 1) / QUERIES;
    std::fill_n(outputs, tiles * QUERIES * p.columns, 0.0f);
    std::fill_n(sums, tiles * QUERIES, 0.0f);
    std::fill_n(maxima, tiles * QUERIES, LOWEST);
    if (p.sinks == nullptr) return;
    for (int64_t row = first; row < end; ++row) {
      maxima[row - first] = p.sinks[kv_head * group + row % group] * K::factor(1.0f);
      sums[row - first] = 1.0f;
    }
  }

  template <bool masked>
  void attend_tile(const typename K::Tile& numbers, int64_t block, int64_t keys, int64_t tile, int64_t row,
                   int64_t last_row) {
    const int64_t padded = round_up(keys, K::MULTIPLE);
    const vec factor = vec{} + K::factor(p.cap > 0 ? 1.0f : static_cast<float>(p.scale));
    float* out = outputs + tile * QUERIES * p.columns;
    K::score(numbers, padded, p.size, queries + tile * tile_queries, scores);
    if (p.cap > 0) {
      for (int64_t i = 0; i < padded * QUERIES; i += LANES)
        store(scores + i, capped(load(scores + i) * static_cast<float>(p.scale), static_cast<float>(p.cap)));
    }
    // Weights take no more room than scores, so they never overtake the scores that they overwrite.
    auto* weights = reinterpret_cast<Operand*>(scores);
    for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
      Seen seen = {};
      if constexpr (masked) {
        int32_t first[LANES], last[LANES];
        for (int i = 0; i < LANES; ++i) {
          const int64_t own = std::min(row + lane + i, last_row);
          first[i] = static_cast<int32_t>(oldest(own) - block), last[i] = static_cast<int32_t>(position(own) - block);
        }
        seen = {load_as<vec_i32>(first), load_as<vec_i32>(last)};
      }
      float *maximum_at = maxima + tile * QUERIES + lane, *sum_at = sums + tile * QUERIES + lane;
      const vec before = load(maximum_at), maximum = larger(before, highest_score<masked>(lane, padded, seen) * factor);
      vec sum = load(sum_at);
      // The maximum is updated at once: a weight of exactly one, which outweighs the others, is not rounded.
      if (any(maximum > before)) {
        store(maximum_at, maximum);
        if (block > 0 || p.sinks != nullptr) {
          const vec change = K::shrink(before - maximum);
          for (int64_t i = lane; i < p.columns * QUERIES; i += QUERIES) store(out + i, load(out + i) * change);
          sum *= change;
        }
      }
      sum += K::template weigh<masked>(scores + lane, padded, factor, maximum, seen, weights + lane);
      store(sum_at, sum);
    }
    K::add(numbers, K::PACKS ? padded : keys, p.columns, weights, out);
  }

  template <bool masked>
  vec highest_score(int64_t lane, int64_t keys, const Seen& seen) const {
    vec highest[4];  // independent chains of maxima
    for (vec& chain : highest) chain = vec{} + LOWEST;
    for (int64_t key = 0; key < keys; key += 4) {
      UNROLL for (int i = 0; i < 4; ++i) {
        vec s = load(scores + (key + i) * QUERIES + lane);
        if constexpr (masked) s = select(seen.has(key + i), s, vec{} + LOWEST);
        highest[i] = larger(highest[i], s);
      }
    }
    return larger(larger(highest[0], highest[1]), larger(highest[2], highest[3]));
  }

  // Divides by the sums and writes rows in the caller's layout.
  void finish_rows(int64_t kv_head, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row += LANES) {
      const int64_t tile = (row - first) / QUERIES, lane = (row - first) % QUERIES;
      const vec inverse = 1.0f / load(sums + tile * QUERIES + lane);
      for (int64_t column = 0; column < p.columns; column += LANES) {
        vec_u32 numbers[LANES];
        const float* from = outputs + (tile * p.columns + column) * QUERIES + lane;
        for (int i = 0; i < LANES; ++i) numbers[i] = (vec_u32)(load(from + i * QUERIES) * inverse);
        transpose(numbers);
        for (int i = 0; i < std::min<int64_t>(LANES, end - row); ++i) {
          const int64_t token = (row + i) / group, head = kv_head * group + (row + i) % group;
          store_numbers(p.out + token * p.out_token + head * p.out_head + column, (vec)numbers[i]);
        }
      }
    }
  }

  const Problem<T>& p;
  const int64_t group, tile_queries;
  Memory<char> memory;
  Operand* queries;
  float *outputs, *maxima, *sums, *scores;  // weights overwrite scores
  char* block_memory;
};

// First values are packed, for kernels that need it, then tasks run.
template <typename K>
class ChunkAttention : public Work {
 public:
  using T = typename K::Number;

  ChunkAttention(const Problem<T>& problem, int64_t threads) : p(problem) {
    const int64_t row_bytes = p.size * sizeof(T) + p.columns * sizeof(float);
    rows = p.tokens * p.heads / p.kv_heads;
    // Small enough for the cache, and at least a few tasks per thread.
    const int64_t fitting = std::min(MOST_ROWS, TASK_BYTES / row_bytes);
    const int64_t fair = rows * p.kv_heads / (4 * threads);
    most = std::max(QUERIES, std::min(fitting, fair) / QUERIES * QUERIES);
    pieces = (rows + most - 1) / most;
    own.reserve(threads);
    for (int64_t thread = 0; thread < threads; ++thread) own.emplace_back(p, most);
    phases.push_back({&ChunkAttention::attend, p.kv_heads * pieces});
    if constexpr (K::PACKS) {
      first_block = p.packed_until / BLOCK, blocks = round_up(p.start + p.tokens, BLOCK) / BLOCK - first_block;
      if (blocks > 0) phases.push_back({&ChunkAttention::pack, p.kv_heads * blocks});
    }
  }

  int64_t next_phase() override {
    if (phases.empty()) return 0;
    now = phases.back();
    phases.pop_back();
    return now.units;
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    for (int64_t number = begin; number < end; ++number) (this->*now.work)(number, thread);
  }

 private:
  struct Phase {
    void (ChunkAttention::*work)(int64_t number, int64_t thread);
    int64_t units;
  };

  void pack(int64_t number, int64_t) {
    const int64_t head = number / blocks, entry = (first_block + number % blocks) * BLOCK;
    pack_values(p.values + head * p.value_head + entry * p.value_row, p.value_row,
                std::min(BLOCK, p.start + p.tokens - entry), p.columns, p.packed + head * p.packed_head + entry * p.columns);
  }

  void attend(int64_t number, int64_t thread) {
    [[maybe_unused]] const typename K::Session session{};
    const int64_t piece = pieces - 1 - number / p.kv_heads;  // the last rows see most keys
    own[thread].attend(number % p.kv_heads, piece * most, std::min(rows, (piece + 1) * most));
  }

  const Problem<T> p;
  int64_t rows, most, pieces, first_block = 0, blocks = 0;
  std::vector<Rows<K>> own;  // per thread
  std::vector<Phase> phases;  // the next one last
  Phase now{};
};

}  // namespace
}  // namespace snapstream

using namespace snapstream;

EXPORT int64_t snapstream_best_instructions() {
  if (tiles_allowed()) return TILES;
#if defined(__AVX512BF16__)
  // Intel's processors take two cycles for a dot product of pairs and half of one for a float32 product.
  if (!__builtin_cpu_is("intel")) return PAIRS;
#endif
  return PORTABLE;
}

EXPORT int64_t snapstream_has_instructions(int64_t instructions) {
#if defined(__AVX512BF16__)
  if (instructions == PAIRS) return true;
#endif
  return instructions == PORTABLE || (instructions == TILES && tiles_allowed());
}

namespace snapstream {

std::unique_ptr<Work> chunk_attention(const Problem<float>& problem, int64_t, int64_t threads) {
  return std::make_unique<ChunkAttention<Portable<float>>>(problem, threads);
}

std::unique_ptr<Work> chunk_attention(const Problem<bfloat16>& problem, int64_t instructions, int64_t threads) {
  switch (instructions) {
#if defined(SNAPSTREAM_TILES)
    case TILES: return std::make_unique<ChunkAttention<Tiles>>(problem, threads);
#endif
#if defined(__AVX512BF16__)
    case PAIRS: return std::make_unique<ChunkAttention<Pairs>>(problem, threads);
#endif
    default: return std::make_unique<ChunkAttention<Portable<bfloat16>>>(problem, threads);
  }
}

}  // namespace snapstream

// Returns false if it ran out of memory.
EXPORT int64_t snapstream_prefill_attention(const void* problem, int64_t type, int64_t instructions, int64_t threads) {
  try {
    return with_type(type, [&](auto number) {
      const auto work = chunk_attention(*static_cast<const Problem<decltype(number)>*>(problem), instructions, threads);
      run_team(*work, threads);
      return int64_t{true};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}
