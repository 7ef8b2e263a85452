// Matrix products of a step: all rows by weights, each of which is read once.
#pragma once
#include <utility>

#include "block_products.h"
#include "products.h"
#include "step_rows.h"

namespace snapstream {

constexpr int64_t UNIT = 16;  // weights per unit of work
static_assert(UNIT == LANES && ROWS_AT_ONCE == BLOCK_ROWS);
constexpr int64_t MOST_TOGETHER = LANES;  // rows whose sums are computed at once
constexpr int64_t MOST_GATHERED = 32;  // rows by which a weight is multiplied before the next one is read

inline int64_t units_of(int64_t weights) { return (weights + UNIT - 1) / UNIT; }

// Rows in the forms in which weights multiply them.
struct Gathered {
  const float* numbers;  // of dense weights
  const char* rounded;   // of weights in blocks
  int64_t size, count;
};

// Products of activations of type T.
template <typename T>
class ProductOperations {
 public:
  ProductOperations(Step& step, int64_t threads, Scratch& scratch)
      : s(step), tile_rows(rows_of_tiles(step.p)), together(std::max(tile_rows, ROWS_AT_ONCE)), last(threads) {
    int64_t dense = 0, blocks = 0;  // columns of the widest weights
    const auto needs = [&](const auto& o) {
      if constexpr (requires { o.weight.columns; }) {
        for (const Weight* part = &o.weight; part != nullptr; part = static_cast<const Weight*>(part->more)) {
          int64_t& columns = in_blocks(part->type) ? blocks : dense;
          columns = std::max(columns, part->columns);
        }
      }
      return 0;
    };
    if (s.p.many) return;  // see step_prompt.h
    most = std::min(MOST_GATHERED, s.row_limit);
    for (int64_t i = 0; i < s.p.count; ++i) {
      visit(s.p.operations[i], needs);
      if (s.p.operations[i].kind == Kind::ExpertProduct) most = std::max(most, ROWS_AT_ONCE);  // several rows per token
    }
    left_size = std::max(most, (most + tile_rows) / 2) * dense;  // tiles have room for more rows, but of two bytes
    rounded_size = blocks ? most * Rounded::bytes(blocks) : 0;
    left = scratch.reserve<float>(threads * left_size);
    rounded = scratch.reserve<char>(threads * rounded_size);
  }

  // The most rows that are gathered at once.
  int64_t most = 0;

  // Gathers a head of M rows, numbered row_at(m), in the forms in which a weight multiplies them.
  template <typename RowAt>
  Gathered gather(const Weight& weight, const BufferView& source, int64_t head, int64_t M, int64_t thread, const RowAt& row_at) {
    const int64_t size = source.size;
    float* numbers = left + thread * left_size;
    char* bytes = rounded + thread * rounded_size;
    bool dense = false, blocks = false;
    for (const Weight* part = &weight; part != nullptr; part = static_cast<const Weight*>(part->more)) {
      bool& done = in_blocks(part->type) ? blocks : dense;
      if (std::exchange(done, true)) continue;
      if (in_blocks(part->type)) {
        for (int64_t m = 0; m < M; ++m)
          round_row(at<T>(source, row_at(m), head), size, rounded_row(bytes, Rounded::bytes(size), m));
      } else {
        with_product<T>(part->type, s.p.instructions, tile_rows, [&](auto way) {
          auto* packed = reinterpret_cast<typename decltype(way)::Left*>(numbers);
          for (int64_t m = 0; m < M; ++m) way.pack(at<T>(source, row_at(m), head), size, m, packed);
        });
      }
    }
    last[thread] = {};
    return {numbers, bytes, size, M};
  }

  // Multiplies rows by units begin .. end of a matrix; finish(m, n, count, sums) gets the sums of each unit, from row n of
  // the matrix on.
  template <typename Finish>
  void multiply_units(const Gathered& x, const Weight& weight, int64_t matrix, int64_t begin, int64_t end,
                      const Finish& finish) {
    const int64_t rows = all_rows(weight);
    const ProductSession session(tiles_of(weight));
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, rows); n += UNIT) {
      const int64_t count = std::min(UNIT, rows - n);
      for (int64_t first = 0; first < x.count; first += together) {
        alignas(64) float sums[MOST_TOGETHER * UNIT];
        const int64_t M = std::min(together, x.count - first);
        multiply_unit(x, first, M, weight, matrix, n, count, sums);
        for (int64_t m = 0; m < M; ++m) finish(first + m, n, count, sums + m * UNIT);
      }
    }
  }

  // The first rows of a matrix are gates, the others ups; so are the numbers of its bias.
  template <typename O, typename RowAt>
  void gate_units(const O& o, const Gathered& x, int64_t matrix, int64_t begin, int64_t end, const RowAt& row_at) {
    const int64_t inner = o.target.size;
    const ProductSession session(tiles_of(o.weight));
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, inner); n += UNIT) {
      const int64_t count = std::min(UNIT, inner - n);
      for (int64_t first = 0; first < x.count; first += together) {
        alignas(64) float gates[MOST_TOGETHER * UNIT], ups[MOST_TOGETHER * UNIT];
        const int64_t M = std::min(together, x.count - first);
        multiply_unit(x, first, M, o.weight, matrix, n, count, gates);
        multiply_unit(x, first, M, o.weight, matrix, inner + n, count, ups);
        for (int64_t m = 0; m < M; ++m) gate(o, matrix, row_at(first + m), n, count, gates + m * UNIT, ups + m * UNIT);
      }
    }
  }

  void run(const Product& o, int64_t begin, int64_t end, int64_t thread) {
    each_group(o.weight, o.source, 0, thread, [&](const Gathered& x, const int64_t* rows) {
      multiply_units(x, o.weight, 0, begin, end, [&](int64_t m, int64_t n, int64_t count, const float* sums) {
        finish(o, 0, rows[m], n, count, sums);
      });
    });
  }

  void run(const GatedProduct& o, int64_t begin, int64_t end, int64_t thread) {
    each_group(o.weight, o.source, 0, thread, [&](const Gathered& x, const int64_t* rows) {
      gate_units(o, x, 0, begin, end, [&](int64_t m) { return rows[m]; });
    });
  }

  // Multiplies each head of a row by its own matrix: [out, in], or [in, out] if it is transposed.
  void run(const HeadProduct& o, int64_t begin, int64_t end, int64_t thread) {
    for (int64_t head = begin; head < end; ++head) {
      if (o.transposed) {
        with_type(o.weight.type, [&](auto number) {
          const auto* weight = row_of<decltype(number)>(o.weight, head, 0);
          for (const int64_t row : s.rows)
            multiply_transposed(at<T>(o.source, row, head), weight, o.source.size, o.target.size, at<T>(o.target, row, head));
        });
        continue;
      }
      each_group(o.weight, o.source, head, thread, [&](const Gathered& x, const int64_t* rows) {
        multiply_units(x, o.weight, head, 0, units_of(o.weight.rows),
                       [&](int64_t m, int64_t n, int64_t count, const float* sums) {
                         finish(o, head, rows[m], n, count, sums);
                       });
      });
    }
  }

  // Writes the sums of `count` rows of a matrix from n on, at most UNIT, to a row of the target.
  void finish(const Product& o, int64_t, int64_t row, int64_t n, int64_t count, const float* sums) {
    vec y = o.bias.data != nullptr ? load(sums) + some(o.bias, n, count) : load(sums);
    if (o.rounded) y = snapstream::rounded<T>(y);
    y *= static_cast<float>(o.factor);
    if (o.target.type == FLOAT32) {
      return finish(at<float>(o.target, row) + n, o.rounded ? snapstream::rounded<T>(y) : y, o.add, count);
    }
    finish(at<T>(o.target, row) + n, o.add ? snapstream::rounded<T>(y) : y, o.add, count);
  }

  void finish(const HeadProduct& o, int64_t head, int64_t row, int64_t n, int64_t count, const float* sums) {
    put(at<T>(o.target, row, head) + n, load(sums), count);
  }

  void finish(const ExpertProduct& o, int64_t expert, int64_t row, int64_t n, int64_t count, const float* sums) {
    vec y = load(sums);
    if (o.bias.data != nullptr) y += some(o.bias, expert * o.target.size + n, count);
    put(at<T>(o.target, row) + n, y, count);
  }

  // The same with sums of gates and of what they let through.
  template <typename O>
  void gate(const O& o, int64_t matrix, int64_t row, int64_t n, int64_t count, const float* gates, const float* ups) {
    const int64_t inner = o.target.size, biases = 2 * matrix * inner;
    vec a = load(gates), b = load(ups);
    if (o.bias.data != nullptr) a += some(o.bias, biases + n, count), b += some(o.bias, biases + inner + n, count);
    put(at<T>(o.target, row) + n, gated(a, b, o.activation), count);
  }

 private:
  // M rows, from `first` on, by `count` weights from row n of a matrix on: sums[m * UNIT + i].
  void multiply_unit(const Gathered& x, int64_t first, int64_t M, const Weight& weight, int64_t matrix, int64_t n,
                     int64_t count, float* sums) const {
    const Weight& part = part_of(weight, n);
    if (in_blocks(part.type)) {
      const int64_t step = Rounded::bytes(x.size);
      for (int64_t m = 0; m < M; m += BLOCK_ROWS) {
        multiply_blocks(part.type, x.rounded + (first + m) * step, step, std::min(BLOCK_ROWS, M - m), tile_of(part, matrix, n),
                        x.size, sums + m * UNIT, UNIT);
      }
      return;
    }
    with_product<T>(part.type, s.p.instructions, tile_rows, [&](auto way) {
      const auto* packed = reinterpret_cast<const typename decltype(way)::Left*>(x.numbers) + first * x.size;
      const auto* rows = row_of<typename decltype(way)::Number>(part, matrix, n);
      way.multiply(packed, M, rows, x.size, count, sums, UNIT);
    });
  }

  // Rows of the tiles that multiply parts of a weight; 0 if none do.
  int64_t tiles_of(const Weight& weight) const {
    for (const Weight* part = &weight; part != nullptr; part = static_cast<const Weight*>(part->more))
      if (part->type == BFLOAT16 && std::is_same_v<T, bfloat16>) return tile_rows;
    return 0;
  }

  template <typename N>
  static void finish(N* target, vec y, bool add, int64_t count) {
    put(target, add ? some(target, count) + y : y, count);
  }

  // Calls function(x, rows) for a head of the step's rows, gathered, in groups of many rows.
  template <typename Function>
  void each_group(const Weight& weight, const BufferView& source, int64_t head, int64_t thread, const Function& function) {
    for (int64_t from = 0; from < s.row_count(); from += most) {
      const int64_t M = std::min(most, s.row_count() - from), *rows = s.rows.data() + from;
      // A thread takes units of a phase several times.
      const Last now{s.phase, head, from};
      if (last[thread] == now) {
        function(Gathered{left + thread * left_size, rounded + thread * rounded_size, source.size, M}, rows);
        continue;
      }
      const Gathered x = gather(weight, source, head, M, thread, [&](int64_t m) { return rows[m]; });
      last[thread] = now;
      function(x, rows);
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

  // The rows that a thread gathered last: of which phase, head and group.
  struct alignas(64) Last {
    int64_t phase = -1, head = 0, from = 0;
    bool operator==(const Last&) const = default;
  };

  Step& s;
  const int64_t tile_rows;  // see rows_of_tiles()
  const int64_t together;   // rows whose sums are computed at once
  std::vector<Last> last;   // per thread
  int64_t left_size = 0, rounded_size = 0;
  float* left;     // per thread: rows in the form for dense weights, which takes no more than float
  char* rounded;  // per thread: rows in the form for blocks
};

}  // namespace snapstream
