// Attention of single tokens over entries that are stored as codes; see decode_attention.h, which it follows. All products
// are sums of integers: of codes of a query and codes of keys, and of codes of values and rounded weights.
#pragma once
#include "codes.h"
#include "decode_attention.h"
#include "transpose.h"

namespace snapstream {

constexpr int64_t GROUPS = ENTRIES / LANES;

// Entries of one KV head.
struct CodedEntries {
  const uint8_t *keys, *values;
  int64_t key_row, value_row;  // bytes from one to the next
};

// Calls function(integral constant i) for i in 0 .. N - 1: arrays that are indexed with these stay in registers.
template <int N, typename Function>
ALWAYS_INLINE inline void each(const Function& function) {
  [&]<int... I>(std::integer_sequence<int, I...>) ALWAYS_INLINE { (function(std::integral_constant<int, I>()), ...); }
  (std::make_integer_sequence<int, N>());
}

// ---- Orders of bytes ----

// Of four vectors of bytes, four vectors with bytes 16 i .. 16 i + 16 of each: a lane has the same byte of all four.
inline void interleave(vec_u32* v) {
#if defined(__AVX512BW__)
  const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
  const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
  v[0] = (vec_u32)_mm512_unpacklo_epi16(low_ab, low_cd), v[1] = (vec_u32)_mm512_unpackhi_epi16(low_ab, low_cd);
  v[2] = (vec_u32)_mm512_unpacklo_epi16(high_ab, high_cd), v[3] = (vec_u32)_mm512_unpackhi_epi16(high_ab, high_cd);
  transpose_quarters(v[0], v[1], v[2], v[3]);
#elif defined(__AVX2__)
  using Half = vec_u32::Half;
  const auto two = [](Half a, Half b, Half c, Half d, vec_u32& first, vec_u32& second) ALWAYS_INLINE {
    const __m256i low_ab = _mm256_unpacklo_epi8((__m256i)a, (__m256i)b), high_ab = _mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
    const __m256i low_cd = _mm256_unpacklo_epi8((__m256i)c, (__m256i)d), high_cd = _mm256_unpackhi_epi8((__m256i)c, (__m256i)d);
    const __m256i fours[] = {_mm256_unpacklo_epi16(low_ab, low_cd), _mm256_unpackhi_epi16(low_ab, low_cd),
                             _mm256_unpacklo_epi16(high_ab, high_cd), _mm256_unpackhi_epi16(high_ab, high_cd)};
    first = {(Half)_mm256_permute2x128_si256(fours[0], fours[1], 0x20), (Half)_mm256_permute2x128_si256(fours[2], fours[3], 0x20)};
    second = {(Half)_mm256_permute2x128_si256(fours[0], fours[1], 0x31), (Half)_mm256_permute2x128_si256(fours[2], fours[3], 0x31)};
  };
  const vec_u32 a = v[0], b = v[1], c = v[2], d = v[3];
  two(a.low, b.low, c.low, d.low, v[0], v[1]), two(a.high, b.high, c.high, d.high, v[2], v[3]);
#else
  uint8_t from[4][64], to[4][64];
  std::memcpy(from, v, sizeof(from));
  for (int i = 0; i < 4; ++i)
    for (int byte = 0; byte < 16; ++byte)
      for (int j = 0; j < 4; ++j) to[i][4 * byte + j] = from[j][16 * i + byte];
  std::memcpy(v, to, sizeof(to));
#endif
}

// ---- Keys ----

// Adds products of four bytes per lane, with the same four of a query or of weights.
template <bool EIGHT_BITS>
ALWAYS_INLINE inline void add_dot(vec_i32& total, vec_u32 numbers, const int8_t* four) {
#if defined(__AVX512VNNI__)
  // Compilers load many of the four bytes at once and bring them into vectors, which takes longer than the product.
  vec_u32 same;
  asm("vpbroadcastd %1, %0" : "=v"(same) : "m"(*reinterpret_cast<const int32_t(*)>(four)));
  total = dot_bytes<EIGHT_BITS>(total, numbers, same);
#else
  total = dot<EIGHT_BITS>(total, numbers, four);
#endif
}

// Memory that will be needed.
struct Coming {
  const uint8_t *next, *end;

  // Prefetches the next line; memory does not have more of them than there are calls, but for a few.
  void prefetch() { __builtin_prefetch(next, 0, 2), next += 64; }
  void prefetch_rest() {
    while (next < end) prefetch();
  }
};

// Scores of LANES keys, at `rows`, for HEADS heads.
template <typename F, int HEADS>
inline void score_codes(const CodedQuery* queries, const uint8_t* const* rows, int64_t size, float* scores, Coming coming) {
  vec total[HEADS];
  vec_i32 whole[HEADS];
  each<HEADS>([&](auto h) ALWAYS_INLINE { total[h] = vec{}, whole[h] = vec_i32{} + queries[h].starts[0]; });
  for (int64_t at = 0; at < size; at += F::CHUNK) {
    const int64_t bytes = F::EIGHT_BITS ? at : at / 2, count = std::min<int64_t>(64, F::EIGHT_BITS ? size - at : (size - at) / 2);
    vec_u32 codes[LANES];
    each<LANES>([&](auto i) ALWAYS_INLINE { codes[i] = load_some(rows[i] + bytes, count), coming.prefetch(); });
    transpose(codes);
    const auto* own = reinterpret_cast<const CodedQuery*>(reinterpret_cast<const char*>(queries) + at);
    if constexpr (F::EIGHT_BITS) {
      each<LANES>([&](auto i) ALWAYS_INLINE {
        each<HEADS>([&](auto h) ALWAYS_INLINE { add_dot<true>(whole[h], codes[i], own[h].codes + 4 * i); });
      });
    } else {
      vec scales[4];
      F::read_scales(rows, size, at, scales);
      each<4>([&](auto part) ALWAYS_INLINE {
        if (part * PART >= size - at) return;
        each<HEADS>([&](auto h) ALWAYS_INLINE { whole[h] = vec_i32{} + queries[h].starts[at / PART + part]; });
        each<4>([&](auto i) ALWAYS_INLINE {
          const vec_u32 both = codes[4 * part + i], low = both & 0x0F0F0F0Fu, high = both >> 4 & 0x0F0F0F0Fu;
          constexpr int64_t first = part * PART + 4 * i;
          each<HEADS>([&](auto h) ALWAYS_INLINE { add_dot<false>(whole[h], low, own[h].codes + first); });
          each<HEADS>([&](auto h) ALWAYS_INLINE { add_dot<false>(whole[h], high, own[h].codes + first + PART / 2); });
        });
        each<HEADS>([&](auto h) ALWAYS_INLINE { total[h] += converted<float>(whole[h]) * scales[part]; });
      });
    }
  }
  coming.prefetch_rest();
  vec scale;
  if constexpr (F::EIGHT_BITS) F::read_scales(rows, size, 0, &scale);
  each<HEADS>([&](auto h) ALWAYS_INLINE {
    if constexpr (F::EIGHT_BITS) total[h] = converted<float>(whole[h]) * scale;
    store(scores + h * ENTRIES, total[h] * queries[h].scale + queries[h].constant);
  });
}

// ---- Values ----

// Weights of a block for numbers that have a scale in common: 128 * high + low, or only high.
struct Weights {
  alignas(64) int8_t high[ENTRIES], low[ENTRIES];
  int32_t start;  // of sums of products with codes
};

// Rounds weights of a block times the scales of each part to every `step`-th of `to`. `most` are the largest magnitudes of
// each entry's scales. Returns what sums of products have to be multiplied by.
template <typename F>
inline float round_weights(const float* weights, const float (*scales)[ENTRIES], const float* most, int64_t parts, Weights* to,
                           int64_t step) {
  constexpr bool TWO = F::WEIGHT_BYTES == 2;
  constexpr float MOST = TWO ? 16383.0f : 127.0f, MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vec peaks{}, nothing{};
  UNROLL for (int64_t i = 0; i < ENTRIES; i += LANES) {
    const vec w = load(weights + i) * load(most + i);
    peaks = larger(peaks, w), nothing += w * 0.0f;
  }
  const float peak = largest(peaks);
  const bool finite = !any(~(nothing == 0.0f));
  const float factor = finite && peak > SMALLEST_PEAK ? MOST / peak : 0.0f;
  vec own_weights[GROUPS];
  each<GROUPS>([&](auto i) ALWAYS_INLINE { own_weights[i] = finite ? load(weights + i * LANES) * factor : vec{}; });
  for (int64_t part = 0; part < parts; ++part) {
    vec_i32 total{};
    Weights& own = to[part * step];
    each<GROUPS>([&](auto i) ALWAYS_INLINE {
      const vec_i32 whole = (vec_i32)(own_weights[i] * load(scales[part] + i * LANES) + MAGIC) - 0x4B400000;
      store_bytes(own.high + i * LANES, TWO ? whole >> 7 : whole);
      if (TWO) store_bytes(own.low + i * LANES, whole & 127);
      total += whole;
    });
    own.start = -static_cast<int32_t>(F::OFFSET) * static_cast<int32_t>(sum(converted<float>(total)));
  }
  return finite ? peak / MOST : std::numeric_limits<float>::quiet_NaN();
}

// Adds weighted codes of COLUMNS * LANES columns to each head's output, at `out` and `stride` apart. `codes` are those of
// a block, four entries after four, `distance` vectors apart.
template <typename F, int HEADS, int COLUMNS>
inline void add_codes(const Weights* weights, const float* factors, const vec_u32* codes, int64_t distance, float* out,
                      int64_t stride) {
  constexpr bool TWO = F::WEIGHT_BYTES == 2;
  vec_i32 high[HEADS * COLUMNS], low[TWO ? HEADS * COLUMNS : 1];
  each<HEADS * COLUMNS>([&](auto i) ALWAYS_INLINE {
    const vec_i32 start = vec_i32{} + weights[i % HEADS].start;
    if constexpr (TWO) high[i] = vec_i32{}, low[i] = start;
    else high[i] = start;
  });
  for (int64_t i = 0; i < ENTRIES / 4; ++i, codes += distance) {
    each<HEADS>([&](auto h) ALWAYS_INLINE {
      each<COLUMNS>([&](auto c) ALWAYS_INLINE {
        add_dot<F::EIGHT_BITS>(high[c * HEADS + h], codes[c], weights[h].high + 4 * i);
        if constexpr (TWO) add_dot<F::EIGHT_BITS>(low[c * HEADS + h], codes[c], weights[h].low + 4 * i);
      });
    });
  }
  each<HEADS * COLUMNS>([&](auto i) ALWAYS_INLINE {
    float* to = out + i % HEADS * stride + i / HEADS * LANES;
    vec_i32 whole = high[i];
    if constexpr (TWO) whole = whole * 128 + low[i];
    store(to, load(to) + converted<float>(whole) * factors[i % HEADS]);
  });
}

// Adds a block of values, weighted, to the states of HEADS heads.
template <typename F, int HEADS>
NOT_INLINE void add_coded_values(const float* scores, const uint8_t* const* rows, int64_t n, int64_t size, int64_t columns,
                             float* states, int64_t stride, Coming coming) {
  constexpr int64_t MOST_PARTS = F::EIGHT_BITS ? 1 : MOST_CHANNELS / PART;
  constexpr int VECTORS = F::EIGHT_BITS ? 4 : 8;  // of LANES columns, in 64 bytes
  constexpr int COLUMNS = F::WEIGHT_BYTES == 2 && HEADS > 4 ? 1 : 2;  // as many as stay in registers
  alignas(64) float scales[MOST_PARTS][ENTRIES];
  Weights weights[HEADS * MOST_PARTS];
  float factors[HEADS];
  const int64_t parts = F::EIGHT_BITS ? 1 : columns / PART;
  alignas(64) float most[ENTRIES];
  for (int64_t i = 0; i < ENTRIES; i += LANES) {
    vec largest_scales{};
    for (int64_t at = 0; at < (F::EIGHT_BITS ? 1 : columns); at += F::CHUNK) {
      vec own[4];
      F::read_scales(rows + i, size, at, own);
      for (int64_t part = 0; part < std::min<int64_t>(4, parts - at / PART); ++part) {
        store(scales[at / PART + part] + i, own[part]);
        const vec magnitude = (vec)((vec_u32)own[part] & 0x7FFFFFFFu);
        largest_scales = select(magnitude > largest_scales | magnitude != magnitude, magnitude, largest_scales);  // keeps NaN
      }
    }
    store(most + i, largest_scales);
  }
  for (int64_t part = 0; part < parts; ++part) std::fill(scales[part] + n, scales[part] + ENTRIES, 0.0f);
  std::fill(most + n, most + ENTRIES, 0.0f);
  for (int h = 0; h < HEADS; ++h)
    factors[h] = round_weights<F>(scores + h * ENTRIES, scales, most, parts, weights + h, HEADS);
  for (int64_t at = 0; at < columns; at += F::CHUNK) {
    const int64_t bytes = F::EIGHT_BITS ? at : at / 2, count = std::min<int64_t>(64, F::EIGHT_BITS ? columns - at : (columns - at) / 2);
    vec_u32 codes[ENTRIES / 4 * VECTORS];
    for (int64_t i = 0; i < ENTRIES; i += 4) {
      vec_u32 four[4];
      each<4>([&](auto j) ALWAYS_INLINE { four[j] = load_some(rows[i + j] + bytes, count), coming.prefetch(); });
      interleave(four);
      vec_u32* to = codes + i / 4 * VECTORS;
      each<4>([&](auto j) ALWAYS_INLINE {
        if constexpr (F::EIGHT_BITS) to[j] = four[j];
        else to[2 * j] = four[j] & 0x0F0F0F0Fu, to[2 * j + 1] = four[j] >> 4 & 0x0F0F0F0Fu;
      });
    }
    for (int64_t v = 0; v < count * VECTORS / 64; v += COLUMNS) {
      const int64_t column = at + v * LANES;
      add_codes<F, HEADS, COLUMNS>(weights + (F::EIGHT_BITS ? 0 : column / PART * HEADS), factors, codes + v, VECTORS,
                                   states + LANES + column, stride);
    }
  }
  coming.prefetch_rest();
}

// Scores of a block of n keys.
template <typename F, int HEADS>
NOT_INLINE void score_block(const CodedQuery* queries, const uint8_t* const* rows, int64_t n, int64_t size, float* scores,
                            const CodedEntries& entries) {
  for (int64_t i = 0; i < n; i += LANES) {
    const uint8_t* values = entries.values + (AHEAD + i) * entries.value_row;
    score_codes<F, HEADS>(queries, rows + i, size, scores + i, Coming{values, values + LANES * entries.value_row});
  }
}

// Adds n entries to the states of HEADS heads. `columns` are as much of a value as is wanted.
template <typename K, typename V, int HEADS>
inline void attend_coded(const CodedQuery* queries, const CodedEntries& entries, int64_t n, int64_t size, int64_t columns,
                         float cap, float* states) {
  const int64_t stride = state_size(columns);
  alignas(64) float scores[HEADS][ENTRIES];
  const uint8_t *keys[ENTRIES], *values[ENTRIES];
  for (int64_t i = 0; i < ENTRIES; ++i) {  // after the last entry, some that exist
    const int64_t entry = std::min(i, n - 1);
    keys[i] = entries.keys + entry * entries.key_row, values[i] = entries.values + entry * entries.value_row;
  }
  score_block<K, HEADS>(queries, keys, n, size, scores[0], entries);
  for (int h = 0; h < HEADS; ++h) weigh(scores[h], n, columns, cap, states + h * stride);
  const uint8_t* next = entries.keys + AHEAD * entries.key_row;
  add_coded_values<V, HEADS>(scores[0], values, n, size, columns, states, stride,
                             Coming{next, next + ENTRIES * entries.key_row});
}

// The same for all `heads` heads that share a KV head; their states are contiguous. Codes are read once for some of them.
template <typename K, typename V>
inline void attend_coded(const CodedQuery* queries, int64_t heads, const CodedEntries& entries, int64_t n, int64_t size,
                         int64_t columns, float cap, float* states) {
  const auto some = [&](auto count) {
    attend_coded<K, V, count>(queries, entries, n, size, columns, cap, states);
    queries += count, states += count * state_size(columns), heads -= count;
  };
  while (heads > 0) {
    if (heads >= 8) some(std::integral_constant<int, 8>());
    else if (heads >= 6) some(std::integral_constant<int, 6>());
    else if (heads >= 4) some(std::integral_constant<int, 4>());
    else if (heads == 3) some(std::integral_constant<int, 3>());
    else if (heads == 2) some(std::integral_constant<int, 2>());
    else some(std::integral_constant<int, 1>());
  }
}

#undef NOT_INLINE

}  // namespace snapstream
