// Products of few rows with weights. Decode on a CPU is bound by memory: a step reads every weight once, for all rows.
// The result of a row depends only on that row, bit for bit: sums run in the same order whatever the other rows are.
#pragma once
#include <optional>

#include "tiles.h"

namespace snapstream {

constexpr int64_t ROWS_AT_ONCE = 8;  // rows of x that a weight is multiplied by while it is in a register

// ROWS weights times M rows of x [M][K]: out[m * stride + r].
template <typename A, int M, int ROWS>
inline void multiply_block(const typename A::Left::Number* x, const typename A::Number* weight, int64_t K, float* out,
                           int64_t stride) {
  static_assert(M * ROWS <= LANES);
  vec total[LANES] = {};
  for (int64_t k = 0; k < K; k += PAIR) {
    typename A::Right w[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      w[r].read(weight + r * K + k);
      // Rows are too short for the hardware prefetcher. The second-level cache takes more requests at once.
      __builtin_prefetch(reinterpret_cast<const char*>(weight + r * K + k) + AHEAD_BYTES, 0, 2);
    }
    UNROLL for (int m = 0; m < M; ++m) {
      typename A::Left left;
      left.read(x + m * K + k);
      left.hold();
      UNROLL for (int r = 0; r < ROWS; ++r) add_product(total[m * ROWS + r], w[r], left);
    }
  }
  const vec all = sums(total);
  UNROLL for (int m = 0; m < M; ++m) {
    UNROLL for (int r = 0; r < ROWS; ++r) out[m * stride + r] = all[m * ROWS + r];
  }
}

template <typename A, int M>
inline void multiply_group(const typename A::Left::Number* x, const typename A::Number* weight, int64_t K, int64_t count,
                           float* out, int64_t stride) {
  constexpr int ROWS = MANY_REGISTERS ? (M <= 1 ? 8 : M <= 4 ? 4 : 2) : (M <= 1 ? 8 : M <= 2 ? 4 : M <= 4 ? 1 : 2);
  int64_t n = 0;
  for (; n + ROWS <= count; n += ROWS) multiply_block<A, M, ROWS>(x, weight + n * K, K, out + n, stride);
  for (; n < count; ++n) multiply_block<A, M, 1>(x, weight + n * K, K, out + n, stride);
}

// `count` weights [count][K] times M rows of x [M][K], at most ROWS_AT_ONCE: out[m * stride + n].
template <typename A>
inline void multiply(const typename A::Left::Number* x, int64_t M, const typename A::Number* weight, int64_t K,
                     int64_t count, float* out, int64_t stride) {
  switch (M) {
    case 1: return multiply_group<A, 1>(x, weight, K, count, out, stride);
    case 2: return multiply_group<A, 2>(x, weight, K, count, out, stride);
    case 3: return multiply_group<A, 3>(x, weight, K, count, out, stride);
    case 4: return multiply_group<A, 4>(x, weight, K, count, out, stride);
    case 5: return multiply_group<A, 5>(x, weight, K, count, out, stride);
    case 6: return multiply_group<A, 6>(x, weight, K, count, out, stride);
    case 7: return multiply_group<A, 7>(x, weight, K, count, out, stride);
    default: return multiply_group<A, 8>(x, weight, K, count, out, stride);
  }
}

// Products of few rows in vectors.
template <typename A>
struct VectorProduct {
  using Number = typename A::Number;      // of weights
  using Left = typename A::Left::Number;  // of packed rows

  template <typename T>
  static void pack(const T* row, int64_t columns, int64_t m, Left* packed) {
    A::prepare(row, columns, packed + m * columns);
  }

  static void multiply(const Left* packed, int64_t M, const Number* weight, int64_t columns, int64_t count, float* out,
                       int64_t stride) {
    for (int64_t m = 0; m < M; m += ROWS_AT_ONCE)
      snapstream::multiply<A>(packed + m * columns, std::min(ROWS_AT_ONCE, M - m), weight, columns, count, out + m * stride, stride);
  }
};

// Up to so many rows, vectors are as fast as memory; from then on, tile registers are faster.
constexpr int64_t ROWS_OF_VECTORS = 4;

// Rows of a tile in a program; 0: products are those of vectors. Tiles add up in another order, so the choice depends neither
// on how many slots are active nor on how many tokens a step reads, but on how many tokens there is room for.
inline int64_t rows_of_tiles(const Program& p) {
  if (p.instructions != TILES || p.room <= ROWS_OF_VECTORS) return 0;
  return p.room <= ROWS_AT_ONCE ? ROWS_AT_ONCE : LANES;
}

// Calls function(the way to multiply rows of type T with weights of a type).
template <typename T, typename Function>
inline auto with_product(int64_t type, int64_t instructions, int64_t tile_rows, const Function& function) {
#if defined(SNAPSTREAM_TILES)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (type != FLOAT32 && tile_rows == ROWS_AT_ONCE) return function(TileProduct<ROWS_AT_ONCE>());
    if (type != FLOAT32 && tile_rows == LANES) return function(TileProduct<LANES>());
  }
#endif
  return with_arithmetic<T>(type, instructions, [&](auto a) { return function(VectorProduct<decltype(a)>()); });
}

// Held while a thread multiplies few rows; tile_rows may be 0.
struct ProductSession {
#if defined(SNAPSTREAM_TILES)
  explicit ProductSession(int64_t tile_rows) {
    if (tile_rows == ROWS_AT_ONCE) tiles.emplace(TileProduct<ROWS_AT_ONCE>::configuration());
    if (tile_rows == LANES) tiles.emplace(TileProduct<LANES>::configuration());
  }

  std::optional<TileSession> tiles;
#else
  explicit ProductSession(int64_t) {}
#endif
};

}  // namespace snapstream
