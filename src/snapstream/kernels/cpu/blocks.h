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

// Sixteen float16.
inline vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  const vec_u32 wide = load_16_bits(p), magnitude = (wide & 0x7FFFu) << 13;
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
#elif defined(__AVX2__)
  const auto widened = [](const uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (vec_i32::Half)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  };
  return {widened(p), widened(p + LANES / 2)};
#else
  int32_t wide[LANES];
  for (int i = 0; i < LANES; ++i) wide[i] = SIGNED ? static_cast<int8_t>(p[i]) : p[i];
  return load_as<vec_i32>(wide);
#endif
}

// The opposite, for numbers that fit.
inline void store_bytes(int8_t* p, vec_i32 v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0b11011000);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#else
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}

// Where the processor has no sums of four products of bytes, it has those of two, of 16 bits.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define SNAPSTREAM_SHORT_SUMS

// Sums of two products of `numbers`, without sign, and of `others`, with one: two sums per lane, which must fit 16 bits.
ALWAYS_INLINE inline vec_u32 short_sums(vec_u32 numbers, vec_u32 others) {
  return per_register<vec_u32>([](auto a, auto b) ALWAYS_INLINE {
#if defined(__AVX512BW__)
    return (decltype(a))_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return (decltype(a))_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
  }, numbers, others);
}

// The same of numbers that are 128 too large.
ALWAYS_INLINE inline vec_u32 short_sums_with_signs(vec_u32 numbers, vec_u32 others) {
  return per_register<vec_u32>([](auto a, auto b) ALWAYS_INLINE {
    const auto with_sign = a ^ 0x80808080u;
#if defined(__AVX512BW__)
    const __m512i opposite = _mm512_sub_epi8(_mm512_setzero_si512(), (__m512i)b);
    const __m512i other = _mm512_mask_mov_epi8((__m512i)b, _mm512_movepi8_mask((__m512i)with_sign), opposite);
    return (decltype(a))_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)with_sign), other);
#else
    const __m256i other = _mm256_sign_epi8((__m256i)b, (__m256i)with_sign);
    return (decltype(a))_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)with_sign), other);
#endif
  }, numbers, others);
}

ALWAYS_INLINE inline vec_u32 add_shorts(vec_u32 a, vec_u32 b) {
  return per_register<vec_u32>([](auto x, auto y) ALWAYS_INLINE {
    typedef uint16_t shorts __attribute__((vector_size(4 * WIDTH)));
    return (decltype(x))((shorts)x + (shorts)y);
  }, a, b);
}

// The sum of both numbers of a lane.
ALWAYS_INLINE inline vec_i32 sums_of_shorts(vec_u32 shorts) {
  return per_register<vec_i32>([](auto both) ALWAYS_INLINE {
#if defined(__AVX512BW__)
    return (Lanes<int32_t, WIDTH>)_mm512_madd_epi16((__m512i)both, _mm512_set1_epi16(1));
#else
    return (Lanes<int32_t, WIDTH>)_mm256_madd_epi16((__m256i)both, _mm256_set1_epi16(1));
#endif
  }, shorts);
}
#endif

#if !defined(__AVX2__)
// Sums of products of four bytes per lane, by numbers of 16 bits. It is called: in its many places, the compiler would need
// minutes for its code.
template <bool EIGHT_BITS>
NOT_INLINE void add_products(vec_i32& total, const vec_u32& numbers, const vec_u32& others) {
  total += per_register<vec_i32>([](auto a, auto b) ALWAYS_INLINE {
    typedef int16_t shorts __attribute__((vector_size(4 * WIDTH)));
    using Sums = Lanes<int32_t, WIDTH>;
    const auto both = [](shorts sums) ALWAYS_INLINE { return ((Sums)sums << 16 >> 16) + ((Sums)sums >> 16); };
    const shorts even = (shorts)(a & 0x00FF00FFu) * ((shorts)b << 8 >> 8), odd = (shorts)(a >> 8 & 0x00FF00FFu) * ((shorts)b >> 8);
    if constexpr (EIGHT_BITS) return both(even) + both(odd);
    else return both(even + odd);
  }, numbers, others);
}
#endif

// Adds products of four bytes per lane: `numbers` have no sign, of EIGHT_BITS or fewer than seven; `others` have one.
template <bool EIGHT_BITS>
ALWAYS_INLINE inline vec_i32 dot_bytes(vec_i32 total, vec_u32 numbers, vec_u32 others) {
#if defined(__AVX512VNNI__)
  return (vec_i32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)numbers, (__m512i)others);
#elif defined(SNAPSTREAM_SHORT_SUMS)
  if (!EIGHT_BITS) return total + sums_of_shorts(short_sums(numbers, others));
  total += sums_of_shorts(short_sums(numbers & 0x7F7F7F7Fu, others));
  return total + sums_of_shorts(short_sums(numbers & 0x80808080u, others));
#else
  add_products<EIGHT_BITS>(total, numbers, others);
  return total;
#endif
}

ALWAYS_INLINE inline vec_u32 same_four(const int8_t* four) {
  uint32_t same;
  std::memcpy(&same, four, sizeof(same));
  return vec_u32{} + same;
}

// The same with four bytes that all lanes have in common.
template <bool EIGHT_BITS>
ALWAYS_INLINE inline vec_i32 dot(vec_i32 total, vec_u32 numbers, const int8_t* four) {
  return dot_bytes<EIGHT_BITS>(total, numbers, same_four(four));
}

// ---- The formats. A tile of BLOCK columns has LANES * BYTES bytes. read() gives the numbers of one part of it, without
// sign: four columns per vector, and in a lane those of one row. A weight is (number - OFFSET) * scale - minimum. Where
// scales are HALVED, there is one per 16 columns. ----

// Q4_0, Q4_1, Q5_0, Q5_1.
template <bool FIVE, bool MINIMUM>
struct Simple {
  static constexpr int64_t BLOCK = 32, BYTES = 18 + 2 * MINIMUM + 4 * FIVE, OFFSET = MINIMUM ? 0 : FIVE ? 16 : 8;
  static constexpr bool HALVED = false, HAS_MINIMUM = MINIMUM;
  static constexpr int BITS = FIVE ? 5 : 4;
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
      const vec_u32 both = load_u32(low + 64 * i);
      numbers[i] = both & 0x0F0F0F0Fu, numbers[i + QUADS / 2] = both >> 4 & 0x0F0F0F0Fu;
    }
    if constexpr (FIVE) {  // bit i of a byte belongs to vector i
      const vec_u32 high = load_u32(low - 64);
      UNROLL for (int i = 0; i < 4; ++i) numbers[i] |= (high << (4 - i)) & 0x10101010u;
      UNROLL for (int i = 4; i < QUADS; ++i) numbers[i] |= (high >> (i - 4)) & 0x10101010u;
    }
  }
};

// Q8_0; numbers are stored plus 128.
struct Bytes {
  static constexpr int64_t BLOCK = 32, BYTES = 34, OFFSET = 128;
  static constexpr bool HALVED = false, HAS_MINIMUM = false;
  static constexpr int BITS = 8;
  const uint8_t* tile;
  vec factor;

  explicit Bytes(const uint8_t* tile) : tile(tile), factor(load_halves(tile)) {}

  vec scale(int, int = 0) const { return factor; }
  vec minimum(int) const { return vec{}; }

  void read(int, vec_u32* numbers) const {
    UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] = load_u32(tile + 2 * LANES + 64 * i);
  }
};

// Q4_K and Q5_K: eight parts, with scales and minima of 6 bits times two factors.
template <bool FIVE>
struct Nested {
  static constexpr int64_t BLOCK = 256, BYTES = 144 + 32 * FIVE, OFFSET = 0;
  static constexpr bool HALVED = false, HAS_MINIMUM = true;
  static constexpr int BITS = FIVE ? 5 : 4;
  const uint8_t* tile;
  vec scales[QUADS], minima[QUADS];

  explicit Nested(const uint8_t* tile) : tile(tile) {
    const vec factor = load_halves(tile), least = load_halves(tile + 2 * LANES);
    vec_i32 packed[12];
    UNROLL for (int i = 0; i < 12; ++i) packed[i] = load_bytes<false>(tile + 4 * LANES + i * LANES);
    UNROLL for (int i = 0; i < 4; ++i) {
      scales[i] = factor * converted<float>(packed[i] & 63);
      minima[i] = least * converted<float>(packed[i + 4] & 63);
      const vec_i32 both = packed[i + 8];
      scales[i + 4] = factor * converted<float>((both & 15) | (packed[i] >> 6) << 4);
      minima[i + 4] = least * converted<float>(both >> 4 | (packed[i + 4] >> 6) << 4);
    }
  }

  vec scale(int part, int = 0) const { return scales[part]; }
  vec minimum(int part) const { return minima[part]; }

  void read(int part, vec_u32* numbers) const {
    const uint8_t* low = tile + LANES * (BYTES - 128) + part / 2 * 512;
    const int shift = part % 2 * 4;
    UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] = load_u32(low + 64 * i) >> shift & 0x0F0F0F0Fu;
    if constexpr (FIVE) {  // bit `part` of each byte
      const uint8_t* high = tile + LANES * 16;
      UNROLL for (int i = 0; i < QUADS; ++i) numbers[i] |= (load_u32(high + 64 * i) >> part & 0x01010101u) << 4;
    }
  }
};

// Q6_K: two halves of four parts; scales of 8 bits per 16 columns.
struct Six {
  static constexpr int64_t BLOCK = 256, BYTES = 210, OFFSET = 32;
  static constexpr bool HALVED = true, HAS_MINIMUM = false;
  static constexpr int BITS = 6;
  const uint8_t* tile;
  vec factor;

  explicit Six(const uint8_t* tile) : tile(tile), factor(load_halves(tile + LANES * 208)) {}

  vec scale(int part, int half) const {
    return factor * converted<float>(load_bytes<true>(tile + LANES * (192 + 2 * part + half)));
  }
  vec minimum(int) const { return vec{}; }

  void read(int part, vec_u32* numbers) const {
    const uint8_t *low = tile + part / 4 * 1024 + part % 2 * 512, *high = tile + 2048 + part / 4 * 512;
    const int shift = part % 4 / 2 * 4, place = part % 4 * 2;
    UNROLL for (int i = 0; i < QUADS; ++i)
      numbers[i] = (load_u32(low + 64 * i) >> shift & 0x0F0F0F0Fu) | (load_u32(high + 64 * i) >> place & 0x03030303u) << 4;
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
