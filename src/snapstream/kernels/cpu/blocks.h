// Weights of 4 to 8 bits in blocks with common scales: the formats of GGUF files.
//
// Sixteen rows are kept together. Of each block of columns, a tile has the bytes of the sixteen rows' blocks, transposed:
// a scale of each row, another one of each row, ..., four bytes with numbers of each row, four more of each row, ....
// A vector then has a lane per row, and sums, scales and minima are vectors. See snapstream/kernels/formats.py.
#pragma once
#include "vectors.h"

namespace snapstream {

constexpr int64_t PART = 32;  // columns that have a common scale in a row of activations
constexpr int QUADS = 8;      // groups of four columns in a part

inline vec_u32 load_bits(const uint8_t* p) {
  vec_u32 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Sixteen float16.
inline vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  __m256i halves;
  std::memcpy(&halves, p, sizeof(halves));
  return (vec)_mm512_cvtph_ps(halves);
#else
  typedef uint16_t half_u16 __attribute__((vector_size(2 * LANES)));
  half_u16 halves;
  std::memcpy(&halves, p, sizeof(halves));
  const vec_u32 wide = __builtin_convertvector(halves, vec_u32), magnitude = (wide & 0x7FFFu) << 13;
  const vec finite = (vec)magnitude * 0x1p112f;  // also if subnormal
  const vec_u32 beyond = (vec_u32)(magnitude >= 0x7C00u << 13);
  return (vec)((((vec_u32)finite & ~beyond) | ((magnitude | 0x7F800000u) & beyond)) | (wide & 0x8000u) << 16);
#endif
}

// Sixteen bytes, with or without sign. Compilers convert them one by one.
template <bool SIGNED>
inline vec_i32 load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (vec_i32)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
  vec_i32 wide;
  for (int i = 0; i < LANES; ++i) wide[i] = SIGNED ? static_cast<int8_t>(p[i]) : p[i];
  return wide;
#endif
}

// The opposite, for numbers that fit.
inline void store_bytes(int8_t* p, vec_i32 v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}

// Adds products of four bytes per lane: `numbers` have no sign, of EIGHT_BITS or fewer than seven; `others` have one.
template <bool EIGHT_BITS>
inline vec_i32 dot_bytes(vec_i32 total, vec_u32 numbers, vec_u32 others) {
#if defined(__AVX512VNNI__)
  return (vec_i32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)numbers, (__m512i)others);
#elif defined(__AVX512BW__)
  const __m512i ones = _mm512_set1_epi16(1);
  const auto add = [&](vec_u32 some) {  // pairs of at most 7 bits times 7 bits fit 16 bits
    total += (vec_i32)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)some, (__m512i)others), ones);
  };
  if (EIGHT_BITS) {
    add(numbers & 0x7F7F7F7Fu), add(numbers & 0x80808080u);
  } else {
    add(numbers);
  }
  return total;
#elif defined(__AVX2__)
  typedef int32_t half_i32 __attribute__((vector_size(2 * LANES)));
  const __m256i ones = _mm256_set1_epi16(1);
  const auto low = [](vec_u32 v) { return (__m256i)__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); };
  const auto high = [](vec_u32 v) { return (__m256i)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); };
  const auto add = [&](vec_u32 some) {
    const half_i32 a = (half_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(low(some), low(others)), ones);
    const half_i32 b = (half_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(high(some), high(others)), ones);
    total += __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  };
  if (EIGHT_BITS) {
    add(numbers & 0x7F7F7F7Fu), add(numbers & 0x80808080u);
  } else {
    add(numbers);
  }
  return total;
#else
  UNROLL for (int i = 0; i < 4; ++i) {
    const vec_i32 signed_ones = (vec_i32)(others << (24 - 8 * i)) >> 24;
    total += (vec_i32)(numbers >> 8 * i & 0xFFu) * signed_ones;
  }
  return total;
#endif
}

// The same with four bytes that all lanes have in common.
template <bool EIGHT_BITS>
inline vec_i32 dot(vec_i32 total, vec_u32 numbers, const int8_t* four) {
  uint32_t same;
  std::memcpy(&same, four, sizeof(same));
  return dot_bytes<EIGHT_BITS>(total, numbers, vec_u32{} + same);
}

// ---- The formats. A tile of BLOCK columns has LANES * BYTES bytes. read() gives the numbers of one part of it, without
// sign: four columns per vector, and in a lane those of one row. A weight is (number - OFFSET) * scale - minimum. Where
// scales are HALVED, there is one per 16 columns. ----

// Q4_0, Q4_1, Q5_0, Q5_1.
template <bool FIVE, bool MINIMUM>
struct Simple {
  static constexpr int64_t BLOCK = 32, BYTES = 18 + 2 * MINIMUM + 4 * FIVE, OFFSET = MINIMUM ? 0 : FIVE ? 16 : 8;
  static constexpr bool HALVED = false, HAS_MINIMUM = MINIMUM, EIGHT_BITS = false;
  const uint8_t* tile;
  vec factor, least;

  explicit Simple(const uint8_t* tile) : tile(tile), factor(load_halves(tile)) {
    if constexpr (MINIMUM) least = -load_halves(tile + 2 * LANES);
  }

  vec scale(int, int = 0) const { return factor; }
  vec minimum(int) const { return least; }

  void read(int, vec_u32* numbers) const {
    const uint8_t* low = tile + LANES * (BYTES - 16);
    UNROLL for (int i = 0; i < QUADS / 2; ++i) {
      const vec_u32 both = load_bits(low + 64 * i);
      numbers[i] = both & 0x0F0F0F0Fu, numbers[i + QUADS / 2] = both >> 4 & 0x0F0F0F0Fu;
    }
    if constexpr (FIVE) {  // bit i of a byte belongs to vector i
      const vec_u32 high = load_bits(low - 64);
      UNROLL for (int i = 0; i < 4; ++i) numbers[i] |= (high << (4 - i)) & 0x10101010u;
      UNROLL for (int i = 4; i < QUADS; ++i) numbers[i] |= (high >> (i - 4)) & 0x10101010u;
    }
  }
};

// Q8_0; numbers are stored plus 128.
struct Bytes {
  static constexpr int64_t BLOCK = 32, BYTES = 34, OFFSET = 128;
  static constexpr bool HALVED = false, HAS_MINIMUM = false, EIGHT_BITS = true;
  const uint8_t* tile;
  vec factor;

  explicit Bytes(const uint8_t* tile) : tile(tile), factor(load_halves(tile)) {}

  vec scale(int, int = 0) const { return factor; }
  vec minimum(int) const { return vec{}; }

  void read(int, vec_u32* numbers) const {
    UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] = load_bits(tile + 2 * LANES + 64 * i);
  }
};

// Q4_K and Q5_K: eight parts, with scales and minima of 6 bits times two factors.
template <bool FIVE>
struct Nested {
  static constexpr int64_t BLOCK = 256, BYTES = 144 + 32 * FIVE, OFFSET = 0;
  static constexpr bool HALVED = false, HAS_MINIMUM = true, EIGHT_BITS = false;
  const uint8_t* tile;
  vec scales[QUADS], minima[QUADS];

  explicit Nested(const uint8_t* tile) : tile(tile) {
    const vec factor = load_halves(tile), least = load_halves(tile + 2 * LANES);
    vec_i32 packed[12];
    UNROLL for (int i = 0; i < 12; ++i) packed[i] = load_bytes<false>(tile + 4 * LANES + i * LANES);
    UNROLL for (int i = 0; i < 4; ++i) {
      scales[i] = factor * __builtin_convertvector(packed[i] & 63, vec);
      minima[i] = least * __builtin_convertvector(packed[i + 4] & 63, vec);
      const vec_i32 both = packed[i + 8];
      scales[i + 4] = factor * __builtin_convertvector((both & 15) | (packed[i] >> 6) << 4, vec);
      minima[i + 4] = least * __builtin_convertvector(both >> 4 | (packed[i + 4] >> 6) << 4, vec);
    }
  }

  vec scale(int part, int = 0) const { return scales[part]; }
  vec minimum(int part) const { return minima[part]; }

  void read(int part, vec_u32* numbers) const {
    const uint8_t* low = tile + LANES * (BYTES - 128) + part / 2 * 512;
    const int shift = part % 2 * 4;
    UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] = load_bits(low + 64 * i) >> shift & 0x0F0F0F0Fu;
    if constexpr (FIVE) {  // bit `part` of each byte
      const uint8_t* high = tile + LANES * 16;
      UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] |= (load_bits(high + 64 * i) >> part & 0x01010101u) << 4;
    }
  }
};

// Q6_K: two halves of four parts; scales of 8 bits per 16 columns.
struct Six {
  static constexpr int64_t BLOCK = 256, BYTES = 210, OFFSET = 32;
  static constexpr bool HALVED = true, HAS_MINIMUM = false, EIGHT_BITS = false;
  const uint8_t* tile;
  vec factor;

  explicit Six(const uint8_t* tile) : tile(tile), factor(load_halves(tile + LANES * 208)) {}

  vec scale(int part, int half) const {
    return factor * __builtin_convertvector(load_bytes<true>(tile + LANES * (192 + 2 * part + half)), vec);
  }
  vec minimum(int) const { return vec{}; }

  void read(int part, vec_u32* numbers) const {
    const uint8_t *low = tile + part / 4 * 1024 + part % 2 * 512, *high = tile + 2048 + part / 4 * 512;
    const int shift = part % 4 / 2 * 4, place = part % 4 * 2;
    UNROLL for (int i = 0; i < QUADS; ++i)
      numbers[i] = (load_bits(low + 64 * i) >> shift & 0x0F0F0F0Fu) | (load_bits(high + 64 * i) >> place & 0x03030303u) << 4;
  }
};

inline bool in_blocks(int64_t type) { return type >= Q4_0; }

// Calls function(F*) with a null pointer to the format.
template <typename Function>
inline auto with_format(int64_t type, const Function& function) {
  switch (type) {
    case Q4_0: return function(static_cast<Simple<false, false>*>(nullptr));
    case Q4_1: return function(static_cast<Simple<false, true>*>(nullptr));
    case Q5_0: return function(static_cast<Simple<true, false>*>(nullptr));
    case Q5_1: return function(static_cast<Simple<true, true>*>(nullptr));
    case Q8_0: return function(static_cast<Bytes*>(nullptr));
    case Q4_K: return function(static_cast<Nested<false>*>(nullptr));
    case Q5_K: return function(static_cast<Nested<true>*>(nullptr));
    default: return function(static_cast<Six*>(nullptr));
  }
}

// The tiles of sixteen rows of a matrix, from row n on.
inline const uint8_t* tile_of(const Weight& weight, int64_t matrix, int64_t n) {
  return with_format(weight.type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    return static_cast<const uint8_t*>(weight.data) + (matrix * weight.step + n) * (weight.columns / F::BLOCK * F::BYTES);
  });
}

}  // namespace snapstream
