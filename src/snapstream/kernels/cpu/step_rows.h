// Row-wise operations of a step.
#pragma once
#include <cmath>

#include "block_products.h"
#include "codes.h"
#include "step.h"
#include "vectors.h"

namespace snapstream {

// x / (1 + exp(-z)), computed from exp(-|z|) alone: with z = x it is SiLU, and with others GELU's approximation and
// gpt-oss's gate.
ALWAYS_INLINE inline vec activated(vec x, int64_t activation) {
  const vec z = activation == GELU      ? x * (1.5957691216f + 0.0713548163f * x * x)
                : activation == CLAMPED ? x * 1.702f
                                        : x;
  const vec e = exp_nonpositive(select(z > 0.0f, -z, z));
  return select(z > 0.0f, x, x * e) / (1.0f + e);
}

ALWAYS_INLINE inline vec sigmoid(vec x) {
  const vec e = exp_nonpositive(select(x > 0.0f, -x, x));
  return select(x > 0.0f, vec{} + 1.0f, e) / (1.0f + e);
}

// A gate and what it lets through.
ALWAYS_INLINE inline vec gated(vec gate, vec up, int64_t activation) {
  if (activation != CLAMPED) return activated(gate, activation) * up;
  const vec limit = vec{} + 7.0f;
  up = larger(select(up > limit, limit, up), -limit);
  return activated(select(gate > limit, limit, gate), activation) * (up + 1.0f);
}

// Index of the highest number, the first one of equal ones; 0 if there is nothing but NaN.
inline int64_t likeliest(const float* logits, int64_t count) {
  vec highest = vec{} - std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) highest = larger(highest, load(logits + i));
  float top = highest[0];
  for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
  for (; i < count; ++i) top = std::max(top, logits[i]);
  const int64_t best = std::find(logits, logits + count, top) - logits;
  return best == count ? 0 : best;
}

// The same among the tokens whose bits are set.
inline int64_t likeliest(const float* logits, int64_t count, const uint32_t* allowed) {
  int64_t best = 0;
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i += LANES) {
    const uint32_t word = allowed[i / 32] >> (i % 32);
    const int64_t size = std::min<int64_t>(count - i, LANES);
    if (word == 0 || (size == LANES && !any(load(logits + i) > top))) continue;
    for (int64_t lane = 0; lane < size; ++lane)
      if ((word >> lane & 1) && logits[i + lane] > top) best = i + lane, top = logits[best];
  }
  return best;
}

// `count` numbers of a vector, at most LANES, from `at` on.
inline vec some(const Vector& from, int64_t at, int64_t count) {
  return with_type(from.type, [&](auto n) { return some(numbers<decltype(n)>(from) + at, count); });
}

// Operations on rows of activations of type T.
template <typename T>
class RowOperations {
 public:
  explicit RowOperations(Step& step) : s(step) {}

  void run(const Embed& o, int64_t row) {
    const int64_t token = s.p.token[row / s.p.tokens * s.p.token_row + row % s.p.tokens];
    if (in_blocks(o.table.type)) {
      const uint8_t* tiles = tile_of(o.table, 0, token / LANES * LANES);
      widen_row(o.table.type, tiles, token % LANES, o.target.size, at<T>(o.target, row));
    } else {
      with_type(o.table.type, [&](auto n) {
        convert(row_of<decltype(n)>(o.table, 0, token), o.target.size, at<T>(o.target, row));
      });
    }
    if (o.factor == 1.0) return;
    T* to = at<T>(o.target, row);
    for (int64_t i = 0; i < o.target.size; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) * static_cast<float>(o.factor));
  }

  void run(const Cap& o, int64_t row) {
    float* to = at<float>(o.target, row);
    for (int64_t i = 0; i < o.target.size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
      put(to + i, capped(some(to + i, count), static_cast<float>(o.cap)), count);
    }
  }

  // Cosines, then sines, rounded to the type of activations.
  void run(const Angles& o, int64_t row) {
    const float *frequencies = numbers<float>(o.frequencies), scaling = static_cast<float>(o.scaling);
    const int64_t half = o.target.size / 2;
    const float position = static_cast<float>(s.p.position[row / s.p.tokens] + row % s.p.tokens);
    float* out = at<float>(o.target, row);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * frequencies[i];
      out[i] = static_cast<float>(static_cast<T>(std::cos(angle) * scaling));
      out[half + i] = static_cast<float>(static_cast<T>(std::sin(angle) * scaling));
    }
  }

  void run(const Norm& o, int64_t row) {
    with_type(o.weight.type, [&](auto n) {
      const auto* weight = numbers<decltype(n)>(o.weight);
      const int64_t size = o.source.size;
      const bool multiplies = o.factor.data != nullptr;
      const float last = multiplies ? some(o.factor, 0, 1)[0] : 1.0f;
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
        const float factor = 1.0f / std::sqrt(sum(total) / static_cast<float>(size) + static_cast<float>(o.epsilon));
        for (int64_t i = 0; i < size; i += PAIR) {
          vec low, high, weight_low, weight_high;
          load_pair(from + i, low, high);
          load_pair_as<T>(weight + i, weight_low, weight_high);
          low *= factor, high *= factor;
          if (!o.wide) low = rounded<T>(low), high = rounded<T>(high);
          low *= weight_low, high *= weight_high;
          if (o.add) {
            vec own_low, own_high;
            load_pair(to + i, own_low, own_high);
            low = own_low + rounded<T>(low), high = own_high + rounded<T>(high);
          }
          if (multiplies) low = rounded<T>(low) * last, high = rounded<T>(high) * last;
          store_pair(to + i, low, high);
        }
      }
    });
  }

  void run(const Rotate& o, int64_t row) {
    const int64_t half = o.source.size / 2;
    const float *cosine = at<float>(o.angles, row), *sine = cosine + half;
    const int64_t step = o.pairs ? 2 : 1, second = o.pairs ? 1 : half;
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

  void run(const ScaleByPosition& o, int64_t row) {
    const int64_t periods = (s.p.position[row / s.p.tokens] + row % s.p.tokens) / o.length;
    if (periods == 0) return;
    const float exact = 1.0f + static_cast<float>(o.beta) * std::log1p(static_cast<float>(periods));
    const vec factor = rounded<T>(vec{} + exact);
    for (int64_t head = 0; head < o.target.heads; ++head) {
      T* to = at<T>(o.target, row, head);
      for (int64_t i = 0; i < o.target.size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
        put(to + i, some(to + i, count) * factor, count);
      }
    }
  }

  void run(const Gate& o, int64_t row) {
    const T *gates = at<T>(o.source, row), *ups = o.up.data ? at<T>(o.up, row) : gates + o.target.size;
    T* to = at<T>(o.target, row);
    for (int64_t i = 0; i < o.target.size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
      put(to + i, gated(some(gates + i, count), some(ups + i, count), o.activation), count);
    }
  }

  void run(const GateBy& o, int64_t row) {
    const bool single = o.source.size == 1;
    for (int64_t head = 0; head < o.target.heads; ++head) {
      const T* gates = at<T>(o.source, row, head);
      T* to = at<T>(o.target, row, head);
      for (int64_t i = 0; i < o.target.size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
        const vec gate = single ? vec{} + static_cast<float>(gates[0]) : some(gates + i, count);
        put(to + i, some(to + i, count) * (o.sigmoid ? sigmoid(gate) : activated(gate, SILU)), count);
      }
    }
  }

  void run(const Store& o, int64_t row) {
    const Cache& cache = s.p.caches[o.layer];
    const int64_t slot = row / s.p.tokens, t = row % s.p.tokens;
    const bool certain = s.p.certain || s.p.tokens == 1;
    const int64_t length = certain ? cache.entries : s.p.tokens, entry = certain ? s.place(cache.group, row) : t;
    void *keys = certain ? cache.keys : cache.pending_keys, *values = certain ? cache.values : cache.pending_values;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
      const int64_t to = (slot * cache.kv_heads + head) * length + entry;
      const auto put_row = [&](const BufferView& from, int64_t type, const float* own, void* memory, int64_t bytes) {
        put_entry(at<T>(from, row, head), cache, type, own, static_cast<uint8_t*>(memory) + to * bytes);
      };
      put_row(o.key, cache.type, frame_of(cache, slot, head), keys, cache.key_row);
      if (o.value.data != nullptr) put_row(o.value, cache.value_type, nullptr, values, cache.value_row);
    }
  }

  // The token taken after each token of a slot, and how many of the slot's guesses are therefore right.
  void run(const Verify& o, int64_t slot) {
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
    if (cache.is_state) return;  // see Recur
    const auto copy = [](const void* from, int64_t first, void* to, int64_t place, int64_t bytes) {
      std::copy_n(static_cast<const uint8_t*>(from) + first * bytes, bytes, static_cast<uint8_t*>(to) + place * bytes);
    };
    for (int64_t head = slot * cache.kv_heads; head < (slot + 1) * cache.kv_heads; ++head) {
      for (int64_t t = 0; t < s.p.accepted[slot]; ++t) {
        const int64_t from = head * s.p.tokens + t;
        const int64_t to = head * cache.entries + s.place(cache.group, slot * s.p.tokens + t);
        copy(cache.pending_keys, from, cache.keys, to, cache.key_row);
        if (cache.values != cache.keys) copy(cache.pending_values, from, cache.values, to, cache.value_row);
      }
    }
  }

  void run(const Advance&, int64_t slot) {
    const int64_t count = s.p.accepted[slot];
    s.go_on(slot, s.p.taken[(count - 1) * s.p.slots + slot], count);
  }

 private:
  // Stores a key or value of activations as its cache has them.
  static void put_entry(const T* from, const Cache& cache, int64_t type, const float* frame, uint8_t* to) {
    if (is_coded(type)) return encode_row(type, from, cache.size, frame, cache.rotation, to);
    with_type(type, [&](auto n) { convert(from, cache.size, reinterpret_cast<decltype(n)*>(to)); });
  }

  // The most likely token after the t-th of a slot (of equal ones, the first) that a grammar allows, or the forced one.
  int64_t token_after(const Verify& o, int64_t slot, int64_t t) {
    const int64_t forced = s.p.forced[slot * s.p.most_steps + t], vocabulary = o.logits.size;
    if (forced >= 0) return forced;
    const float* logits = at<float>(o.logits, slot * s.p.tokens + t);
    if (!o.state.masked[slot]) return likeliest(logits, vocabulary);
    return likeliest(logits, vocabulary, o.state.allowed + (t * s.p.slots + slot) * ((vocabulary + 31) / 32));
  }

  Step& s;
};

}  // namespace snapstream
