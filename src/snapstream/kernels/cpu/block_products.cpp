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

// Adds a part of a row times a part of a tile. Two sums at once keep the processor busy.
template <typename F>
inline void multiply_part(const PartWeights<F>& weights, const Rounded& x, vec& total) {
  const int8_t* four = x.numbers;
  vec_i32 low{}, high{};
  if constexpr (F::OFFSET != 0) {
    low -= static_cast<int32_t>(F::OFFSET) * x.sums[0], high -= static_cast<int32_t>(F::OFFSET) * x.sums[1];
  }
  UNROLL for (int i = 0; i < QUADS / 2; ++i) {
    low = dot<F::EIGHT_BITS>(low, weights.numbers[i], four + 4 * i);
    high = dot<F::EIGHT_BITS>(high, weights.numbers[i + QUADS / 2], four + 4 * i + PART / 2);
  }
  if constexpr (F::HALVED) {
    const vec both = __builtin_convertvector(low, vec) * weights.scales[0] + __builtin_convertvector(high, vec) * weights.scales[1];
    total += both * x.scale;
  } else {
    total += __builtin_convertvector(low + high, vec) * (weights.scales[0] * x.scale);
  }
  if constexpr (F::HAS_MINIMUM) total -= weights.minimum[0] * x.total;
}

template <typename F, int M>
__attribute__((noinline)) void multiply_group(const char* x, int64_t step, const uint8_t* tile, int64_t columns, float* out, int64_t stride) {
  vec total[M] = {};
  for (int64_t begin = 0; begin < columns; begin += F::BLOCK, tile += LANES * F::BYTES) {
    const F block(tile);
    for (int64_t ahead = 0; ahead < LANES * F::BYTES; ahead += 64) __builtin_prefetch(tile + AHEAD + ahead, 0, 2);
    for (int part = 0; part < F::BLOCK / PART; ++part) {
      PartWeights<F> weights;
      weights.read(block, part);
      UNROLL for (int m = 0; m < M; ++m)
        multiply_part(weights, rounded_row(x, step, m)[begin / PART + part], total[m]);
    }
  }
  UNROLL for (int m = 0; m < M; ++m) store(out + m * stride, total[m]);
}

template <typename F, int M>
__attribute__((noinline)) void multiply_unpacked(const char* x, int64_t step, const PartWeights<F>* weights, int64_t begin, int64_t end, float* sums) {
  vec total[M];
  UNROLL for (int m = 0; m < M; ++m) total[m] = load(sums + m * LANES);
  for (int64_t at = begin / PART; at < end / PART; ++at, ++weights)
    UNROLL for (int m = 0; m < M; ++m) multiply_part(*weights, rounded_row(x, step, m)[at], total[m]);
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
