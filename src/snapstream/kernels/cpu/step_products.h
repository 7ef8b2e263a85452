// Matrix products of a step: all rows by weights, each of which is read once.
#pragma once
#include "products.h"
#include "step_rows.h"

namespace snapstream {

constexpr int64_t UNIT = 16;  // weights per unit of work
static_assert(UNIT == LANES);

inline int64_t units_of(int64_t weights) { return (weights + UNIT - 1) / UNIT; }

// Products of activations of type T.
template <typename T>
class ProductOperations {
 public:
  ProductOperations(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    const auto needed = [](const auto& o) -> int64_t {
      if constexpr (requires { o.weight.columns; }) return ROWS_AT_ONCE * o.source.size;
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) left_size = std::max(left_size, visit(s.p.operations[i], needed));
    left = scratch.reserve<float>(threads * left_size);
  }

  // Gathers a head of M rows, numbered row_at(m), in the form in which they are multiplied.
  template <typename A, typename RowAt>
  const typename A::Left::Number* gather(const Part& source, int64_t head, int64_t M, int64_t thread, const RowAt& row_at) {
    auto* to = reinterpret_cast<typename A::Left::Number*>(left + thread * left_size);
    for (int64_t m = 0; m < M; ++m) A::prepare(at<T>(source, row_at(m), head), source.size, to + m * source.size);
    return to;
  }

  // Multiplies M rows by units begin .. end of a matrix; finish(m, n, count, sums) gets the sums of each unit, from row n
  // of the matrix on.
  template <typename A, typename Finish>
  void multiply_units(const typename A::Left::Number* x, int64_t M, const Weight& weight, int64_t matrix, int64_t begin,
                      int64_t end, const Finish& finish) {
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, weight.rows); n += UNIT) {
      alignas(64) float sums[ROWS_AT_ONCE * UNIT];
      const int64_t count = std::min(UNIT, weight.rows - n);
      multiply<A>(x, M, row_of<typename A::Number>(weight, matrix, n), weight.columns, count, sums, UNIT);
      for (int64_t m = 0; m < M; ++m) finish(m, n, count, sums + m * UNIT);
    }
  }

  // The first half of a matrix are gates, the second half ups.
  template <typename A, typename Target>
  void gate_units(const typename A::Left::Number* x, int64_t M, const Weight& weight, int64_t matrix, const Vector& bias,
                  int64_t begin, int64_t end, const Target& target) {
    const int64_t inner = weight.rows / 2;
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, inner); n += UNIT) {
      const int64_t count = std::min(UNIT, inner - n);
      alignas(64) float gates[ROWS_AT_ONCE * UNIT], ups[ROWS_AT_ONCE * UNIT];
      multiply<A>(x, M, row_of<typename A::Number>(weight, matrix, n), weight.columns, count, gates, UNIT);
      multiply<A>(x, M, row_of<typename A::Number>(weight, matrix, inner + n), weight.columns, count, ups, UNIT);
      for (int64_t m = 0; m < M; ++m) {
        vec a = load(gates + m * UNIT), b = load(ups + m * UNIT);
        if (bias.data != nullptr) a += some(bias, n, count), b += some(bias, inner + n, count);
        put(target(m) + n, silu(a) * b, count);
      }
    }
  }

  void run(const Product& o, int64_t begin, int64_t end, int64_t thread) {
    with_arithmetic<T>(o.weight.type, s.p.instructions, [&](auto a) {
      using A = decltype(a);
      each_group<A>(o.source, 0, thread, [&](const auto* x, int64_t M, const int64_t* rows) {
        multiply_units<A>(x, M, o.weight, 0, begin, end, [&](int64_t m, int64_t n, int64_t count, const float* sums) {
          finish(o, rows[m], n, count, sums);
        });
      });
    });
  }

  void run(const GatedProduct& o, int64_t begin, int64_t end, int64_t thread) {
    with_arithmetic<T>(o.weight.type, s.p.instructions, [&](auto a) {
      using A = decltype(a);
      each_group<A>(o.source, 0, thread, [&](const auto* x, int64_t M, const int64_t* rows) {
        gate_units<A>(x, M, o.weight, 0, o.bias, begin, end, [&](int64_t m) { return at<T>(o.target, rows[m]); });
      });
    });
  }

  // Multiplies each head of a row by its own matrix: [out, in], or [in, out] if it is transposed.
  void run(const HeadProduct& o, int64_t begin, int64_t end, int64_t thread) {
    with_arithmetic<T>(o.weight.type, s.p.instructions, [&](auto a) {
      using A = decltype(a);
      for (int64_t head = begin; head < end; ++head) {
        if (o.transposed) {
          const auto* weight = row_of<typename A::Number>(o.weight, head, 0);
          for (const int64_t row : s.rows)
            multiply_transposed(at<T>(o.source, row, head), weight, o.source.size, o.target.size, at<T>(o.target, row, head));
          continue;
        }
        each_group<A>(o.source, head, thread, [&](const auto* x, int64_t M, const int64_t* rows) {
          multiply_units<A>(x, M, o.weight, head, 0, units_of(o.weight.rows),
                            [&](int64_t m, int64_t n, int64_t count, const float* sums) {
                              put(at<T>(o.target, rows[m], head) + n, load(sums), count);
                            });
        });
      }
    });
  }

 private:
  // Writes the sums of `count` rows of a matrix from n on, at most UNIT, to a row of the target.
  void finish(const Product& o, int64_t row, int64_t n, int64_t count, const float* sums) {
    const vec y = o.bias.data != nullptr ? load(sums) + some(o.bias, n, count) : load(sums);
    if (o.target.type == FLOAT32) return finish(at<float>(o.target, row) + n, o.rounded ? rounded<T>(y) : y, o.add, count);
    finish(at<T>(o.target, row) + n, o.add ? rounded<T>(y) : y, o.add, count);
  }

  template <typename N>
  static void finish(N* target, vec y, bool add, int64_t count) {
    put(target, add ? some(target, count) + y : y, count);
  }

  // Calls function(x, M, rows) for a head of the step's rows, in groups of a few rows gathered in x.
  template <typename A, typename Function>
  void each_group(const Part& source, int64_t head, int64_t thread, const Function& function) {
    for (int64_t from = 0; from < s.row_count(); from += ROWS_AT_ONCE) {
      const int64_t M = std::min(ROWS_AT_ONCE, s.row_count() - from), *rows = s.rows.data() + from;
      function(gather<A>(source, head, M, thread, [&](int64_t m) { return rows[m]; }), M, rows);
    }
  }

  // One row times a matrix [K, N].
  template <typename N>
  static void multiply_transposed(const T* x, const N* weight, int64_t rows, int64_t columns, T* out) {
    for (int64_t n = 0; n < columns; n += PAIR) {
      vec low = {}, high = {};
      for (int64_t k = 0; k < rows; ++k) {
        vec weight_low, weight_high;
        load_pair(weight + k * columns + n, weight_low, weight_high);
        const float factor = x[k];
        low += weight_low * factor, high += weight_high * factor;
      }
      store_pair_from<N>(out + n, low, high);
    }
  }

  Step& s;
  int64_t left_size = 0;
  float* left;  // per thread: rows in the form in which they are multiplied, which takes no more than float
};

}  // namespace snapstream
