// The attention that the last queries of a prompt pay to each token: summed over the last of them (SnapKV), and the
// largest share of it. Two passes over the keys, normalizers first, so that only the logits of one block are held.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "memory.h"
#include "prefill_kernels.h"
#include "team.h"

namespace snapstream {
namespace {

constexpr int64_t SPAN = 16 * BLOCK;  // keys per task: fixed, so that results do not depend on threads

// One sequence. Rows are the window's queries of all heads that share a KV head, `stride` rows per head, of which the
// last ones may be unused; row r sees keys up to last[r].
template <typename K>
struct Window {
  const Problem<typename K::Number>& p;
  int64_t threads, stride, rows, tiles;
  float scale;                                       // of scores, if they have no soft cap
  int64_t first, end;                                // keys that any softmax includes
  int64_t candidates, candidates_end;                // those that every softmax includes
  int64_t seen;                                      // keys that every voter sees
  bool split;                                        // whether the two softmaxes differ
  bool everything;                                   // whether that of sums runs over all tokens, and sinks
  std::vector<int32_t> last;                         // [tiles * QUERIES]
  std::vector<typename K::Operand> queries;          // [kv_heads][tiles][operands][QUERIES]
  std::vector<float> sum_normalizer, share_normalizer;  // [kv_heads][tiles * QUERIES]; infinite if a row has no vote
  std::vector<float> maxima, sums;  // of scores, of weights: [candidates, others][kv_heads][spans][tiles * QUERIES]

  int64_t spans() const { return (end + SPAN - 1) / SPAN; }
  int64_t width() const { return tiles * QUERIES; }
};

// The scores of a block of keys and a tile of rows, [key][row]. In blocks whose keys all voters see, rows without a vote have
// scores, too; their infinite normalizers make these count for nothing.
template <bool masked>
struct Scores {
  const float* scores;
  const int32_t* last;  // of the tile's rows
  int64_t block;

  vec of(int64_t key, int64_t row) const {
    const vec s = load(scores + key * QUERIES + row);
    if constexpr (!masked) return s;
    return select((vec_i32)load_u32(last + row) >= static_cast<int32_t>(block + key), s, vec{} + LOWEST);
  }
};

// Calls visit(head, span, block, keys, tile, scores, spare) for every KV head, every block of keys and every tile of
// rows. `spare` has a vector for every key, and keeps it from one tile of a block to the next.
template <typename K, typename Visit>
void visit_all(const Window<K>& w, const Visit& visit) {
  const int64_t spans = w.spans(), operands = w.p.size / K::PER_OPERAND * QUERIES;
  share_out(w.threads, w.p.kv_heads * spans, [&] {
    constexpr int64_t SCORES = BLOCK * QUERIES * sizeof(float), SPARE = BLOCK * sizeof(vec);
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
          if (w.p.cap > 0) {
            const float scale = static_cast<float>(w.p.scale), cap = static_cast<float>(w.p.cap);
            for (int64_t i = 0; i < keys * QUERIES; i += LANES) store(scores + i, capped(load(scores + i) * scale, cap));
          }
          const int32_t* last = w.last.data() + tile * QUERIES;
          if (block + keys <= w.seen) visit(head, span, block, keys, tile, Scores<false>{scores, last, block}, spare);
          else visit(head, span, block, keys, tile, Scores<true>{scores, last, block}, spare);
        }
      }
    };
  });
}

template <typename K>
void normalize(Window<K>& w) {
  const int64_t width = w.width(), spans = w.spans(), kinds = 1 + w.split, kind_states = w.p.kv_heads * spans * width;
  w.maxima.assign(kinds * kind_states, LOWEST);
  w.sums.assign(kinds * kind_states, 0.0f);
  const float scale = w.scale;
  visit_all(w, [&](int64_t head, int64_t span, int64_t block, int64_t keys, int64_t tile, const auto& scores, float*) {
    const int64_t from = std::max<int64_t>(0, w.first - block);
    const int64_t inside = w.split ? std::clamp(w.candidates - block, from, keys) : from;
    const int64_t outside = w.split ? std::clamp(w.candidates_end - block, inside, keys) : keys;
    const auto add = [&](int64_t kind, int64_t begin, int64_t end) {
      if (begin >= end) return;
      const int64_t state = kind * kind_states + (head * spans + span) * width + tile * QUERIES;
      vec maximum[COLUMNS], sum[COLUMNS] = {};
      UNROLL for (int c = 0; c < COLUMNS; ++c) maximum[c] = load(&w.maxima[state + c * LANES]);
      for (int64_t key = begin; key < end; ++key) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) maximum[c] = larger(maximum[c], scores.of(key, c * LANES));
      }
      for (int64_t key = begin; key < end; ++key) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          sum[c] += exp_nonpositive(scores.of(key, c * LANES) * scale - maximum[c] * scale);
        }
      }
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        float *highest = &w.maxima[state + c * LANES], *total = &w.sums[state + c * LANES];
        // A row that has seen nothing yet has added only ones, which its first real maximum clears.
        store(total, load(total) * exp_nonpositive((load(highest) - maximum[c]) * scale) + sum[c]);
        store(highest, maximum[c]);
      }
    };
    add(0, inside, outside);
    add(1, from, inside);
    add(1, outside, keys);
  });
  const auto log_total = [&](int64_t head, int64_t row, int64_t of_kinds, const float* sink) {
    float top = LOWEST, sum = 0.0f;
    const auto visit = [&](const auto& add) {
      for (int64_t kind = 0; kind < of_kinds; ++kind) {
        for (int64_t span = 0; span < spans; ++span) add(kind * kind_states + (head * spans + span) * width + row);
      }
    };
    visit([&](int64_t state) { top = std::max(top, w.maxima[state]); });
    if (top == LOWEST && !sink) return std::numeric_limits<float>::infinity();
    top = sink ? std::max(top * scale, *sink) : top * scale;
    visit([&](int64_t state) { sum += w.sums[state] * std::exp(w.maxima[state] * scale - top); });
    if (sink) sum += std::exp(*sink - top);
    return top + std::log(sum);
  };
  for (int64_t head = 0; head < w.p.kv_heads; ++head) {
    for (int64_t row = 0; row < w.rows; ++row) {
      float &sum = w.sum_normalizer[head * width + row], &share = w.share_normalizer[head * width + row];
      const int64_t query_head = head * (w.p.heads / w.p.kv_heads) + row / w.stride;
      if (sum == 0.0f) sum = log_total(head, row, kinds, w.everything && w.p.sinks ? w.p.sinks + query_head : nullptr);
      if (share == 0.0f) share = log_total(head, row, 1, nullptr);
    }
  }
}

// Adds votes_of(key), the votes of 16 keys from `key` on, to the votes of keys begin .. end. It is called for whole groups of
// 16; what it gives for other keys is dropped, and may be anything.
template <typename VotesOf>
void add_votes(float* votes, int64_t begin, int64_t end, const VotesOf& votes_of) {
  for (int64_t key = begin / LANES * LANES; key < end; key += LANES) {
    const vec more = votes_of(key);
    if (begin <= key && key + LANES <= end) {
      store(votes + key, load(votes + key) + more);
      continue;
    }
    float each[LANES];
    store(each, more);
    for (int64_t i = std::max(begin, key); i < std::min(end, key + LANES); ++i) votes[i] += each[i - key];
  }
}

template <typename K>
void sum_up(const Window<K>& w, float* votes, int64_t votes_head, float part) {
  const float scale = w.scale;
  visit_all(w, [&](int64_t head, int64_t, int64_t block, int64_t keys, int64_t tile, const auto& scores, float*) {
    const float* normalizer = &w.sum_normalizer[head * w.width() + tile * QUERIES];
    const int64_t first = std::max<int64_t>(0, w.first - block);
    add_votes(votes + head * votes_head + block, first, keys, [&](int64_t key) {
      vec totals[LANES] = {};
      for (int64_t i = 0; i < LANES; ++i) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          totals[i] += exp_nonpositive(scores.of(key + i, c * LANES) * scale - load(normalizer + c * LANES));
        }
      }
      return snapstream::sums(totals) * part;
    });
  });
}

// The mean over the heads of a group of the largest share of each head, and of its sums from the query `first_summed` on.
// If the softmax of sums runs over everything, all tokens have sums, but only the candidates have shares.
// A vector of rows belongs to one head, whose tiles follow each other; `most` collects the logarithms of shares, as only
// the largest is needed.
template <typename K>
void take_largest(const Window<K>& w, int64_t first_summed, float* sums, float* shares, int64_t votes_head, float part) {
  const float scale = w.scale;
  visit_all(w, [&](int64_t head, int64_t, int64_t block, int64_t keys, int64_t tile, const auto& scores, float* most) {
    const int64_t first = std::clamp<int64_t>(w.candidates - block, 0, keys);
    const int64_t end = std::clamp(w.candidates_end - block, first, keys);
    for (int64_t column = 0; column < QUERIES && tile * QUERIES + column < w.rows; column += LANES) {
      const int64_t row = tile * QUERIES + column, voter = row % w.stride, at = head * w.width() + row;
      const vec share_normalizer = load(&w.share_normalizer[at]), sum_normalizer = load(&w.sum_normalizer[at]);
      for (int64_t key = first; key < end; ++key) {
        const vec before = voter == 0 ? vec{} + LOWEST : load(most + key * LANES);
        store(most + key * LANES, larger(before, scores.of(key, column) * scale - share_normalizer));
      }
      if (voter + LANES > first_summed) {
        const int64_t begin = w.everything ? 0 : first, end_of_sums = w.everything ? keys : end;
        add_votes(sums + head * votes_head + block, begin, end_of_sums, [&](int64_t key) {
          vec weights[LANES];
          for (int64_t i = 0; i < LANES; ++i)
            weights[i] = exp_nonpositive(scores.of(key + i, column) * scale - sum_normalizer);
          return snapstream::sums(weights) * part;
        });
      }
      if (voter + LANES < w.stride) continue;
      add_votes(shares + head * votes_head + block, first, end, [&](int64_t key) {
        vec highest[LANES];
        for (int64_t i = 0; i < LANES; ++i) highest[i] = load(most + (key + i) * LANES);
        return exp_nonpositive(maxima(highest)) * part;
      });
    }
  });
}

// The votes of one sequence: p.query is [heads][window], of p.tokens queries each.
template <typename K>
void attend_window(const Problem<typename K::Number>& p, const Voting& a, int64_t b, int64_t threads) {
  const int64_t W = p.tokens, D = p.size, N = p.kv_heads, G = p.heads / N, length = a.length[b];
  const int64_t stride = a.largest > 0 ? round_up(W, LANES) : W, rows = G * stride;
  const bool everything = a.everything && a.summed > 0;
  const int64_t candidates_end = std::max<int64_t>(0, std::min(a.candidate_end[b], p.readable));
  Window<K> w{p, threads, stride, rows, (rows + QUERIES - 1) / QUERIES};
  w.scale = p.cap > 0 ? 1.0f : static_cast<float>(p.scale);
  w.first = everything ? 0 : a.sink;
  w.end = everything ? std::max<int64_t>(0, std::min(length, p.readable)) : candidates_end;
  w.candidates = a.sink, w.candidates_end = candidates_end;
  w.split = everything && a.largest > 0;
  w.everything = everything;
  const int64_t width = w.width();
  constexpr float NONE = std::numeric_limits<float>::infinity();
  w.last.assign(width, -1);
  w.seen = length;
  w.sum_normalizer.assign(N * width, NONE);
  w.share_normalizer.assign(N * width, NONE);
  for (int64_t row = 0; row < w.rows; ++row) {
    const int64_t voter = row % stride, position = length - W + voter;
    if (voter >= W || position < a.first_voter[b]) continue;
    w.last[row] = static_cast<int32_t>(position);
    w.seen = std::min(w.seen, position + 1);
    for (int64_t head = 0; head < N; ++head) {
      if (voter >= W - a.summed) w.sum_normalizer[head * width + row] = 0.0f;
      if (voter >= W - a.largest) w.share_normalizer[head * width + row] = 0.0f;
    }
  }
  if (w.end <= w.first || *std::max_element(w.last.begin(), w.last.end()) < 0) return;  // no keys, or no voters
  w.queries.resize(N * w.tiles * (D / K::PER_OPERAND) * QUERIES);
  for (int64_t head = 0; head < N; ++head) {
    pack_queries<K>(
        w.rows, D, w.queries.data() + head * w.tiles * (D / K::PER_OPERAND) * QUERIES,
        [&](int64_t row) {  // rows that do not vote repeat the last query: what they hold may be undefined
          const int64_t voter = w.last[row] < 0 ? W - 1 : row % stride;
          return p.query + (head * G + row / stride) * p.query_head + voter * p.query_token;
        });
  }
  normalize(w);
  const float part = 1.0f / static_cast<float>(G);
  float* votes = a.votes + b * N * p.readable;
  if (a.largest == 0) return sum_up(w, votes, p.readable, part);
  float* shares = a.summed > 0 ? votes + a.sequences * N * p.readable : votes;
  take_largest(w, a.summed > 0 ? W - a.summed : stride, votes, shares, p.readable, part);
}

template <typename K>
void attend_windows(const void* problem, const Voting& a, int64_t threads) {
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
EXPORT int64_t snapstream_window_attention(const void* problem, const Voting* a, int64_t type,
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
