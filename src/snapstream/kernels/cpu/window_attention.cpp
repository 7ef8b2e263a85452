// The attention that the last queries of a prompt pay to each token: the votes of SnapKV, which sum over the queries, or
// the largest of them. It makes two passes over the keys, normalizer first, so that it holds the logits of one block.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "instructions.h"
#include "memory.h"
#include "prefill_kernels.h"
#include "team.h"

namespace snapstream {
namespace {

constexpr int64_t SPAN = 16 * BLOCK;  // keys per task: fixed, so that results do not depend on threads

// Arguments besides a Problem, for all sequences of a batch; prefill.py fills the structure.
struct WindowArguments {
  const int64_t *length, *first_voter, *candidate_end;  // [sequences]
  float* votes;                                         // [sequences][kv_heads][readable]
  int64_t sequences, query_sequence, key_sequence;      // how many, and elements from one to the next
  int64_t sink, largest;
};

// One sequence. Rows are the window's queries of all heads that share a KV head, `stride` rows per head, of which the
// last ones may be unused; row r sees keys first .. last[r].
template <typename K>
struct Window {
  const Problem<typename K::Number>& p;
  int64_t threads, stride, rows, tiles, first, end;
  std::vector<int32_t> last;                         // [tiles * QUERIES]
  std::vector<typename K::Operand> queries;          // [kv_heads][tiles][operands][QUERIES]
  std::vector<float> normalizer;                     // [kv_heads][tiles * QUERIES]
  std::vector<float> maxima, sums;                   // [kv_heads][spans][tiles * QUERIES]

  int64_t spans() const { return (end + SPAN - 1) / SPAN; }
};

// Calls visit(head, span, block, keys, tile, scores, spare) for every KV head, every block of keys and every tile of
// rows. `spare` has a number for every key, and keeps it from one tile of a block to the next.
template <typename K, typename Visit>
void visit_all(const Window<K>& w, const Visit& visit) {
  const int64_t spans = w.spans(), operands = w.p.size / K::PER_OPERAND * QUERIES;
  share_out(w.threads, w.p.kv_heads * spans, [&] {
    constexpr int64_t SCORES = BLOCK * QUERIES * sizeof(float), SPARE = BLOCK * sizeof(float);
    return [&, memory = Memory<char>(SCORES + SPARE + K::scratch(w.p.size, 0))](int64_t number) {
      [[maybe_unused]] const typename K::Session session{};
      const int64_t head = number / spans, span = number % spans;
      char* base = memory.get();
      auto* scores = reinterpret_cast<float*>(base);
      auto* spare = reinterpret_cast<float*>(base + SCORES);
      for (int64_t block = span * SPAN; block < std::min(w.end, (span + 1) * SPAN); block += BLOCK) {
        const int64_t keys = std::min(BLOCK, w.end - block);
        const auto numbers = K::read(w.p, head, block, keys, base + SCORES + SPARE);
        for (int64_t tile = 0; tile < w.tiles; ++tile) {
          const auto* queries = w.queries.data() + (head * w.tiles + tile) * operands;
          K::score(numbers, round_up(keys, K::MULTIPLE), w.p.size, queries, scores);
          visit(head, span, block, keys, tile, scores, spare);
        }
      }
    };
  });
}

template <typename K>
void normalize(Window<K>& w) {
  const int64_t width = w.tiles * QUERIES, spans = w.spans();
  w.maxima.assign(w.p.kv_heads * spans * width, LOWEST);
  w.sums.assign(w.p.kv_heads * spans * width, 0.0f);
  const vec scale = vec{} + static_cast<float>(w.p.scale);
  visit_all(w, [&](int64_t head, int64_t span, int64_t block, int64_t keys, int64_t tile, const float* scores, float*) {
    for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
      const int64_t row = tile * QUERIES + lane, state = (head * spans + span) * width + row;
      const vec_i32 last = (vec_i32)load_u32(w.last.data() + row);
      const int64_t from = std::max<int64_t>(0, w.first - block);
      vec highest = vec{} + LOWEST, sum = {};
      for (int64_t key = from; key < keys; ++key) {
        const vec s = load(scores + key * QUERIES + lane) * scale;
        highest = larger(highest, select(last >= static_cast<int32_t>(block + key), s, vec{} + LOWEST));
      }
      const vec before = load(&w.maxima[state]), maximum = larger(before, highest);
      for (int64_t key = from; key < keys; ++key) {
        const vec s = load(scores + key * QUERIES + lane) * scale;
        sum += exp_nonpositive(select(last >= static_cast<int32_t>(block + key), s, vec{} + LOWEST) - maximum);
      }
      // A row that has seen nothing yet has added only ones, which its first real maximum clears.
      store(&w.sums[state], load(&w.sums[state]) * exp_nonpositive(before - maximum) + sum);
      store(&w.maxima[state], maximum);
    }
  });
  for (int64_t head = 0; head < w.p.kv_heads; ++head) {
    for (int64_t row = 0; row < w.rows; ++row) {
      float top = LOWEST, sum = 0.0f;
      for (int64_t span = 0; span < spans; ++span) top = std::max(top, w.maxima[(head * spans + span) * width + row]);
      for (int64_t span = 0; span < spans; ++span) {
        const int64_t state = (head * spans + span) * width + row;
        sum += w.sums[state] * std::exp(w.maxima[state] - top);
      }
      float& total = w.normalizer[head * width + row];
      if (top > LOWEST && total == 0.0f) total = top + std::log(sum);  // rows that do not vote stay at infinity
      if (top <= LOWEST) total = std::numeric_limits<float>::infinity();
    }
  }
}

template <typename K>
void sum_up(const Window<K>& w, float* votes, int64_t votes_head, float share) {
  const int64_t width = w.tiles * QUERIES;
  const vec scale = vec{} + static_cast<float>(w.p.scale);
  visit_all(w, [&](int64_t head, int64_t, int64_t block, int64_t keys, int64_t tile, const float* scores, float*) {
    float* out = votes + head * votes_head + block;
    for (int64_t key = std::max<int64_t>(0, w.first - block); key < keys; ++key) {
      vec total = {};
      UNROLL for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
        const int64_t row = tile * QUERIES + lane;
        const vec weight = exp_nonpositive(load(scores + key * QUERIES + lane) * scale -
                                           load(&w.normalizer[head * width + row]));
        total += select((vec_i32)load_u32(w.last.data() + row) >= static_cast<int32_t>(block + key), weight, vec{});
      }
      out[key] += sum(total) * share;
    }
  });
}

// The mean over the heads of a group of the largest vote of each head. A vector of rows belongs to one head, whose tiles
// follow each other; `most` collects their logarithms, as only the largest needs to be a share.
template <typename K>
void take_largest(const Window<K>& w, float* votes, int64_t votes_head, float share) {
  const int64_t width = w.tiles * QUERIES;
  const vec scale = vec{} + static_cast<float>(w.p.scale);
  visit_all(w, [&](int64_t head, int64_t, int64_t block, int64_t keys, int64_t tile, const float* scores, float* most) {
    const int64_t from = tile * QUERIES, until = std::min(w.rows, from + QUERIES);
    float* out = votes + head * votes_head + block;
    const int64_t first = std::max<int64_t>(0, w.first - block);
    for (int64_t row = from, next; row < until; row = next) {
      next = std::min(until, (row / w.stride + 1) * w.stride);
      if (row % w.stride == 0) std::fill(most, most + BLOCK, LOWEST);
      for (int64_t key = first; key < keys; ++key) {
        vec highest = vec{} + LOWEST;
        for (int64_t i = row; i < next; i += LANES) {
          const vec s = load(scores + key * QUERIES + i - from) * scale - load(&w.normalizer[head * width + i]);
          const vec_i32 last = (vec_i32)load_u32(w.last.data() + i);
          highest = larger(highest, select(last >= static_cast<int32_t>(block + key), s, vec{} + LOWEST));
        }
        most[key] = std::max(most[key], largest(highest));
      }
      if (next % w.stride != 0) continue;
      for (int64_t key = 0; key < BLOCK; key += LANES) store(most + key, exp_nonpositive(load(most + key)));
      for (int64_t key = first; key < keys; ++key) out[key] += most[key] * share;
    }
  });
}

// The votes of one sequence: p.query is [heads][window], of p.tokens queries each.
template <typename K>
void attend_window(const Problem<typename K::Number>& p, const WindowArguments& a, int64_t b, int64_t threads) {
  const int64_t W = p.tokens, D = p.size, N = p.kv_heads, G = p.heads / N, length = a.length[b];
  const int64_t stride = a.largest ? round_up(W, LANES) : W, rows = G * stride;
  const bool everything = a.sink < 0;  // the softmax runs over the causal prompt, not only over the candidates
  Window<K> w{p, threads, stride, rows, (rows + QUERIES - 1) / QUERIES, everything ? 0 : a.sink,
              everything ? length : a.candidate_end[b]};
  w.end = std::max<int64_t>(0, std::min(w.end, p.readable));
  const int64_t width = w.tiles * QUERIES;
  w.last.assign(width, -1);
  w.normalizer.assign(N * width, std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < w.rows; ++row) {
    const int64_t position = length - W + row % stride;
    if (row % stride >= W || position < a.first_voter[b]) continue;
    w.last[row] = static_cast<int32_t>(everything ? position : std::min(position, a.candidate_end[b] - 1));
    for (int64_t head = 0; head < N; ++head) w.normalizer[head * width + row] = 0.0f;
  }
  w.queries.resize(N * w.tiles * (D / K::PER_OPERAND) * QUERIES);
  for (int64_t head = 0; head < N; ++head) {
    pack_queries<K>(
        w.rows, D, w.queries.data() + head * w.tiles * (D / K::PER_OPERAND) * QUERIES,
        [&](int64_t row) {  // unused rows repeat the last query, and do not vote
          return p.query + (head * G + row / stride) * p.query_head + std::min(row % stride, W - 1) * p.query_token;
        });
  }
  if (w.end <= w.first) return;
  normalize(w);
  const auto vote = a.largest ? take_largest<K> : sum_up<K>;
  vote(w, a.votes + b * N * p.readable, p.readable, 1.0f / static_cast<float>(G));
}

template <typename K>
void attend_windows(const void* problem, const WindowArguments& a, int64_t threads) {
  auto p = *static_cast<const Problem<typename K::Number>*>(problem);
  for (int64_t b = 0; b < a.sequences; ++b) {
    attend_window<K>(p, a, b, threads);
    p.query += a.query_sequence, p.keys += a.key_sequence;
  }
}

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Returns false if it ran out of memory.
EXPORT int64_t snapstream_window_attention(const void* problem, const WindowArguments* a, int64_t type,
                                           int64_t instructions, int64_t threads) {
  try {
    if (type == 0) {
      attend_windows<Portable<float>>(problem, *a, threads);
      return true;
    }
    switch (instructions) {
#if defined(SNAPSTREAM_TILES)
      case TILES: attend_windows<Tiles>(problem, *a, threads); break;
#endif
#if defined(__AVX512BF16__)
      case PAIRS: attend_windows<Pairs>(problem, *a, threads); break;
#endif
      default: attend_windows<Portable<bfloat16>>(problem, *a, threads);
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
