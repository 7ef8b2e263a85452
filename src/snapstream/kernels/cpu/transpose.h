// Transposes matrices of 32-bit elements.
#pragma once
#include "vectors.h"

namespace snapstream {

// Vectors of four parts each of four vectors: part i of v[j] becomes part j of v[i].
inline void transpose_quarters(vec_u32& a, vec_u32& b, vec_u32& c, vec_u32& d) {
  const vec_u32 even_ab = shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b);
  const vec_u32 even_cd = shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(c, d);
  const vec_u32 odd_ab = shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
  const vec_u32 odd_cd = shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(c, d);
  a = shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(even_ab, even_cd);
  b = shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(odd_ab, odd_cd);
  c = shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(even_ab, even_cd);
  d = shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(odd_ab, odd_cd);
}

// In each of four parts: lane i of v[j] becomes lane j of v[i].
inline void transpose_fours(vec_u32* v) {
  const vec_u32 low_a = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(v[0], v[1]);
  const vec_u32 high_a = shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(v[0], v[1]);
  const vec_u32 low_b = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(v[2], v[3]);
  const vec_u32 high_b = shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(v[2], v[3]);
  v[0] = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(low_a, low_b);
  v[1] = shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(low_a, low_b);
  v[2] = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(high_a, high_b);
  v[3] = shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(high_a, high_b);
}

// Lane i of v[j] becomes lane j of v[i].
inline void transpose(vec_u32* v) {
  UNROLL for (int i = 0; i < LANES; i += 4) transpose_fours(v + i);
  // v[i + c] now has, in part p, lane 4 p + c of v[i .. i + 4].
  UNROLL for (int c = 0; c < 4; ++c) transpose_quarters(v[c], v[c + 4], v[c + 8], v[c + 12]);
}

// The first COLUMNS elements of each of sixteen rows, transposed.
template <int COLUMNS = LANES>
inline void load_transposed(const void* const* rows, vec_u32* v) {
#if defined(__AVX512F__)
  // Loads of four elements of four rows do the second half of the work: loading is cheaper than moving.
  UNROLL for (int c = 0; c < COLUMNS / 4; ++c) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const auto four = [&](int part) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4 * part]) + c);
      };
      __m512i all = _mm512_castsi128_si512(four(0));
      all = _mm512_mask_broadcast_i32x4(all, 0x00F0, four(1));
      all = _mm512_mask_broadcast_i32x4(all, 0x0F00, four(2));
      v[4 * c + i] = (vec_u32)_mm512_mask_broadcast_i32x4(all, 0xF000, four(3));
    }
    transpose_fours(v + 4 * c);
  }
#else
  static_assert(COLUMNS == LANES);
  UNROLL for (int i = 0; i < LANES; ++i) v[i] = load_as<vec_u32>(rows[i]);
  transpose(v);
#endif
}

}  // namespace snapstream
