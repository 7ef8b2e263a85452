// How dissimilar each key is from the others (compression/keys.py), in two passes over the keys.
#include <algorithm>
#include <cmath>
#include <utility>

#include "memory.h"
#include "team.h"
#include "vectors.h"

namespace snapstream {
namespace {

constexpr int64_t SPAN = 512;  // keys per task if all are compared: fixed, so that results do not depend on threads

int64_t span_of(const Differences& a) { return a.near > 0 ? a.near : SPAN; }

int64_t spans_of(const Differences& a) { return (a.length + span_of(a) - 1) / span_of(a); }

// Replaces elements that are not finite by zero.
vec finite(vec v) {
  const vec_i32 exponent = vec_i32{} + 0x7F800000;
  return select(((vec_i32)v & exponent) != exponent, v, vec{});
}

// Loads 32 elements; unless `all_finite`, those that are not finite become zero.
template <bool all_finite, typename T>
void load_finite(const T* p, vec& low, vec& high) {
  load_pair(p, low, high);
  if constexpr (!all_finite) low = finite(low), high = finite(high);
}

// Up to 16 keys of a row and a span; spans are numbered across all rows.
template <typename T>
struct Keys {
  const T* first;
  int64_t count, distance, size;

  // For each key, the sum of term(i, low, high) for its elements i .. i + PAIR, and whether all sums are finite.
  template <typename Term>
  std::pair<vec, bool> sum_up(const Term& term) const {
    const vec fast = sum_up_as<true>(term);
    if (!any((vec_i32)(fast - fast != vec{}))) return {fast, true};
    return {sum_up_as<false>(term), false};
  }

  template <bool all_finite, typename Term>
  vec sum_up_as(const Term& term) const {
    vec of_key[LANES] = {};
    for (int64_t key = 0; key < count; ++key) {
      for (int64_t i = 0; i < size; i += PAIR) {
        vec low, high;
        load_finite<all_finite>(first + key * distance + i, low, high);
        of_key[key] += term(i, low, high);
      }
    }
    return sums(of_key);
  }

  template <bool all_finite>
  void add_to(float* total, const float* factors) const {
    for (int64_t i = 0; i < size; i += PAIR) {
      vec sum_low = load(total + i), sum_high = load(total + i + LANES), low, high;
      for (int64_t key = 0; key < count; ++key) {
        load_finite<all_finite>(first + key * distance + i, low, high);
        sum_low += low * factors[key], sum_high += high * factors[key];
      }
      store(total + i, sum_low), store(total + i + LANES, sum_high);
    }
  }
};

// Calls visit(row, span, keys, at) for the keys of all candidates, `at` being the first one's place.
template <typename T, typename Visit>
void visit_all(const Differences& a, int64_t threads, const Visit& visit) {
  const int64_t spans = spans_of(a);
  share_out(threads, a.sequences * a.heads * spans, [&] {
    return [&](int64_t number) {
      const int64_t row = number / spans, b = row / a.heads, begin = number % spans * span_of(a);
      const T* keys = static_cast<const T*>(a.keys) + b * a.key_sequence + row % a.heads * a.key_head;
      const int64_t end = std::min({a.candidate_end[b], a.length, begin + span_of(a)});
      for (int64_t at = std::max(begin, a.sink); at < end; at += LANES)
        visit(row, number, Keys<T>{keys + at * a.key_row, std::min<int64_t>(LANES, end - at), a.key_row, a.size}, at);
    };
  });
}

template <typename T>
void key_differences(const Differences& a, int64_t threads) {
  const int64_t rows = a.sequences * a.heads, spans = spans_of(a);
  Memory<float> sums(rows * spans * a.size), means(rows * spans * a.size), factors(rows * a.length);
  std::fill(sums.get(), sums.get() + rows * spans * a.size, 0.0f);
  visit_all<T>(a, threads, [&](int64_t row, int64_t span, const Keys<T>& keys, int64_t at) {
    const auto [squares, all_finite] =
        keys.sum_up([](int64_t, vec low, vec high) { return low * low + high * high; });
    float lengths[LANES], *factor = factors.get() + row * a.length + at, *total = sums.get() + span * a.size;
    store(lengths, squares);
    for (int64_t key = 0; key < keys.count; ++key)
      factor[key] = 1.0f / std::max(std::sqrt(lengths[key]), static_cast<float>(a.shortest));
    if (all_finite) keys.template add_to<true>(total, factor);
    else keys.template add_to<false>(total, factor);
  });
  // What each span is compared with: the normalized sum of it and its neighbors, or of all spans of its row.
  share_out(threads, rows, [&] {
    return [&](int64_t row) {
      const float* of = sums.get() + row * spans * a.size;
      float* mean = means.get() + row * spans * a.size;
      for (int64_t span = 0; span < spans; ++span, mean += a.size) {
        if (a.near == 0 && span > 0) {
          std::copy(mean - a.size, mean, mean);
          continue;
        }
        const int64_t from = a.near > 0 ? std::max<int64_t>(span - 1, 0) : 0;
        const int64_t end = a.near > 0 ? std::min(span + 2, spans) : spans;
        std::fill(mean, mean + a.size, 0.0f);
        for (int64_t other = from; other < end; ++other)
          for (int64_t i = 0; i < a.size; ++i) mean[i] += of[other * a.size + i];
        double squares = 0.0;
        for (int64_t i = 0; i < a.size; ++i) squares += static_cast<double>(mean[i]) * mean[i];
        const float factor = static_cast<float>(1.0 / std::max(std::sqrt(squares), a.shortest));
        for (int64_t i = 0; i < a.size; ++i) mean[i] *= factor;
      }
    };
  });
  visit_all<T>(a, threads, [&](int64_t row, int64_t span, const Keys<T>& keys, int64_t at) {
    const float *mean = means.get() + span * a.size, *factor = factors.get() + row * a.length + at;
    const auto product = [&](int64_t i, vec low, vec high) {
      return low * load(mean + i) + high * load(mean + i + LANES);
    };
    float products[LANES];
    store(products, keys.sum_up(product).first);
    for (int64_t key = 0; key < keys.count; ++key)
      a.out[row * a.length + at + key] = std::max(1.0f - products[key] * factor[key], 0.0f);
  });
}

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Returns false if it ran out of memory.
EXPORT int64_t snapstream_key_differences(const Differences* a, int64_t type, int64_t threads) {
  try {
    if (type == 0) key_differences<float>(*a, threads);
    else key_differences<bfloat16>(*a, threads);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
