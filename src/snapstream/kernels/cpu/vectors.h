// What kernels do with vectors of 16 elements; intrinsics only where the extensions of compilers do not suffice.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "interface.h"
#include "lanes.h"
#include "numbers.h"

// Tile registers require dot products of pairs, which compute the weights.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define SNAPSTREAM_TILES
#endif

namespace snapstream {

constexpr int PAIR = 2 * LANES;
constexpr int64_t AHEAD_BYTES = 24 * 1024;  // how far ahead weights of few rows are prefetched
using vec = Lanes<float, LANES>;
using vec_u32 = Lanes<uint32_t, LANES>;
using vec_i32 = Lanes<int32_t, LANES>;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The accumulators must live in registers, so every loop over them has to be unrolled.
#define UNROLL _Pragma("GCC unroll 16")

// Keeps a vector in a register. Otherwise the compiler loads it again for every use, and loads are the bottleneck.
template <typename V>
ALWAYS_INLINE inline void pin(V& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v.low), "+x"(v.high));
#endif
}

inline vec load(const float* p) { return load_as<vec>(p); }

inline vec_u32 load_u32(const void* p) { return load_as<vec_u32>(p); }

inline void store_u32(void* p, vec_u32 v) { store_as(p, v); }

// Loads 32 elements as two vectors. A bfloat16 is the upper half of a float32, so of 32 bfloat16 the odd ones need a
// mask and the even ones a shift, and nothing has to be unpacked: `low` holds the even ones, `high` the odd ones.
// Whatever they are combined with must be in the same order; store_pair() restores the original one. For float32 the
// order is unchanged.
inline void load_pair(const float* p, vec& low, vec& high) {
  low = load(p);
  high = load(p + LANES);
}

inline void load_pair(const bfloat16* p, vec& low, vec& high) {
  const auto both = load_as<vec_u32>(p);
  low = (vec)(both << 16);
  high = (vec)(both & 0xFFFF0000u);
}

// Elements of `a` where the mask is set, and of `b` elsewhere.
ALWAYS_INLINE inline vec select(vec_i32 mask, vec a, vec b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return per_register<vec>([](auto m, auto x, auto y) ALWAYS_INLINE {
    return (Lanes<float, WIDTH>)_mm256_blendv_ps((__m256)y, (__m256)x, (__m256)m); }, mask, a, b);
#else
  return (vec)(((vec_i32)a & mask) | ((vec_i32)b & ~mask));
#endif
}

inline bool any(vec_i32 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  const __m256i all = (__m256i)(mask.low | mask.high);
  return !_mm256_testz_si256(all, all);
#else
  int32_t all = 0;
  for (int i = 0; i < LANES; ++i) all |= mask[i];
  return all != 0;
#endif
}

ALWAYS_INLINE inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
#else
  return select(a > b, a, b);
#endif
}

inline void store(float* p, vec v) { store_as(p, v); }

// Stores 16 elements in the type of the memory; rounds to bfloat16 to nearest, ties to even.
inline void store_numbers(float* p, vec v) { store(p, v); }

inline void store_numbers(bfloat16* p, vec v) {
  const vec_u32 bits = (vec_u32)v;
  store_16_bits(p, (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline vec load_numbers(const float* p) { return load(p); }

inline vec load_numbers(const bfloat16* p) { return (vec)(load_16_bits(p) << 16); }

// Loads the first `count` elements of a vector, which may be all that memory holds of it.
template <typename N>
ALWAYS_INLINE inline vec some(const N* from, int64_t count) {
  if (count == LANES) return load_numbers(from);
  N all[LANES] = {};
  std::copy_n(from, count, all);
  return load_numbers(all);
}

template <typename N>
ALWAYS_INLINE inline void put(N* to, vec v, int64_t count) {
  if (count == LANES) return store_numbers(to, v);
  N all[LANES];
  store_numbers(all, v);
  std::copy_n(all, count, to);
}

// Rounds to the type of the memory.
template <typename T>
inline vec rounded(vec v) {
  if constexpr (std::is_same_v<T, float>) return v;
  const vec_u32 bits = (vec_u32)v;
  return (vec)((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

// The inverse of load_pair().
inline void store_pair(float* p, vec low, vec high) {
  store(p, low);
  store(p + LANES, high);
}

inline void store_pair(bfloat16* p, vec low, vec high) {
  store_numbers(p, shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(low, high));
  store_numbers(p + LANES,
                shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(low, high));
}

// Loads 32 elements in the order that load_pair() has for elements of type T.
template <typename T, typename N>
inline void load_pair_as(const N* p, vec& low, vec& high) {
  if constexpr (std::is_same_v<T, N>) return load_pair(p, low, high);
  const vec a = load_numbers(p), b = load_numbers(p + LANES);
  if constexpr (std::is_same_v<T, float>) {
    low = a, high = b;
  } else {
    low = shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
    high = shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
  }
}

// Stores 32 elements that are in the order of load_pair() for elements of type N.
template <typename N, typename T>
inline void store_pair_from(T* p, vec low, vec high) {
  if constexpr (std::is_same_v<T, N>) return store_pair(p, low, high);
  if constexpr (std::is_same_v<N, float>) {
    store_numbers(p, low), store_numbers(p + LANES, high);
  } else {
    store_numbers(p, shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(low, high));
    store_numbers(p + LANES,
                  shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(low, high));
  }
}

// Copies elements to memory of another type.
template <typename N, typename T>
inline void convert(const N* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<N, T>) to[i] = from[i];
    else to[i] = static_cast<T>(static_cast<float>(from[i]));
  }
}

inline float largest(vec v) {
  const vec a = larger(v, shuffle<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v));
  const vec b = larger(a, shuffle<4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7>(a, a));
  const float low = b[0] < b[2] ? b[2] : b[0], high = b[1] < b[3] ? b[3] : b[1];
  return low < high ? high : low;
}

inline float sum(vec v) {
  const vec a = v + shuffle<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v);
  const vec b = a + shuffle<4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3>(a, a);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// exp(x) for x <= 0: 2^n * p(r), with the polynomial's relative error below 1e-7. Very negative x gives 0.
ALWAYS_INLINE inline vec exp_nonpositive(vec x) {
  constexpr float ROUNDS = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the last bits of the sum hold
  const vec t = x * 1.44269504088896341f + ROUNDS, n = t - ROUNDS;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vec scaled = p * (vec)(((vec_i32)t << 23) + 0x3F800000);
  const vec_i32 underflow = x < vec{} - 87.0f;
  return (vec)((vec_i32)scaled & ~underflow);
}

// cap * tanh(x / cap); its absolute error is about 1e-7 * cap.
ALWAYS_INLINE inline vec capped(vec x, float cap) {
  const vec size = select(x < vec{}, -x, x);
  const vec e = exp_nonpositive(size * (-2.0f / cap)), y = (1.0f - e) / (1.0f + e) * cap;
  return select(x < vec{}, -y, y);
}

// Element i combines all elements of v[i]; the order is the same for all i.
template <typename Combine>
ALWAYS_INLINE inline vec across(const vec v[LANES], const Combine& combine) {
  vec a[8], b[4], c[2];
  UNROLL for (int i = 0; i < 8; ++i)
    a[i] = combine(shuffle<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(v[2 * i], v[2 * i + 1]),
                   shuffle<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(v[2 * i], v[2 * i + 1]));
  UNROLL for (int i = 0; i < 4; ++i)
    b[i] = combine(shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a[2 * i], a[2 * i + 1]),
                   shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a[2 * i], a[2 * i + 1]));
  UNROLL for (int i = 0; i < 2; ++i)
    c[i] = combine(shuffle<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(b[2 * i], b[2 * i + 1]),
                   shuffle<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(b[2 * i], b[2 * i + 1]));
  return combine(shuffle<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(c[0], c[1]),
                 shuffle<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(c[0], c[1]));
}

// The sum of each of 16 vectors.
inline vec sums(const vec v[LANES]) {
  return across(v, [](vec a, vec b) ALWAYS_INLINE { return a + b; });
}

// The largest element of each of 16 vectors.
inline vec maxima(const vec v[LANES]) {
  return across(v, [](vec a, vec b) ALWAYS_INLINE { return larger(a, b); });
}

// ---- 32 elements on either side of a dot product ----

template <typename T>
struct Wide {
  using Number = T;
  vec low, high;
  void read(const T* p) { load_pair(p, low, high); }
  void hold() { pin(low), pin(high); }
};

template <typename T>
inline void add_product(vec& total, const Wide<T>& weight, const Wide<float>& left) {
  total += weight.low * left.low;
  total += weight.high * left.high;
}

// Ways to multiply: Number is the type in memory, Left the form of the few rows, Right reads weights. prepare() brings a
// row into its form.
template <typename N>
struct Widened {
  using Number = N;
  using Left = Wide<float>;
  using Right = Wide<N>;
  template <typename T>
  static void prepare(const T* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += PAIR) {
      vec low, high;
      load_pair_as<N>(from + i, low, high);
      store(to + i, low), store(to + i + LANES, high);
    }
  }
};

#if defined(__AVX512BF16__)
// Multiplies pairs of bfloat16 exactly and adds them in float32; nothing has to be widened.
struct PairOperand {
  using Number = bfloat16;
  __m512i both;
  void read(const bfloat16* p) { both = _mm512_loadu_si512(p); }
  void hold() { asm("" : "+v"(both)); }
};

inline void add_product(vec& total, const PairOperand& weight, const PairOperand& left) {
  total = (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)weight.both, (__m512bh)left.both);
}

struct Paired {
  using Number = bfloat16;
  using Left = PairOperand;
  using Right = PairOperand;
  static void prepare(const bfloat16* from, int64_t count, bfloat16* to) { std::memcpy(to, from, count * 2); }
};
#endif

// Calls function(N()) with the type of numbers in memory.
template <typename Function>
inline auto with_type(int64_t type, const Function& function) {
  return type == FLOAT32 ? function(float()) : function(bfloat16());
}

// Calls function(way to multiply) with the one for numbers of some type in memory and rows of type T.
template <typename T, typename Function>
inline auto with_arithmetic(int64_t type, int64_t instructions, const Function& function) {
  if (type == FLOAT32) return function(Widened<float>());
#if defined(__AVX512BF16__)
  // Where there are tiles, the vector unit is slow at pairs, see snapstream_best_instructions().
  if constexpr (std::is_same_v<T, bfloat16>)
    if (instructions == PAIRS) return function(Paired());
#endif
  return function(Widened<bfloat16>());
}

}  // namespace snapstream
