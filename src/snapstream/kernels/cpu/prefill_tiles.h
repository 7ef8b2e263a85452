// The arithmetic of prefill attention on one tile: BLOCK keys by QUERIES queries, in three ways.
//
// Scores are kept transposed, S[key][query]: a vector holds one key's scores for 16 queries. Maxima, sums and
// exponentials therefore run down the vectors and never across them, and rows of keys are read directly from the cache.
// Only queries (once per task) and, for products of pairs, values (once per layer) have to be packed:
//
//    scores   S[key][query]   = sum over pairs of elements  K[key][pair]         * Q[pair][query]
//    weights  P[pair][query]  = two keys' exp(S - maximum), rounded to bfloat16, side by side
//    outputs  O[column][query] += sum over pairs of keys    V[column][pair]      * P[pair][query]
#pragma once
#include "tiles.h"

namespace snapstream {

constexpr int64_t BLOCK = 64;   // keys per tile; blocks begin at its multiples, whatever a chunk's start
constexpr int64_t QUERIES = 32;  // rows of queries per tile

constexpr int COLUMNS = QUERIES / LANES;

#if defined(__AVX512F__)
constexpr int ROWS = 8;  // ROWS * COLUMNS accumulators and COLUMNS operands stay in registers
#else
constexpr int ROWS = 4;
#endif

// Transposes up to BLOCK rows of bfloat16 values, `columns` elements each, to packed[column][BLOCK]; zeros past `rows`.
inline void pack_values(const bfloat16* values, int64_t stride, int64_t rows, int64_t columns,
                        bfloat16* packed) {
  for (int64_t row = 0; row < BLOCK; row += PAIR) {
    for (int64_t column = 0; column < columns; column += LANES) {
      vec_u32 pairs[LANES];
      for (int i = 0; i < LANES; ++i) {
        const int64_t at = row + 2 * i;
        pairs[i] = at < rows ? load_16_bits(values + at * stride + column) : vec_u32{};
        if (at + 1 < rows) pairs[i] |= load_16_bits(values + (at + 1) * stride + column) << 16;
      }
      transpose(pairs);
      for (int i = 0; i < LANES; ++i) store_u32(packed + (column + i) * BLOCK + row, pairs[i]);
    }
  }
}

// out[row][query] (+)= sum over depth of a[row][depth] * b[depth][query] for ROWS rows and COLS vectors of queries.
template <int COLS>
inline void multiply(const float* a, int64_t row_stride, int64_t depth_stride, const float* b, int64_t depth,
                     float* out, bool add) {
  vec total[ROWS][COLS] = {};
  for (int64_t d = 0; d < depth; ++d) {
    vec right[COLS];
    UNROLL for (int c = 0; c < COLS; ++c) {
      right[c] = load(b + d * QUERIES + c * LANES);
      pin(right[c]);
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float left = a[r * row_stride + d * depth_stride];
      UNROLL for (int c = 0; c < COLS; ++c) total[r][c] += right[c] * left;
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int c = 0; c < COLS; ++c) {
      float* to = out + r * QUERIES + c * LANES;
      store(to, add ? load(to) + total[r][c] : total[r][c]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same for operands that are pairs of bfloat16.
template <int COLS>
inline void multiply(const uint32_t* a, int64_t row_stride, int64_t depth_stride, const uint32_t* b, int64_t depth,
                     float* out, bool add) {
  __m512 total[ROWS][COLS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int c = 0; c < COLS; ++c) total[r][c] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < depth; ++d) {
    __m512i right[COLS];
    UNROLL for (int c = 0; c < COLS; ++c) right[c] = _mm512_loadu_si512(b + d * QUERIES + c * LANES);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const __m512i left = _mm512_set1_epi32(static_cast<int>(a[r * row_stride + d * depth_stride]));
      UNROLL for (int c = 0; c < COLS; ++c)
        total[r][c] = _mm512_dpbf16_ps(total[r][c], (__m512bh)left, (__m512bh)right[c]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int c = 0; c < COLS; ++c) {
      float* to = out + r * QUERIES + c * LANES;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), total[r][c]) : total[r][c]);
    }
  }
}
#endif

// All rows (a multiple of ROWS) of a tile.
template <typename E>
inline void multiply_rows(const E* a, int64_t rows, int64_t row_stride, int64_t depth_stride, const E* b, int64_t depth,
                          float* out, bool add) {
#if defined(__AVX512F__)
  for (int64_t r = 0; r < rows; r += ROWS)
    multiply<COLUMNS>(a + r * row_stride, row_stride, depth_stride, b, depth, out + r * QUERIES, add);
#else
  for (int64_t r = 0; r < rows; r += ROWS)
    for (int64_t c = 0; c < QUERIES; c += LANES)
      multiply<1>(a + r * row_stride, row_stride, depth_stride, b + c, depth, out + r * QUERIES + c, add);
#endif
}

#if defined(SNAPSTREAM_TILES)
// Two by two tiles share their operands.
constexpr int64_t QUERY_BYTES = QUERIES * sizeof(float);  // of a row of packed queries, weights, scores or outputs

// Multiplies 32 x 32 elements, with rows `bytes` apart, by 32 packed rows; adds to the 32 x 32 sums in tiles 0 to 3.
inline void multiply_tiles(const bfloat16* upper, const bfloat16* lower, int64_t bytes, const uint32_t* right) {
  _tile_loadd(4, upper, bytes);
  _tile_loadd(6, right, QUERY_BYTES);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, right + LANES, QUERY_BYTES);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, lower, bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

inline void store_tiles(float* out) {
  _tile_stored(0, out, QUERY_BYTES);
  _tile_stored(1, out + LANES, QUERY_BYTES);
  _tile_stored(2, out + LANES * QUERIES, QUERY_BYTES);
  _tile_stored(3, out + LANES * QUERIES + LANES, QUERY_BYTES);
}

inline void load_tiles(const float* sums) {
  _tile_loadd(0, sums, QUERY_BYTES);
  _tile_loadd(1, sums + LANES, QUERY_BYTES);
  _tile_loadd(2, sums + LANES * QUERIES, QUERY_BYTES);
  _tile_loadd(3, sums + LANES * QUERIES + LANES, QUERY_BYTES);
}

// Scores of `count` keys of `size` elements, with rows `stride` elements apart; `count`, `size`: multiples of 32.
inline void score_tile(const bfloat16* keys, int64_t stride, int64_t count, int64_t size, const uint32_t* queries,
                       float* scores) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(bfloat16));
  for (int64_t key = 0; key < count; key += 2 * LANES) {
    clear_tiles();
    const bfloat16 *upper = keys + key * stride, *lower = upper + LANES * stride;
    for (int64_t d = 0; d < size; d += PAIR)
      multiply_tiles(upper + d, lower + d, bytes, queries + d / 2 * QUERIES);
    store_tiles(scores + key * QUERIES);
  }
}

// Adds the packed values of `count` keys, weighted, to `columns` columns of outputs; both are multiples of 32.
inline void add_tile(const bfloat16* packed, int64_t count, int64_t columns, const uint32_t* weights, float* out) {
  constexpr int64_t VALUE_BYTES = BLOCK * sizeof(bfloat16);
  for (int64_t column = 0; column < columns; column += 2 * LANES) {
    float* to = out + column * QUERIES;
    load_tiles(to);
    const bfloat16 *upper = packed + column * BLOCK, *lower = upper + LANES * BLOCK;
    for (int64_t key = 0; key < count; key += PAIR)
      multiply_tiles(upper + key, lower + key, VALUE_BYTES, weights + key / 2 * QUERIES);
    store_tiles(to);
  }
}
#endif

}  // namespace snapstream
