#include "block_products.h"

namespace snapstream {
namespace {

// Adds products of four columns per lane: `numbers` without sign times four signed ones, the same for all lanes.
template <bool EIGHT_BITS>
inline vec_i32 dot(vec_i32 total, vec_u32 numbers, const int8_t* four) {
  int32_t same;
  std::memcpy(&same, four, sizeof(same));
#if defined(__AVX512VNNI__)
  return (vec_i32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)numbers, _mm512_set1_epi32(same));
#elif defined(__AVX512BW__)
  const __m512i x = _mm512_set1_epi32(same), ones = _mm512_set1_epi16(1);
  const auto add = [&](vec_u32 some) {  // pairs of at most 7 bits times 7 bits fit 16 bits
    total += (vec_i32)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)some, x), ones);
  };
  if (EIGHT_BITS) {
    add(numbers & 0x7F7F7F7Fu), add(numbers & 0x80808080u);
  } else {
    add(numbers);
  }
  return total;
#elif defined(__AVX2__)
  typedef int32_t half_i32 __attribute__((vector_size(2 * LANES)));
  const __m256i x = _mm256_set1_epi32(same), ones = _mm256_set1_epi16(1);
  const auto add = [&](vec_u32 some) {
    const __m256i low = (__m256i)__builtin_shufflevector(some, some, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = (__m256i)__builtin_shufflevector(some, some, 8, 9, 10, 11, 12, 13, 14, 15);
    const half_i32 a = (half_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones);
    const half_i32 b = (half_i32)_mm256_madd_epi16(_mm256_maddubs_epi16(high, x), ones);
    total += __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  };
  if (EIGHT_BITS) {
    add(numbers & 0x7F7F7F7Fu), add(numbers & 0x80808080u);
  } else {
    add(numbers);
  }
  return total;
#else
  UNROLL for (int i = 0; i < 4; ++i) total += (vec_i32)(numbers >> 8 * i & 0xFFu) * static_cast<int32_t>(four[i]);
  return total;
#endif
}

template <typename F, int M>
void multiply_group(const char* x, int64_t step, const uint8_t* tile, int64_t columns, float* out, int64_t stride) {
  vec total[M] = {};
  for (int64_t begin = 0; begin < columns; begin += F::BLOCK, tile += LANES * F::BYTES) {
    const F block(tile);
    for (int64_t ahead = 0; ahead < LANES * F::BYTES; ahead += 64) __builtin_prefetch(tile + 4096 + ahead, 0, 2);
    for (int part = 0; part < F::BLOCK / PART; ++part) {
      vec_u32 numbers[QUADS];
      block.read(part, numbers);
      const vec scale = block.scale(part, 0);
      const int64_t at = begin / PART + part;
      UNROLL for (int m = 0; m < M; ++m) {
        const Rounded row(const_cast<char*>(x) + m * step, columns);
        const int8_t* four = row.numbers + at * PART;
        const int32_t *sums = row.sums + 2 * at, first = F::OFFSET * sums[0], second = F::OFFSET * sums[1];
        if constexpr (F::HALVED) {
          vec_i32 low = vec_i32{} - first, high = vec_i32{} - second;
          UNROLL for (int i = 0; i < QUADS / 2; ++i) low = dot<F::EIGHT_BITS>(low, numbers[i], four + 4 * i);
          UNROLL for (int i = QUADS / 2; i < QUADS; ++i) high = dot<F::EIGHT_BITS>(high, numbers[i], four + 4 * i);
          const vec both = __builtin_convertvector(low, vec) * scale + __builtin_convertvector(high, vec) * block.scale(part, 1);
          total[m] += both * row.scales[at];
        } else {
          vec_i32 whole = vec_i32{} - (first + second);
          UNROLL for (int i = 0; i < QUADS; ++i) whole = dot<F::EIGHT_BITS>(whole, numbers[i], four + 4 * i);
          total[m] += __builtin_convertvector(whole, vec) * (scale * row.scales[at]);
          if constexpr (F::HAS_MINIMUM) total[m] -= block.minimum(part) * row.totals[at];
        }
      }
    }
  }
  UNROLL for (int m = 0; m < M; ++m) store(out + m * stride, total[m]);
}

// A part of a tile as numbers, four columns after four: out[column][lane].
template <typename F>
inline void widen_part(const F& block, int part, float (*out)[LANES]) {
  vec_u32 numbers[QUADS];
  block.read(part, numbers);
  for (int i = 0; i < QUADS; ++i) {
    const vec scale = block.scale(part, i / (QUADS / 2));
    for (int j = 0; j < 4; ++j) {
      const vec_i32 whole = (vec_i32)(numbers[i] >> 8 * j & 0xFFu) - static_cast<int32_t>(F::OFFSET);
      vec wide = __builtin_convertvector(whole, vec) * scale;
      if constexpr (F::HAS_MINIMUM) wide -= block.minimum(part);
      store(out[4 * i + j], wide);
    }
  }
}

// Calls function(column, values) for each part, values[column][lane].
template <typename F, typename Function>
inline void each_part(const uint8_t* tiles, int64_t columns, const Function& function) {
  alignas(64) float values[PART][LANES];
  for (int64_t at = 0; at < columns; at += F::BLOCK) {
    const F block(tiles + at / F::BLOCK * LANES * F::BYTES);
    for (int part = 0; part < F::BLOCK / PART; ++part) {
      widen_part(block, part, values);
      function(at + part * PART, values);
    }
  }
}

}  // namespace

void multiply_blocks(int64_t type, const char* x, int64_t step, int64_t M, const uint8_t* tiles, int64_t columns, float* out,
                     int64_t stride) {
  with_format(type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    switch (M) {
      case 1: return multiply_group<F, 1>(x, step, tiles, columns, out, stride);
      case 2: return multiply_group<F, 2>(x, step, tiles, columns, out, stride);
      case 3: return multiply_group<F, 3>(x, step, tiles, columns, out, stride);
      case 4: return multiply_group<F, 4>(x, step, tiles, columns, out, stride);
      case 5: return multiply_group<F, 5>(x, step, tiles, columns, out, stride);
      case 6: return multiply_group<F, 6>(x, step, tiles, columns, out, stride);
      case 7: return multiply_group<F, 7>(x, step, tiles, columns, out, stride);
      default: return multiply_group<F, 8>(x, step, tiles, columns, out, stride);
    }
  });
}

template <typename T>
void widen_blocks(int64_t type, const uint8_t* tiles, int64_t columns, T* out, int64_t stride) {
  with_format(type, [&](auto* format) {
    each_part<std::remove_pointer_t<decltype(format)>>(tiles, columns, [&](int64_t column, const auto& values) {
      for (int64_t lane = 0; lane < LANES; ++lane)
        for (int64_t i = 0; i < PART; ++i) out[lane * stride + column + i] = static_cast<T>(values[i][lane]);
    });
  });
}

template <typename T>
void widen_row(int64_t type, const uint8_t* tiles, int64_t lane, int64_t columns, T* out) {
  with_format(type, [&](auto* format) {
    each_part<std::remove_pointer_t<decltype(format)>>(tiles, columns, [&](int64_t column, const auto& values) {
      for (int64_t i = 0; i < PART; ++i) out[column + i] = static_cast<T>(values[i][lane]);
    });
  });
}

template void widen_blocks<float>(int64_t, const uint8_t*, int64_t, float*, int64_t);
template void widen_blocks<bfloat16>(int64_t, const uint8_t*, int64_t, bfloat16*, int64_t);
template void widen_row<float>(int64_t, const uint8_t*, int64_t, int64_t, float*);
template void widen_row<bfloat16>(int64_t, const uint8_t*, int64_t, int64_t, bfloat16*);

}  // namespace snapstream
