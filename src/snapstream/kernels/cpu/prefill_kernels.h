// Three kernels for a tile of prefill attention: for any processor, for dot products of bfloat16 pairs, and for tile
// registers. Each defines the layout of its queries, keys and values, and how scores become weights.
#pragma once
#include <algorithm>

#include "prefill_tiles.h"

namespace snapstream {

constexpr float LOWEST = -1e30f;  // below every score, but finite, so that differences are finite

// The first and the last key of a block that the rows of a vector see; the first may come before the block.
struct Seen {
  vec_i32 first, last;

  auto has(int64_t key) const {
    const auto number = static_cast<int32_t>(key);
    return (first <= number) & (last >= number);
  }
};

// Up to BLOCK keys and their values in the form in which a kernel multiplies them.
template <typename T>
struct Block {
  const T* keys;
  int64_t key_row;
  const T* values;
  int64_t value_row;
};

// ---- any processor: bfloat16 is widened block by block; weights are float32 and may overwrite scores ----

template <typename T>
struct Portable {
  using Number = T;
  using Operand = float;                     // queries [size][QUERIES], weights [keys][QUERIES]
  static constexpr int64_t PER_OPERAND = 1;  // elements per operand
  static constexpr int64_t MULTIPLE = ROWS;  // of keys per call
  static constexpr bool PACKS = false;       // whether it reads packed values

  using Tile = Block<float>;
  struct Session {};  // held while a thread computes
  static float factor(float scale) { return scale; }
  static vec shrink(vec x) { return exp_nonpositive(x); }
  static int64_t scratch(int64_t size, int64_t columns) { return BLOCK * (size + columns) * sizeof(float); }

  static Block<float> read(const Problem<T>& p, int64_t head, int64_t first, int64_t keys, void* scratch) {
    const T* key = p.keys + head * p.key_head + first * p.key_row;
    const T* value = p.values + head * p.value_head + first * p.value_row;
    if constexpr (std::is_same_v<T, float>) {
      if (first + BLOCK <= p.readable) return {key, p.key_row, value, p.value_row};
    }
    float *keys_here = static_cast<float*>(scratch), *values_here = keys_here + BLOCK * p.size;
    for (int64_t row = 0; row < BLOCK; ++row) {
      const bool given = row < keys;
      for (int64_t i = 0; i < p.size; ++i)
        keys_here[row * p.size + i] = given ? static_cast<float>(key[row * p.key_row + i]) : 0.0f;
      for (int64_t i = 0; i < p.columns; ++i)
        values_here[row * p.columns + i] = given ? static_cast<float>(value[row * p.value_row + i]) : 0.0f;
    }
    return {keys_here, p.size, values_here, p.columns};
  }

  static vec_u32 load_query(const T* p) {
    if constexpr (std::is_same_v<T, float>) return load_u32(p);
    return load_16_bits(p) << 16;
  }

  static void score(const Block<float>& block, int64_t keys, int64_t size, const float* queries, float* scores) {
    multiply_rows(block.keys, keys, block.key_row, 1, queries, size, scores, false);
  }

  static void add(const Block<float>& block, int64_t keys, int64_t columns, const float* weights, float* out) {
    multiply_rows(block.values, columns, 1, block.value_row, weights, keys, out, true);
  }

  // Weights of one vector of queries, from the scores of `keys` keys; returns their sum. Only those that are seen get
  // any: a row may see none of the first block, and then has no maximum yet.
  template <bool masked>
  static vec weigh(const float* scores, int64_t keys, vec factor, vec maximum, const Seen& seen, float* weights) {
    vec sum = {};
    for (int64_t key = 0; key < keys; ++key) {
      vec s = load(scores + key * QUERIES) * factor - maximum;
      if constexpr (masked) s = select(seen.has(key), s, vec{} + LOWEST);
      s = exp_nonpositive(s);
      store(weights + key * QUERIES, s);
      sum += s;
    }
    return sum;
  }
};

#if defined(__AVX512BF16__)
// ---- pairs of bfloat16, multiplied exactly and added in float32; maxima are in base 2 ----

// 2^x (1 + 2^-8) for x not far above 0. Dropping the lower half of the result rounds 2^x to bfloat16; the error of the
// polynomial, 7e-5, is small in comparison.
inline __m512 exp2_to_be_cut(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.07802458f), _mm512_set1_ps(0.22606721f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69583344f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992524f + 0.00390625f));
  return _mm512_scalef_ps(p, x);
}

struct Pairs {
  using Number = bfloat16;
  using Operand = uint32_t;  // queries [size / 2][QUERIES], weights [keys / 2][QUERIES]
  static constexpr int64_t PER_OPERAND = 2;
  static constexpr int64_t MULTIPLE = PAIR;
  static constexpr bool PACKS = true;

  using Tile = Block<bfloat16>;
  struct Session {};
  static float factor(float scale) { return scale * 1.44269504088896341f; }
  static vec shrink(vec x) { return exp_nonpositive(x * 0.69314718055994531f); }
  static int64_t scratch(int64_t size, int64_t) { return BLOCK * size * sizeof(bfloat16); }

  static Block<bfloat16> read(const Problem<bfloat16>& p, int64_t head, int64_t first, int64_t keys,
                                  void* scratch) {
    const bfloat16* key = p.keys + head * p.key_head + first * p.key_row;
    const bfloat16* packed = p.packed + head * p.packed_head + first * p.columns;
    if (first + round_up(keys, MULTIPLE) <= p.readable) return {key, p.key_row, packed, BLOCK};
    auto* own = static_cast<bfloat16*>(scratch);
    for (int64_t row = 0; row < BLOCK; ++row) {
      if (row < keys)
        std::memcpy(own + row * p.size, key + row * p.key_row, p.size * sizeof(bfloat16));
      else
        std::memset(own + row * p.size, 0, p.size * sizeof(bfloat16));
    }
    return {own, p.size, packed, BLOCK};
  }

  static vec_u32 load_query(const bfloat16* p) { return load_u32(p); }

  static void score(const Block<bfloat16>& block, int64_t keys, int64_t size, const uint32_t* queries,
                    float* scores) {
    multiply_rows(reinterpret_cast<const uint32_t*>(block.keys), keys, block.key_row / 2, 1, queries, size / 2, scores,
                  false);
  }

  static void add(const Block<bfloat16>& block, int64_t keys, int64_t columns, const uint32_t* weights,
                  float* out) {
    multiply_rows(reinterpret_cast<const uint32_t*>(block.values), columns, block.value_row / 2, 1, weights, keys / 2,
                  out, true);
  }

  template <bool masked>
  static vec weigh(const float* scores, int64_t keys, vec factor, vec maximum, const Seen& seen, uint32_t* weights) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 2) {
      __m512i e[2];
      UNROLL for (int i = 0; i < 2; ++i) {
        __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + (key + i) * QUERIES), (__m512)factor, (__m512)maximum);
        if constexpr (masked) {
          x = (__m512)select(seen.has(key + i), (vec)x, vec{} + LOWEST);
        }
        e[i] = _mm512_castps_si512(exp2_to_be_cut(x));
      }
      // The upper halves of both, the first key's below: (e0 >> 16) | (e1 & 0xFFFF0000).
      const __m512i pair =
          _mm512_ternarylogic_epi32(_mm512_srli_epi32(e[0], 16), e[1], _mm512_set1_epi32(0xFFFF0000), 0xF8);
      _mm512_storeu_si512(weights + key / 2 * QUERIES, pair);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)pair, ones);  // sums the rounded weights, so that they add up to one
    }
    return (vec)sum;
  }
};
#endif

#if defined(SNAPSTREAM_TILES)
// ---- tile registers; everything else is as for pairs ----

struct Tiles : Pairs {
  using Session = TileSession;

  static void score(const Block<bfloat16>& block, int64_t keys, int64_t size, const uint32_t* queries,
                    float* scores) {
    score_tile(block.keys, block.key_row, keys, size, queries, scores);
  }

  static void add(const Block<bfloat16>& block, int64_t keys, int64_t columns, const uint32_t* weights,
                  float* out) {
    add_tile(block.values, keys, columns, weights, out);
  }
};
#endif

// Packs rows of queries, at row_at(0), row_at(1) and so on, to [tile][operand][QUERIES]; the rest of the last tile is
// zero.
template <typename K, typename RowAt>
inline void pack_queries(int64_t rows, int64_t size, typename K::Operand* to, const RowAt& row_at) {
  const int64_t operands = size / K::PER_OPERAND;
  for (int64_t row = 0; row < round_up(rows, QUERIES); row += LANES) {
    typename K::Operand* tile = to + row / QUERIES * operands * QUERIES + row % QUERIES;
    for (int64_t operand = 0; operand < operands; operand += LANES) {
      vec_u32 numbers[LANES];
      for (int i = 0; i < LANES; ++i)
        numbers[i] = row + i < rows ? K::load_query(row_at(row + i) + operand * K::PER_OPERAND) : vec_u32{};
      transpose(numbers);
      for (int i = 0; i < LANES; ++i) store_u32(tile + (operand + i) * QUERIES, numbers[i]);
    }
  }
}

}  // namespace snapstream
