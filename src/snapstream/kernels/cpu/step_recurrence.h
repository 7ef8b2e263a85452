// Layers with a state: a short convolution and the gated delta rule, see snapstream/kernels/recurrence.py.
#pragma once
#include <cmath>

#include "step_rows.h"

namespace snapstream {

// The recurrence of activations of type T. A unit is one value head of a slot: no other one reads or writes its matrix.
template <typename T>
class RecurrenceOperations {
 public:
  RecurrenceOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    const auto needs = [&](const auto& o) {
      if constexpr (std::is_same_v<std::decay_t<decltype(o)>, Recur>) {
        vectors = std::max(vectors, std::min(s.p.tokens, PIECE) * (2 * o.key_size + o.target.size));
        block_size = std::max(block_size, o.key_size * WIDE_COLUMNS);
        if (guesses(o)) matrix = std::max(matrix, o.key_size * o.target.size);
      }
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) visit(s.p.operations[i], needs);
    vector_scratch = scratch.reserve<float>(threads * vectors);
    block_scratch = scratch.reserve<float>(threads * block_size);
    matrix_scratch = scratch.reserve<float>(threads * matrix);
  }

  int64_t units(const Recur& o) const { return s.slot_count() * o.target.heads; }

  void run(const Recur& o, int64_t begin, int64_t end, int64_t thread) {
    with_type(s.p.caches[o.layer].type, [&](auto n) {
      for (int64_t i = begin; i < end; ++i)
        run_head<decltype(n)>(o, s.active[i / o.target.heads], i % o.target.heads, thread);
    });
  }

 private:
  // Tokens whose queries, keys and values are held at once, so that some columns of a matrix go through all of these.
  static constexpr int64_t PIECE = 64;
  static constexpr int64_t WIDE_COLUMNS = 2 * LANES;

  // Whether some tokens may be wrong, so that the state must not change yet.
  bool guesses(const Recur& o) const { return s.p.tokens > 1 && !o.settles && !s.p.certain; }

  template <typename N>
  void run_head(const Recur& o, int64_t slot, int64_t head, int64_t thread) {
    const Cache& cache = s.p.caches[o.layer];
    const int64_t K = o.key_size, V = o.target.size, heads = o.target.heads, share = heads / o.key_heads;
    const int64_t key_head = o.in_turn ? head % o.key_heads : head / share;
    const int64_t queries = key_head * K, keys = (o.key_heads + key_head) * K, values = 2 * o.key_heads * K + head * V;
    const int64_t strength_at = cache.size - 2 * heads + head, decay_at = strength_at + heads;
    float* kept = static_cast<float*>(cache.keys) + (slot * heads + head) * K * V;
    float *vector = vector_scratch + thread * vectors, *state = kept;
    if (guesses(o)) {
      state = matrix_scratch + thread * matrix;
      std::copy_n(kept, K * V, state);
    }
    const int64_t count = o.settles ? s.p.accepted[slot] : s.tokens_of(slot), width = 2 * K + V;
    float strengths[PIECE], decays[PIECE];
    for (int64_t first = 0; first < count; first += PIECE) {
      const int64_t piece = std::min(PIECE, count - first);
      for (int64_t i = 0; i < piece; ++i) {
        const int64_t t = first + i;
        float *q = vector + i * width, *k = q + K, *v = k + K;
        // 1. Record the input. The first head of those that share queries and keys does it for these, too. Of a prompt,
        //    the caller does it: other heads still need what would be overwritten.
        if (!o.settles && !s.p.certain) {
          record<N>(o, slot, t, values, V), record<N>(o, slot, t, strength_at, 1), record<N>(o, slot, t, decay_at, 1);
          if (o.in_turn ? head < o.key_heads : head % share == 0)
            record<N>(o, slot, t, queries, K), record<N>(o, slot, t, keys, K);
        }
        // 2. Convolve and normalize.
        convolve<N>(o, slot, t, queries, K, q), convolve<N>(o, slot, t, keys, K, k), convolve<N>(o, slot, t, values, V, v);
        normalize(q, K, 1.0f / std::sqrt(static_cast<float>(K))), normalize(k, K, 1.0f);
        const float given = 1.0f / (1.0f + std::exp(-input<N>(o, slot, t, strength_at)));
        strengths[i] = static_cast<float>(static_cast<T>(given));
        const float x = input<N>(o, slot, t, decay_at) + numbers<float>(o.shifts)[head];
        decays[i] = std::exp(numbers<float>(o.rates)[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
      }
      // 3. The rule, for some columns after others. For several tokens they are copied next to each other, so that all
      //    of them stay in the cache nearest to the core.
      float result[WIDE_COLUMNS];
      for (int64_t column = 0; column < V;) {
        const bool wide = column + WIDE_COLUMNS <= V, packed = piece > 2;
        const int64_t step = wide ? WIDE_COLUMNS : LANES, stride = packed ? step : V;
        float* block = packed ? block_scratch + thread * block_size : state + column;
        if (packed)
          for (int64_t row = 0; row < K; ++row) std::copy_n(state + row * V + column, step, block + row * step);
        for (int64_t i = 0; i < piece; ++i) {
          const float *q = vector + i * width, *k = q + K, *v = k + K + column;
          if (wide) turn<2>(block, K, stride, q, k, v, strengths[i], decays[i], result);
          else turn<1>(block, K, stride, q, k, v, strengths[i], decays[i], result);
          if (!o.settles) convert(result, step, at<T>(o.target, slot * s.p.tokens + first + i, head) + column);
        }
        if (packed)
          for (int64_t row = 0; row < K; ++row) std::copy_n(block + row * step, step, state + row * V + column);
        column += step;
      }
    }
  }

  template <int WIDE>
  static void turn(float* state, int64_t K, int64_t stride, const float* q, const float* k, const float* v, float strength,
                   float decay, float* result) {
    vec known[2][WIDE] = {}, change[WIDE], total[2][WIDE] = {};  // of every second row: a sum waits for the one before
    for (int64_t i = 0; i < K; i += 2)
      for (int row = 0; row < 2; ++row)
        for (int w = 0; w < WIDE; ++w) known[row][w] += k[i + row] * load(state + (i + row) * stride + w * LANES);
    for (int w = 0; w < WIDE; ++w) change[w] = (load(v + w * LANES) - decay * (known[0][w] + known[1][w])) * strength;
    for (int64_t i = 0; i < K; i += 2)
      for (int row = 0; row < 2; ++row)
        for (int w = 0; w < WIDE; ++w) {
          float* place = state + (i + row) * stride + w * LANES;
          const vec next = decay * load(place) + k[i + row] * change[w];
          store(place, next);
          total[row][w] += q[i + row] * next;
        }
    for (int w = 0; w < WIDE; ++w) store(result + w * LANES, total[0][w] + total[1][w]);
  }

  static void normalize(float* x, int64_t size, float scale) {
    vec total = {};
    for (int64_t i = 0; i < size; i += LANES) total += load(x + i) * load(x + i);
    const float factor = scale / std::sqrt(sum(total) + 1e-6f);  // NORM_EPSILON
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * factor);
  }

  // Where a slot's ring has the input of the t-th of its tokens, or of one before them.
  template <typename N>
  N* recorded(const Recur& o, int64_t slot, int64_t t) const {
    const Cache& cache = s.p.caches[o.layer];
    const int64_t entry = (s.p.position[slot] + t) % cache.entries;
    return static_cast<N*>(cache.values) + (slot * cache.entries + entry) * cache.size;
  }

  template <typename N>
  void record(const Recur& o, int64_t slot, int64_t t, int64_t first, int64_t count) {
    convert(at<T>(o.source, slot * s.p.tokens + t) + first, count, recorded<N>(o, slot, t) + first);
  }

  template <typename N>
  float input(const Recur& o, int64_t slot, int64_t t, int64_t element) const {
    if (o.settles) return static_cast<float>(recorded<N>(o, slot, t)[element]);
    return static_cast<float>(static_cast<N>(at<T>(o.source, slot * s.p.tokens + t)[element]));
  }

  // SiLU of the convolution of channels first .. first + count, with the inputs before the t-th token's and its own.
  template <typename N>
  void convolve(const Recur& o, int64_t slot, int64_t t, int64_t first, int64_t count, float* result) {
    const int64_t channels = s.p.caches[o.layer].size - 2 * o.target.heads;
    std::fill_n(result, count, 0.0f);
    for (int64_t tap = 0; tap <= o.before; ++tap) {
      const int64_t token = t + tap - o.before;
      if (s.p.position[slot] + token < 0) continue;
      with_type(o.taps.type, [&](auto w) {
        const auto* weights = numbers<decltype(w)>(o.taps) + tap * channels + first;
        const auto add = [&](const auto* inputs) {  // a token's own as they are recorded
          for (int64_t i = 0; i < count; i += LANES)
            store(result + i, load(result + i) + load_numbers(weights + i) * rounded<N>(load_numbers(inputs + first + i)));
        };
        if (token < 0 || o.settles) add(recorded<N>(o, slot, token));
        else add(at<T>(o.source, slot * s.p.tokens + token));
      });
    }
    for (int64_t i = 0; i < count; i += LANES) store(result + i, rounded<T>(activated(load(result + i), SILU)));
  }

  Step& s;
  int64_t vectors = 0, matrix = 0, block_size = 0;
  float *vector_scratch, *matrix_scratch, *block_scratch;
};

}  // namespace snapstream
