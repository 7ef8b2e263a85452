// How dissimilar each key is from the others (compression/keys.py), in two passes over the keys.
#include <algorithm>
#include <cmath>

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

template <typename T>
void load_finite(const T* p, vec& low, vec& high) {
  load_pair(p, low, high);
  low = finite(low), high = finite(high);
}

// Calls visit(row, span, key, at) for every candidate's key; spans are numbered across all rows.
template <typename T, typename Visit>
void visit_all(const Differences& a, int64_t threads, const Visit& visit) {
  const int64_t spans = spans_of(a);
  share_out(threads, a.sequences * a.heads * spans, [&] {
    return [&](int64_t number) {
      const int64_t row = number / spans, b = row / a.heads, begin = number % spans * span_of(a);
      const T* keys = static_cast<const T*>(a.keys) + b * a.key_sequence + row % a.heads * a.key_head;
      const int64_t end = std::min({a.candidate_end[b], a.length, begin + span_of(a)});
      for (int64_t at = std::max(begin, a.sink); at < end; ++at) visit(row, number, keys + at * a.key_row, at);
    };
  });
}

template <typename T>
void key_differences(const Differences& a, int64_t threads) {
  const int64_t rows = a.sequences * a.heads, spans = spans_of(a);
  Memory<float> sums(rows * spans * a.size), means(rows * spans * a.size), factors(rows * a.length);
  std::fill(sums.get(), sums.get() + rows * spans * a.size, 0.0f);
  visit_all<T>(a, threads, [&](int64_t row, int64_t span, const T* key, int64_t at) {
    vec squares = {}, low, high;
    for (int64_t i = 0; i < a.size; i += PAIR) {
      load_finite(key + i, low, high);
      squares += low * low + high * high;
    }
    const float factor = 1.0f / std::max(std::sqrt(sum(squares)), static_cast<float>(a.shortest));
    factors.get()[row * a.length + at] = factor;
    float* total = sums.get() + span * a.size;
    for (int64_t i = 0; i < a.size; i += PAIR) {
      load_finite(key + i, low, high);
      store(total + i, load(total + i) + low * factor);
      store(total + i + LANES, load(total + i + LANES) + high * factor);
    }
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
  visit_all<T>(a, threads, [&](int64_t row, int64_t span, const T* key, int64_t at) {
    const float* mean = means.get() + span * a.size;
    vec products = {}, low, high;
    for (int64_t i = 0; i < a.size; i += PAIR) {
      load_finite(key + i, low, high);
      products += low * load(mean + i) + high * load(mean + i + LANES);
    }
    const int64_t to = row * a.length + at;
    a.out[to] = std::max(1.0f - sum(products) * factors.get()[to], 0.0f);
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
