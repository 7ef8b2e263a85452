// Products of a step: all rows with weights of which each is read once.
#pragma once
#include "products.h"
#include "step_rows.h"

namespace snapstream {

constexpr int64_t UNIT = 16;  // weights of a unit of work
static_assert(UNIT == LANES);

inline int64_t units_of(int64_t weights) { return (weights + UNIT - 1) / UNIT; }

// `A` is a way to multiply, see vectors.h.
template <typename A>
class ProductOperations {
 public:
  using T = typename A::Number;
  using Left = typename A::Left::Number;

  ProductOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    for (int64_t i = 0; i < s.p.count; ++i) {
      const Operation& o = s.p.operations[i];
      if (o.kind == PRODUCT || o.kind == GATED_PRODUCT || o.kind == HEAD_PRODUCT || o.kind == EXPERT_GATED_PRODUCT ||
          o.kind == EXPERT_PRODUCT)
        left_size = std::max(left_size, ROWS_AT_ONCE * o.source.size);
    }
    left = scratch.reserve<Left>(threads * left_size);
  }

  // Room of a thread for rows in the form they are multiplied in.
  Left* room(int64_t thread) { return left + thread * left_size; }

  // Rows from .. from + M of `rows`, side by side in the form they are multiplied in.
  const Left* gather(const Part& source, int64_t from, int64_t M, int64_t thread) {
    Left* to = room(thread);
    for (int64_t m = 0; m < M; ++m) A::prepare(at<T>(source, s.rows[from + m]), source.size, to + m * source.size);
    return to;
  }

  int64_t group_of(int64_t from) const { return std::min<int64_t>(ROWS_AT_ONCE, s.row_count() - from); }

  void product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, last_weight = std::min(end * UNIT, o.target.size);
    const T* weight = static_cast<const T*>(o.weight);
    for (int64_t from = 0; from < s.row_count(); from += ROWS_AT_ONCE) {
      const int64_t M = group_of(from);
      const Left* x = gather(o.source, from, M, thread);
      for (int64_t n = begin * UNIT; n < last_weight; n += UNIT) {
        alignas(64) float y[ROWS_AT_ONCE * UNIT];
        const int64_t count = std::min(UNIT, last_weight - n);
        multiply<A>(x, M, weight + n * K, K, count, y, UNIT);
        for (int64_t m = 0; m < M; ++m) finish(o, s.rows[from + m], n, count, y + m * UNIT);
      }
    }
  }

  // Sums of `count` weights from n on, at most UNIT, to a row of the target.
  void finish(const Operation& o, int64_t row, int64_t n, int64_t count, const float* sums) {
    enum { PLAIN, ADD, EXACT, ROUNDED };
    const T* bias = static_cast<const T*>(o.bias);
    const vec y = bias ? load(sums) + some(bias + n, count) : load(sums);
    T* numbers = at<T>(o.target, row) + n;
    float* wide = at<float>(o.target, row) + n;
    switch (o.number[0]) {
      case ADD: return put(numbers, some(numbers, count) + rounded<T>(y), count);
      case EXACT: return put(wide, y, count);
      case ROUNDED: return put(wide, rounded<T>(y), count);
      default: put(numbers, y, count);
    }
  }

  // The upper half of the weights are gates.
  void gated_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const T* bias = static_cast<const T*>(o.bias);
    for (int64_t from = 0; from < s.row_count(); from += ROWS_AT_ONCE) {
      const int64_t M = group_of(from);
      const Left* x = gather(o.source, from, M, thread);
      gate(x, M, static_cast<const T*>(o.weight), bias, o.source.size, o.target.size, begin, end,
           [&](int64_t m) { return at<T>(o.target, s.rows[from + m]); });
    }
  }

  template <typename Target>
  void gate(const Left* x, int64_t M, const T* weight, const T* bias, int64_t K, int64_t inner, int64_t begin, int64_t end,
            const Target& target) {
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, inner); n += UNIT) {
      const int64_t count = std::min(UNIT, inner - n);
      alignas(64) float gates[ROWS_AT_ONCE * UNIT], ups[ROWS_AT_ONCE * UNIT];
      multiply<A>(x, M, weight + n * K, K, count, gates, UNIT);
      multiply<A>(x, M, weight + (inner + n) * K, K, count, ups, UNIT);
      for (int64_t m = 0; m < M; ++m) {
        vec a = load(gates + m * UNIT), b = load(ups + m * UNIT);
        if (bias != nullptr) a += some(bias + n, count), b += some(bias + inner + n, count);
        put(target(m) + n, silu(a) * b, count);
      }
    }
  }

  // Every head of a row times a matrix of its own: [out, in], or [in, out] if it is transposed.
  void head_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, N = o.target.size, head_stride = o.number[0];
    const bool transposed = o.number[1] != 0;
    for (int64_t head = begin; head < end; ++head) {
      const T* weight = static_cast<const T*>(o.weight) + head * head_stride;
      for (const int64_t row : s.rows) {
        const T* from = at<T>(o.source, row, head);
        T* to = at<T>(o.target, row, head);
        if (transposed) {
          for (int64_t n = 0; n < N; n += PAIR) {
            vec low = {}, high = {};
            for (int64_t k = 0; k < K; ++k) {
              vec weight_low, weight_high;
              load_pair(weight + k * N + n, weight_low, weight_high);
              const float factor = from[k];
              low += weight_low * factor, high += weight_high * factor;
            }
            store_pair(to + n, low, high);
          }
        } else {
          Left* x = room(thread);
          A::prepare(from, K, x);
          for (int64_t n = 0; n < N; n += UNIT) {
            alignas(64) float y[UNIT];
            const int64_t count = std::min(UNIT, N - n);
            multiply<A>(x, 1, weight + n * K, K, count, y, UNIT);
            put(to + n, load(y), count);
          }
        }
      }
    }
  }

 private:
  Step& s;
  int64_t left_size = 0;
  Left* left;
};

}  // namespace snapstream
