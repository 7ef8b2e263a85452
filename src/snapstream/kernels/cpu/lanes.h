// Sixteen elements of 32 bits, for any instruction set: one vector where registers have 512 bits, otherwise a structure of
// several. GCC keeps vectors that are wider than a register in memory, which makes kernels ten times as slow.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE __attribute__((always_inline))
#define NOT_INLINE __attribute__((noinline))

namespace snapstream {

constexpr int LANES = 16;

#if defined(__AVX512F__) && !defined(__AVX512BW__)
#error "AVX-512 without BW is not supported"
#elif defined(__AVX512F__)
constexpr int WIDTH = 16;  // elements of a register
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

// Whether there are 32 registers for vectors of sixteen elements, or enough for at most 8 such vectors.
constexpr bool MANY_REGISTERS = WIDTH == LANES;

template <typename E, int N>
struct Halves;

template <typename E, int N>
struct LanesOf {
  using Type = Halves<E, N>;
};

template <typename E, int N>
  requires(N <= WIDTH)
struct LanesOf<E, N> {
  typedef E Type __attribute__((vector_size(sizeof(E) * N)));
};

// N elements, with the operators of the vector extensions of GCC and Clang. Casts keep bits; see converted().
template <typename E, int N>
using Lanes = typename LanesOf<E, N>::Type;

template <typename E, int N>
struct Halves {
  using Half = Lanes<E, N / 2>;
  using Mask = Lanes<int32_t, N>;
  Half low, high;

  Halves() = default;
  ALWAYS_INLINE Halves(Half low, Half high) : low(low), high(high) {}
  template <typename Other>
  ALWAYS_INLINE explicit Halves(Halves<Other, N> v) : low((Half)v.low), high((Half)v.high) {}

  ALWAYS_INLINE E operator[](int i) const { return i < N / 2 ? low[i] : high[i - N / 2]; }
  ALWAYS_INLINE Halves operator-() const { return {-low, -high}; }
  ALWAYS_INLINE Halves operator~() const { return {~low, ~high}; }

#define SNAPSTREAM_OPERATOR(OPERATOR)                                                                                     \
  ALWAYS_INLINE friend Halves operator OPERATOR(Halves a, Halves b) { return {a.low OPERATOR b.low, a.high OPERATOR b.high}; } \
  ALWAYS_INLINE friend Halves operator OPERATOR(Halves a, E b) { return {a.low OPERATOR b, a.high OPERATOR b}; }          \
  ALWAYS_INLINE friend Halves operator OPERATOR(E a, Halves b) { return {a OPERATOR b.low, a OPERATOR b.high}; }          \
  ALWAYS_INLINE Halves& operator OPERATOR##=(Halves b) { return *this = *this OPERATOR b; }                               \
  ALWAYS_INLINE Halves& operator OPERATOR##=(E b) { return *this = *this OPERATOR b; }
  SNAPSTREAM_OPERATOR(+)
  SNAPSTREAM_OPERATOR(-)
  SNAPSTREAM_OPERATOR(*)
  SNAPSTREAM_OPERATOR(/)
  SNAPSTREAM_OPERATOR(&)
  SNAPSTREAM_OPERATOR(|)
  SNAPSTREAM_OPERATOR(^)
#undef SNAPSTREAM_OPERATOR

  ALWAYS_INLINE friend Halves operator<<(Halves a, int bits) { return {a.low << bits, a.high << bits}; }
  ALWAYS_INLINE friend Halves operator>>(Halves a, int bits) { return {a.low >> bits, a.high >> bits}; }

#define SNAPSTREAM_OPERATOR(OPERATOR)                                                                                   \
  ALWAYS_INLINE friend Mask operator OPERATOR(Halves a, Halves b) { return {a.low OPERATOR b.low, a.high OPERATOR b.high}; } \
  ALWAYS_INLINE friend Mask operator OPERATOR(Halves a, E b) { return {a.low OPERATOR b, a.high OPERATOR b}; }
  SNAPSTREAM_OPERATOR(==)
  SNAPSTREAM_OPERATOR(!=)
  SNAPSTREAM_OPERATOR(<)
  SNAPSTREAM_OPERATOR(<=)
  SNAPSTREAM_OPERATOR(>)
  SNAPSTREAM_OPERATOR(>=)
#undef SNAPSTREAM_OPERATOR
};

template <typename V>
struct Parts {
  static constexpr bool SEVERAL = false;
};

template <typename E, int N>
struct Parts<Halves<E, N>> {
  static constexpr bool SEVERAL = true;
};

// The result of a function of registers, for a vector. Arguments are vectors of equally many elements.
template <typename Result, typename Function, typename V, typename... More>
ALWAYS_INLINE inline Result per_register(const Function& function, V v, More... more) {
  if constexpr (Parts<V>::SEVERAL) {
    using Half = typename Result::Half;
    return {per_register<Half>(function, v.low, more.low...), per_register<Half>(function, v.high, more.high...)};
  } else {
    return function(v, more...);
  }
}

// A vector from memory, which need not be aligned.
template <typename V>
ALWAYS_INLINE inline V load_as(const void* p) {
  if constexpr (Parts<V>::SEVERAL) {
    using Half = typename V::Half;
    return {load_as<Half>(p), load_as<Half>(static_cast<const char*>(p) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
}

template <typename V>
ALWAYS_INLINE inline void store_as(void* p, V v) {
  if constexpr (Parts<V>::SEVERAL) {
    store_as(p, v.low), store_as(static_cast<char*>(p) + sizeof(v.low), v.high);
  } else {
    std::memcpy(p, &v, sizeof(v));
  }
}

// Elements as numbers of another type, towards zero.
template <typename To, typename V>
ALWAYS_INLINE inline Lanes<To, LANES> converted(V v) {
  using Part = Lanes<To, WIDTH>;
  return per_register<Lanes<To, LANES>>([](auto part) ALWAYS_INLINE { return __builtin_convertvector(part, Part); }, v);
}

// Sixteen numbers of 16 bits without sign.
template <typename V = Lanes<uint32_t, LANES>>
ALWAYS_INLINE inline V load_16_bits(const void* p) {
  if constexpr (Parts<V>::SEVERAL) {
    using Half = typename V::Half;
    return {load_16_bits<Half>(p), load_16_bits<Half>(static_cast<const char*>(p) + sizeof(Half) / 2)};
  } else {
    typedef uint16_t narrow __attribute__((vector_size(2 * WIDTH)));
    narrow v;
    std::memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, V);
  }
}

// The opposite.
template <typename V>
ALWAYS_INLINE inline void store_16_bits(void* p, V v) {
  if constexpr (Parts<V>::SEVERAL) {
    store_16_bits(p, v.low), store_16_bits(static_cast<char*>(p) + sizeof(v.low) / 2, v.high);
  } else {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v, (__m256i)v), 0b1000);
    const __m128i narrow = _mm256_castsi256_si128(packed);
#else
    typedef uint16_t half __attribute__((vector_size(2 * WIDTH)));
    const half narrow = __builtin_convertvector(v, half);
#endif
    std::memcpy(p, &narrow, sizeof(narrow));
  }
}

// Register number I of the registers of two vectors.
template <int I, typename V>
ALWAYS_INLINE inline auto register_of(V a, V b) {
  constexpr int COUNT = sizeof(V) / (WIDTH * 4);
  if constexpr (I >= COUNT) return register_of<I - COUNT>(b, b);
  else if constexpr (!Parts<V>::SEVERAL) return a;
  else if constexpr (I < COUNT / 2) return register_of<I>(a.low, a.low);
  else return register_of<I - COUNT / 2>(a.high, a.high);
}

// Registers FIRST and following of shuffle(); V is the type of what they make up.
template <typename V, int FIRST, int... I>
struct Shuffle {
  static constexpr int ORDER[] = {I...};

  template <typename Whole>
  ALWAYS_INLINE static V of(Whole a, Whole b) {
    if constexpr (Parts<V>::SEVERAL) {
      using Half = typename V::Half;
      return {Shuffle<Half, FIRST, I...>::of(a, b), Shuffle<Half, FIRST + sizeof(Half) / (WIDTH * 4), I...>::of(a, b)};
    } else {
      constexpr int one = ORDER[FIRST * WIDTH] / WIDTH, other = second(one);
      static_assert(fits(one, other), "a register may have elements of two");
      const auto x = register_of<one>(a, b), y = register_of<other>(a, b);
      return [&]<int... J>(std::integer_sequence<int, J...>) ALWAYS_INLINE {
        constexpr auto* order = ORDER + FIRST * WIDTH;
        return __builtin_shufflevector(x, y, (order[J] % WIDTH + (order[J] / WIDTH == one ? 0 : WIDTH))...);
      }(std::make_integer_sequence<int, WIDTH>());
    }
  }

  static constexpr int second(int one) {
    for (int j = 0; j < WIDTH; ++j)
      if (ORDER[FIRST * WIDTH + j] / WIDTH != one) return ORDER[FIRST * WIDTH + j] / WIDTH;
    return one;
  }

  static constexpr bool fits(int one, int other) {
    for (int j = 0; j < WIDTH; ++j)
      if (const int from = ORDER[FIRST * WIDTH + j] / WIDTH; from != one && from != other) return false;
    return true;
  }
};

// Elements I of the 32 elements of two vectors.
template <int... I, typename V>
ALWAYS_INLINE inline V shuffle(V a, V b) {
  static_assert(sizeof...(I) == LANES);
  return Shuffle<V, 0, I...>::of(a, b);
}

}  // namespace snapstream
