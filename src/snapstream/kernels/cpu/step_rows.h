// Row-wise operations of a step.
#pragma once
#include <cmath>

#include "step.h"
#include "vectors.h"

namespace snapstream {

// x / (1 + exp(-x)), computed from exp(-|x|) alone.
inline vec silu(vec x) {
  const vec e = exp_nonpositive(select(x > 0.0f, -x, x));
  return select(x > 0.0f, x, x * e) / (1.0f + e);
}

// Loads the first `count` elements of a vector, which may be all that memory holds of it.
template <typename N>
inline vec some(const N* from, int64_t count) {
  if (count == LANES) return load_numbers(from);
  N all[LANES] = {};
  std::copy_n(from, count, all);
  return load_numbers(all);
}

template <typename N>
inline void put(N* to, vec v, int64_t count) {
  if (count == LANES) return store_numbers(to, v);
  N all[LANES];
  store_numbers(all, v);
  std::copy_n(all, count, to);
}

template <typename T>
class RowOperations {
 public:
  explicit RowOperations(Step& step) : s(step) {}

  void embed(const Operation& o, int64_t row) {
    const T* table = static_cast<const T*>(o.weight);
    const int64_t token = s.p.token[row / s.p.tokens * s.p.token_row + row % s.p.tokens];
    std::copy_n(table + token * o.target.size, o.target.size, at<T>(o.target, row));
  }

  // Cosines, then sines, rounded to the model's type.
  void angles(const Operation& o, int64_t row) {
    const float* frequencies = static_cast<const float*>(o.weight);
    const int64_t half = o.target.size / 2;
    const float position = static_cast<float>(s.p.position[row / s.p.tokens] + row % s.p.tokens);
    float* out = at<float>(o.target, row);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * frequencies[i], scaling = static_cast<float>(o.real);
      out[i] = static_cast<float>(static_cast<T>(std::cos(angle) * scaling));
      out[half + i] = static_cast<float>(static_cast<T>(std::sin(angle) * scaling));
    }
  }

  void norm(const Operation& o, int64_t row) {
    const T* weight = static_cast<const T*>(o.weight);
    const int64_t size = o.source.size;
    for (int64_t head = 0; head < o.source.heads; ++head) {
      const T* from = at<T>(o.source, row, head);
      T* to = at<T>(o.target, row, head);
      vec total = {};
      for (int64_t i = 0; i < size; i += PAIR) {
        vec low, high;
        load_pair(from + i, low, high);
        total += low * low;
        total += high * high;
      }
      const float factor = 1.0f / std::sqrt(sum(total) / static_cast<float>(size) + static_cast<float>(o.real));
      for (int64_t i = 0; i < size; i += PAIR) {
        vec low, high, weight_low, weight_high;
        load_pair(from + i, low, high);
        load_pair(weight + i, weight_low, weight_high);
        store_pair(to + i, low * factor, high * factor);  // rounded before the product with the weight, as in training
        load_pair(to + i, low, high);
        store_pair(to + i, low * weight_low, high * weight_high);
      }
    }
  }

  void rotate(const Operation& o, int64_t row) {
    const int64_t half = o.source.size / 2;
    const float *cosine = at<float>(o.other, row), *sine = cosine + half;
    const int64_t step = o.number[0] ? 2 : 1, second = o.number[0] ? 1 : half;
    for (int64_t head = 0; head < o.source.heads; ++head) {
      const T* from = at<T>(o.source, row, head);
      T* to = at<T>(o.target, row, head);
      float result[2][1024];  // MOST_ROTATED in program.py
      for (int64_t i = 0; i < half; ++i) {
        const float a = from[i * step], b = from[i * step + second];
        result[0][i] = a * cosine[i] - b * sine[i], result[1][i] = b * cosine[i] + a * sine[i];
      }
      for (int64_t i = 0; i < half; ++i) to[i] = static_cast<T>(result[0][i]), to[half + i] = static_cast<T>(result[1][i]);
    }
  }

  void gate_row(const Operation& o, int64_t row) {
    const T *gates = at<T>(o.source, row), *ups = gates + o.target.size;
    T* to = at<T>(o.target, row);
    for (int64_t i = 0; i < o.target.size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
      put(to + i, silu(some(gates + i, count)) * some(ups + i, count), count);
    }
  }

  void store_entry(const Operation& o, int64_t row) {
    const Cache& cache = s.p.caches[o.number[0]];
    const int64_t slot = row / s.p.tokens, t = row % s.p.tokens;
    const bool certain = s.p.tokens == 1;
    const int64_t length = certain ? s.p.entries : s.p.tokens, entry = certain ? s.place[row] : t;
    for (int64_t head = 0; head < s.p.kv_heads; ++head) {
      const int64_t to = ((slot * s.p.kv_heads + head) * length + entry) * s.p.size;
      std::copy_n(at<T>(o.source, row, head), s.p.size, static_cast<T*>(certain ? cache.keys : cache.pending_keys) + to);
      if (o.target.data != nullptr)
        std::copy_n(at<T>(o.target, row, head), s.p.size, static_cast<T*>(certain ? cache.values : cache.pending_values) + to);
    }
  }

  // One token per slot.
  void take(const Operation& o, int64_t slot) {
    const int64_t token = token_after(o, slot, 0);
    s.p.taken[s.number * s.p.slots + slot] = token;
    go_on(slot, token, 1);
  }

  // The token taken after each token of a slot, and how many of the slot's guesses are therefore right.
  void verify(const Operation& o, int64_t slot) {
    const int64_t* guesses = s.p.token + slot * s.p.token_row + 1;
    int64_t t = 0;
    for (;; ++t) {
      const int64_t token = token_after(o, slot, t);
      s.p.taken[t * s.p.slots + slot] = token;
      if (t + 1 == s.tokens_of(slot) || guesses[t] != token) break;
    }
    s.p.accepted[slot] = t + 1;
  }

  // Stores the pending entries of accepted tokens, in order: a short ring may wrap around in between.
  void commit(int64_t slot, const Cache& cache) {
    const int64_t D = s.p.size;
    for (int64_t head = slot * s.p.kv_heads; head < (slot + 1) * s.p.kv_heads; ++head) {
      for (int64_t t = 0; t < s.p.accepted[slot]; ++t) {
        const int64_t from = (head * s.p.tokens + t) * D;
        const int64_t to = (head * s.p.entries + s.place[slot * s.p.tokens + t]) * D;
        std::copy_n(static_cast<const T*>(cache.pending_keys) + from, D, static_cast<T*>(cache.keys) + to);
        if (cache.values != cache.keys)
          std::copy_n(static_cast<const T*>(cache.pending_values) + from, D, static_cast<T*>(cache.values) + to);
      }
    }
  }

  void advance(int64_t slot) {
    const int64_t count = s.p.accepted[slot];
    go_on(slot, s.p.taken[(count - 1) * s.p.slots + slot], count);
  }

 private:
  // The most likely token after the t-th of a slot (of equal ones, the first), or the forced one.
  int64_t token_after(const Operation& o, int64_t slot, int64_t t) {
    const int64_t forced = s.p.forced[slot * s.p.most_steps + t];
    if (forced >= 0) return forced;
    const float* logits = at<float>(o.source, slot * s.p.tokens + t);
    vec highest = vec{} - std::numeric_limits<float>::infinity();
    int64_t i = 0;
    for (; i + LANES <= o.source.size; i += LANES) highest = larger(highest, load(logits + i));
    float top = highest[0];
    for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
    for (; i < o.source.size; ++i) top = std::max(top, logits[i]);
    const int64_t best = std::find(logits, logits + o.source.size, top) - logits;
    return best == o.source.size ? 0 : best;  // nothing but NaN
  }

  // Advances a slot by `count` tokens, of which `token` is the last.
  void go_on(int64_t slot, int64_t token, int64_t count) {
    int64_t* forced = s.p.forced + slot * s.p.most_steps;
    std::fill(std::copy(forced + count, forced + s.p.most_steps, forced), forced + s.p.most_steps, -1);
    s.p.token[slot * s.p.token_row] = token, s.p.position[slot] += count, s.p.cached[slot] += count;
  }

  Step& s;
};

}  // namespace snapstream
