// Matrix products of a step: all rows by weights, each of which is read once.
#pragma once
#include "products.h"
#include "step_rows.h"

namespace snapstream {

constexpr int64_t UNIT = 16;  // weights per unit of work
static_assert(UNIT == LANES);

inline int64_t units_of(int64_t weights) { return (weights + UNIT - 1) / UNIT; }

// `A` defines how to multiply, see vectors.h.
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

  // Gathers a head of M rows, numbered row_at(m), in the form in which they are multiplied.
  template <typename RowAt>
  const Left* gather(const Part& source, int64_t head, int64_t M, int64_t thread, const RowAt& row_at) {
    Left* to = left + thread * left_size;
    for (int64_t m = 0; m < M; ++m) A::prepare(at<T>(source, row_at(m), head), source.size, to + m * source.size);
    return to;
  }

  // Multiplies M rows by units begin .. end of N weights; finish(m, n, count, sums) gets the sums of each unit, from
  // weight n on.
  template <typename Finish>
  void multiply_units(const Left* x, int64_t M, const T* weight, int64_t K, int64_t N, int64_t begin, int64_t end,
                      const Finish& finish) {
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, N); n += UNIT) {
      alignas(64) float sums[ROWS_AT_ONCE * UNIT];
      const int64_t count = std::min(UNIT, N - n);
      multiply<A>(x, M, weight + n * K, K, count, sums, UNIT);
      for (int64_t m = 0; m < M; ++m) finish(m, n, count, sums + m * UNIT);
    }
  }

  void product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    each_group(o.source, 0, thread, [&](const Left* x, int64_t M, const int64_t* rows) {
      multiply_units(x, M, static_cast<const T*>(o.weight), o.source.size, o.target.size, begin, end,
                     [&](int64_t m, int64_t n, int64_t count, const float* sums) { finish(o, rows[m], n, count, sums); });
    });
  }

  // Writes the sums of `count` weights from n on, at most UNIT, to a row of the target.
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

  // The first half of the weights are gates, the second half ups.
  void gated_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const T* bias = static_cast<const T*>(o.bias);
    each_group(o.source, 0, thread, [&](const Left* x, int64_t M, const int64_t* rows) {
      gate(x, M, static_cast<const T*>(o.weight), bias, o.source.size, o.target.size, begin, end,
           [&](int64_t m) { return at<T>(o.target, rows[m]); });
    });
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

  // Multiplies each head of a row by its own matrix: [out, in], or [in, out] if it is transposed.
  void head_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, N = o.target.size;
    for (int64_t head = begin; head < end; ++head) {
      const T* weight = static_cast<const T*>(o.weight) + head * o.number[0];
      if (o.number[1] != 0) {
        for (const int64_t row : s.rows)
          multiply_transposed(at<T>(o.source, row, head), weight, K, N, at<T>(o.target, row, head));
        continue;
      }
      each_group(o.source, head, thread, [&](const Left* x, int64_t M, const int64_t* rows) {
        multiply_units(x, M, weight, K, N, 0, units_of(N), [&](int64_t m, int64_t n, int64_t count, const float* sums) {
          put(at<T>(o.target, rows[m], head) + n, load(sums), count);
        });
      });
    }
  }

 private:
  // Calls function(x, M, rows) for a head of the step's rows, in groups of a few rows gathered in x.
  template <typename Function>
  void each_group(const Part& source, int64_t head, int64_t thread, const Function& function) {
    for (int64_t from = 0; from < s.row_count(); from += ROWS_AT_ONCE) {
      const int64_t M = std::min(ROWS_AT_ONCE, s.row_count() - from), *rows = s.rows.data() + from;
      function(gather(source, head, M, thread, [&](int64_t m) { return rows[m]; }), M, rows);
    }
  }

  // One row times weights [K, N].
  static void multiply_transposed(const T* x, const T* weight, int64_t K, int64_t N, T* out) {
    for (int64_t n = 0; n < N; n += PAIR) {
      vec low = {}, high = {};
      for (int64_t k = 0; k < K; ++k) {
        vec weight_low, weight_high;
        load_pair(weight + k * N + n, weight_low, weight_high);
        const float factor = x[k];
        low += weight_low * factor, high += weight_high * factor;
      }
      store_pair(out + n, low, high);
    }
  }

  Step& s;
  int64_t left_size = 0;
  Left* left;
};

}  // namespace snapstream
