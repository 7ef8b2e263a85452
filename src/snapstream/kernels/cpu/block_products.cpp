#include "block_products.h"

namespace snapstream {
namespace {

constexpr int64_t AHEAD = 4096;  // how far ahead weights are prefetched, in bytes

// A part of a tile, as rows are multiplied by it.
template <typename F>
struct PartWeights {
  vec_u32 numbers[QUADS];
  vec scales[F::HALVED ? 2 : 1];
  vec minimum[F::HAS_MINIMUM ? 1 : 0];

  void read(const F& block, int part) {
    block.read(part, numbers);
    for (int half = 0; half < (F::HALVED ? 2 : 1); ++half) scales[half] = block.scale(part, half);
    if constexpr (F::HAS_MINIMUM) minimum[0] = block.minimum(part);
  }
};

// The same part, m rows further on.
inline const Rounded* row_after(const Rounded* x, int64_t step, int m) {
  return reinterpret_cast<const Rounded*>(reinterpret_cast<const char*>(x) + m * step);
}

// Adds a part of a row times a part of a tile: sums of products of both halves, by scales.
template <typename F>
ALWAYS_INLINE inline void add_part(const PartWeights<F>& weights, const Rounded& x, vec_i32 low, vec_i32 high, vec& total) {
  if constexpr (F::HALVED) {
    const vec both = converted<float>(low) * weights.scales[0] + converted<float>(high) * weights.scales[1];
    total += both * x.scale;
  } else {
    total += converted<float>(low + high) * (weights.scales[0] * x.scale);
  }
  if constexpr (F::HAS_MINIMUM) total -= weights.minimum[0] * x.total;
}

#if defined(SNAPSTREAM_SHORT_SUMS)
// Sums of products of half a part of M rows, `step` bytes apart, whose numbers begin at x.
template <int BITS, int M>
ALWAYS_INLINE inline void sum_half(const vec_u32* numbers, const int8_t* x, int64_t step, vec_i32* sums) {
  constexpr int TOGETHER = BITS == 8 ? 1 : BITS == 6 ? 2 : 4;  // short sums that may be added
  static_assert(BITS == 8 || TOGETHER * 2 * 127 * ((1 << BITS) - 1) < 1 << 15);
  UNROLL for (int i = 0; i < QUADS / 2; i += TOGETHER) {
    vec_u32 shorts[M];
    UNROLL for (int j = i; j < i + TOGETHER; ++j) {
      UNROLL for (int m = 0; m < M; ++m) {
        const vec_u32 four = same_four(x + m * step + 4 * j);
        const vec_u32 products = BITS == 8 ? short_sums_with_signs(numbers[j], four) : short_sums(numbers[j], four);
        shorts[m] = j == i ? products : add_shorts(shorts[m], products);
        pin(shorts[m]);  // otherwise the compiler computes all products first, and has no registers for them
      }
    }
    UNROLL for (int m = 0; m < M; ++m) sums[m] = i ? sums[m] + sums_of_shorts(shorts[m]) : sums_of_shorts(shorts[m]);
  }
}

// Adds a part of M rows, `step` bytes apart, times a part of a tile, which is read once for four rows.
template <typename F, int M>
ALWAYS_INLINE inline void multiply_part(const PartWeights<F>& weights, const Rounded* x, int64_t step, vec* total) {
  const auto multiply_rows = [&]<int COUNT>(int first, std::integral_constant<int, COUNT>) ALWAYS_INLINE {
    const auto row = [&](int m) ALWAYS_INLINE -> const Rounded& { return *row_after(x, step, first + m); };
    vec_i32 low[COUNT], high[COUNT];
    sum_half<F::BITS, COUNT>(weights.numbers, row(0).numbers, step, low);
    sum_half<F::BITS, COUNT>(weights.numbers + QUADS / 2, row(0).numbers + PART / 2, step, high);
    UNROLL for (int m = 0; m < COUNT; ++m) {
      if constexpr (F::OFFSET != 0 && F::BITS != 8) {  // numbers of 8 bits have been multiplied with their signs
        low[m] -= static_cast<int32_t>(F::OFFSET) * row(m).sums[0], high[m] -= static_cast<int32_t>(F::OFFSET) * row(m).sums[1];
      }
      add_part(weights, row(m), low[m], high[m], total[first + m]);
    }
  };
  for (int first = 0; first + 4 <= M; first += 4) multiply_rows(first, std::integral_constant<int, 4>());
  if constexpr (M % 4 != 0) multiply_rows(M / 4 * 4, std::integral_constant<int, M % 4>());
}
#else
// Adds a part of M rows, `step` bytes apart, times a part of a tile. Two sums at once keep the processor busy.
template <typename F, int M>
ALWAYS_INLINE inline void multiply_part(const PartWeights<F>& weights, const Rounded* x, int64_t step, vec* total) {
  UNROLL for (int m = 0; m < M; ++m) {
    const Rounded& row = *row_after(x, step, m);
    vec_i32 low{}, high{};
    if constexpr (F::OFFSET != 0) {
      low -= static_cast<int32_t>(F::OFFSET) * row.sums[0], high -= static_cast<int32_t>(F::OFFSET) * row.sums[1];
    }
    UNROLL for (int i = 0; i < QUADS / 2; ++i) {
      low = dot<F::BITS == 8>(low, weights.numbers[i], row.numbers + 4 * i);
      high = dot<F::BITS == 8>(high, weights.numbers[i + QUADS / 2], row.numbers + 4 * i + PART / 2);
    }
    add_part(weights, row, low, high, total[m]);
  }
}
#endif

template <typename F, int M>
NOT_INLINE void multiply_group(const char* x, int64_t step, const uint8_t* tile, int64_t columns, float* out, int64_t stride) {
  vec total[M] = {};
  for (int64_t begin = 0; begin < columns; begin += F::BLOCK, tile += LANES * F::BYTES) {
    const F block(tile);
    for (int64_t ahead = 0; ahead < LANES * F::BYTES; ahead += 64) __builtin_prefetch(tile + AHEAD + ahead, 0, 2);
    for (int part = 0; part < F::BLOCK / PART; ++part) {
      PartWeights<F> weights;
      weights.read(block, part);
      multiply_part<F, M>(weights, rounded_row(x, step, 0) + begin / PART + part, step, total);
    }
  }
  UNROLL for (int m = 0; m < M; ++m) store(out + m * stride, total[m]);
}

template <typename F, int M>
NOT_INLINE void multiply_unpacked(const char* x, int64_t step, const PartWeights<F>* weights, int64_t begin, int64_t end, float* sums) {
  vec total[M];
  UNROLL for (int m = 0; m < M; ++m) total[m] = load(sums + m * LANES);
  for (int64_t at = begin / PART; at < end / PART; ++at, ++weights)
    multiply_part<F, M>(*weights, rounded_row(x, step, 0) + at, step, total);
  UNROLL for (int m = 0; m < M; ++m) store(sums + m * LANES, total[m]);
}

// Calls function(integral constant M).
template <typename Function>
inline void with_rows(int64_t M, const Function& function) {
  switch (M) {
    case 1: return function(std::integral_constant<int, 1>());
    case 2: return function(std::integral_constant<int, 2>());
    case 3: return function(std::integral_constant<int, 3>());
    case 4: return function(std::integral_constant<int, 4>());
    case 5: return function(std::integral_constant<int, 5>());
    case 6: return function(std::integral_constant<int, 6>());
    case 7: return function(std::integral_constant<int, 7>());
    default: return function(std::integral_constant<int, 8>());
  }
}

}  // namespace

void multiply_blocks(int64_t type, const char* x, int64_t step, int64_t M, const uint8_t* tiles, int64_t columns, float* out,
                     int64_t stride) {
  with_format(type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    with_rows(M, [&](auto count) { multiply_group<F, decltype(count)::value>(x, step, tiles, columns, out, stride); });
  });
}

void unpack_blocks(int64_t type, const uint8_t* tiles, int64_t begin, int64_t end, char* to) {
  with_format(type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    static_assert(sizeof(PartWeights<F>) <= (QUADS + 2) * sizeof(vec));
    auto* weights = reinterpret_cast<PartWeights<F>*>(to);
    for (int64_t at = begin; at < end; at += F::BLOCK) {
      const F block(tiles + at / F::BLOCK * LANES * F::BYTES);
      for (int part = 0; part < F::BLOCK / PART; ++part) (weights++)->read(block, part);
    }
  });
}

void multiply_unpacked(int64_t type, const char* x, int64_t step, int64_t M, const char* weights, int64_t begin, int64_t end,
                       float* sums) {
  with_format(type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    const auto* parts = reinterpret_cast<const PartWeights<F>*>(weights);
    with_rows(M, [&](auto count) { multiply_unpacked<F, decltype(count)::value>(x, step, parts, begin, end, sums); });
  });
}

template <typename T>
void widen_blocks(int64_t type, const uint8_t* tiles, int64_t columns, T* out, int64_t stride) {
  read_blocks(type, tiles, 0, columns, [&](int64_t column, const auto& values) {
    for (int64_t lane = 0; lane < LANES; ++lane)
      for (int64_t i = 0; i < PART; ++i) out[lane * stride + column + i] = static_cast<T>(values[i][lane]);
  });
}

template <typename T>
void widen_row(int64_t type, const uint8_t* tiles, int64_t lane, int64_t columns, T* out) {
  read_blocks(type, tiles, 0, columns, [&](int64_t column, const auto& values) {
    for (int64_t i = 0; i < PART; ++i) out[column + i] = static_cast<T>(values[i][lane]);
  });
}

template void widen_blocks<float>(int64_t, const uint8_t*, int64_t, float*, int64_t);
template void widen_blocks<bfloat16>(int64_t, const uint8_t*, int64_t, bfloat16*, int64_t);
template void widen_row<float>(int64_t, const uint8_t*, int64_t, int64_t, float*);
template void widen_row<bfloat16>(int64_t, const uint8_t*, int64_t, int64_t, bfloat16*);

}  // namespace snapstream
