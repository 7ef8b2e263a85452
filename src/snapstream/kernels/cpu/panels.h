// Products of many rows: weights are brought into panels, 32 of them side by side, which are then multiplied by blocks of
// 32 rows, in three ways. Matrices of numbers and the formats of blocks become the same panels. The result of a row
// depends only on that row, bit for bit: sums run in the same order whatever the other rows are.
#pragma once
#include <algorithm>

#include "block_products.h"
#include "prefill_tiles.h"
#include "step_rows.h"

namespace snapstream {

constexpr int64_t PANEL = QUERIES;  // weights side by side; the two halves of a panel may come from different matrices
constexpr int64_t HEIGHT = QUERIES;  // rows in a block
constexpr int64_t DEPTH = 256;  // columns that are multiplied at once: rows of a block and a panel stay in the cache
constexpr int64_t LINE = 64;    // bytes of a line of the cache

// ---- float32 on any processor: rows [depth], panels [depth][PANEL] ----

struct FloatForm {
  using Number = float;  // of rows
  using Operand = float;
  static constexpr int64_t PER_OPERAND = 1;
  struct Session {};  // held while a thread computes

  // Of a column, or of two, of sixteen weights.
  static vec_u32 join(const vec* columns) { return (vec_u32)columns[0]; }

  // Sums of `rows` rows, `step` numbers apart, of a block that has room for HEIGHT.
  static void multiply(const float* block, int64_t step, int64_t rows, int64_t depth, const float* panel, float* sums, bool add) {
    multiply_rows(block, round_up(rows, ROWS), step, 1, panel, depth, sums, add);
  }
};

#if defined(__AVX512BF16__)
// ---- pairs of bfloat16: rows [depth / 2], panels [depth / 2][PANEL] ----

struct PairForm {
  using Number = bfloat16;
  using Operand = uint32_t;
  static constexpr int64_t PER_OPERAND = 2;
  struct Session {};

  static vec_u32 join(const vec* columns) {
    return (vec_u32)rounded<bfloat16>(columns[0]) >> 16 | (vec_u32)rounded<bfloat16>(columns[1]);
  }

  static void multiply(const bfloat16* block, int64_t step, int64_t rows, int64_t depth, const uint32_t* panel, float* sums,
                       bool add) {
    multiply_rows(reinterpret_cast<const uint32_t*>(block), round_up(rows, ROWS), step / 2, 1, panel, depth / 2, sums, add);
  }
};
#endif

#if defined(SNAPSTREAM_TILES)
// ---- tile registers; everything else is as for pairs ----

struct TileForm : PairForm {
  using Session = TileSession;

  static void multiply(const bfloat16* block, int64_t step, int64_t, int64_t depth, const uint32_t* panel, float* sums,
                       bool add) {
    add ? load_tiles(sums) : clear_tiles();
    const int64_t bytes = step * static_cast<int64_t>(sizeof(bfloat16));
    for (int64_t k = 0; k < depth; k += PAIR) multiply_tiles(block + k, block + LANES * step + k, bytes, panel + k / 2 * PANEL);
    store_tiles(sums);
  }
};
#endif

// Calls function(N()) with the type of a matrix of numbers, which for pairs is bfloat16.
template <typename Form, typename Function>
inline auto with_numbers(int64_t type, const Function& function) {
  if constexpr (Form::PER_OPERAND == 2) return function(bfloat16());
  else return with_type(type, function);
}

// Brings columns begin .. end of `count` rows of a weight, at most sixteen from row n on, into half a panel.
template <typename Form>
inline void pack_weights(const Weight& weight, int64_t matrix, int64_t n, int64_t count, int64_t begin, int64_t end,
                         typename Form::Operand* to) {
  constexpr int64_t PER = Form::PER_OPERAND;
  if (in_blocks(weight.type)) {
    read_blocks(weight.type, tile_of(weight, matrix, n), begin, end, [&](int64_t column, const float (*values)[LANES]) {
      for (int64_t i = 0; i < PART; i += PER) {
        const vec columns[2] = {load(values[i]), load(values[i + PER - 1])};
        store_u32(to + (column - begin + i) / PER * PANEL, Form::join(columns));
      }
    });
    return;
  }
  with_numbers<Form>(weight.type, [&](auto number) {
    using N = decltype(number);
    // Rows that do not exist are copies of the last one, whose products nobody reads.
    const N* rows[LANES];
    for (int64_t i = 0; i < LANES; ++i) rows[i] = row_of<N>(weight, matrix, n + std::min(i, count - 1));
    for (int64_t k = begin; k < end; k += LANES * PER) {
      vec_u32 operands[LANES];
      if constexpr (sizeof(N) * PER == sizeof(float)) {
        const void* from[LANES];
        for (int64_t i = 0; i < LANES; ++i) from[i] = rows[i] + k;
        load_transposed(from, operands);
      } else {
        for (int64_t i = 0; i < LANES; ++i) operands[i] = (vec_u32)load_numbers(rows[i] + k);
        transpose(operands);
      }
      for (int64_t i = 0; i < LANES; ++i) store_u32(to + ((k - begin) / PER + i) * PANEL, operands[i]);
    }
  });
}

// Asks for a sixteenth of what pack_weights() will read: rows are too short for the hardware prefetcher.
inline void prefetch_weights(const Weight& weight, int64_t matrix, int64_t n, int64_t begin, int64_t end, int64_t sixteenth) {
  const auto ask = [](const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
  };
  if (in_blocks(weight.type)) {
    with_format(weight.type, [&](auto* format) {
      using F = std::remove_pointer_t<decltype(format)>;
      const int64_t bytes = (end - begin) / F::BLOCK * F::BYTES;
      ask(tile_of(weight, matrix, n) + begin / F::BLOCK * LANES * F::BYTES + sixteenth * bytes, bytes);
    });
  } else {
    with_type(weight.type, [&](auto number) {
      using N = decltype(number);
      ask(row_of<N>(weight, matrix, n + sixteenth) + begin, (end - begin) * static_cast<int64_t>(sizeof(N)));
    });
  }
}

// What pack_weights() does, for a matrix [columns, rows]. From column `size` on, there is none: zeros.
template <typename Form>
inline void pack_transposed(const Weight& weight, int64_t matrix, int64_t n, int64_t count, int64_t begin, int64_t end,
                            int64_t size, typename Form::Operand* to) {
  constexpr int64_t PER = Form::PER_OPERAND;
  with_numbers<Form>(weight.type, [&](auto number) {
    using N = decltype(number);
    for (int64_t k = begin; k < end; k += PER) {
      vec columns[2] = {};
      for (int64_t i = 0; i < std::min(PER, size - k); ++i) columns[i] = some(row_of<N>(weight, matrix, k + i) + n, count);
      store_u32(to + (k - begin) / PER * PANEL, Form::join(columns));
    }
  });
}

// Whether `count` rows of `size` numbers, `step` apart, are multiplied where they are. A block that is not full must be
// copied, and so must rows of odd sizes, or that would compete for the same lines of the cache.
template <typename Form, typename T>
inline bool stays(int64_t count, int64_t size, int64_t step) {
  const bool whole = count == HEIGHT && size % PAIR == 0 && step % Form::PER_OPERAND == 0;
  return std::is_same_v<typename Form::Number, T> && whole && step * sizeof(T) % (32 * LINE) != 0;
}

constexpr int64_t SPARE = PAIR;  // after each copied row: for an odd size, and so that copies do not compete, either

// Copies up to HEIGHT rows of `size` numbers, to [HEIGHT][size + SPARE]; the rest is zero.
template <typename Form, typename T, typename RowAt>
inline void copy_rows(int64_t count, int64_t size, typename Form::Number* to, const RowAt& row_at) {
  for (int64_t row = 0; row < HEIGHT; ++row, to += size + SPARE) {
    const int64_t given = row < count ? size : 0;
    if (given) convert(row_at(row), size, to);
    std::fill_n(to + given, size + SPARE - given, typename Form::Number());
  }
}

}  // namespace snapstream
