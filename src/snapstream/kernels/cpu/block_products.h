// Products of rows of activations with weights in blocks. Rows are rounded to 8 bits first, in parts of 32 columns with a
// scale each; sums within a part are exact integers. The result of a row depends only on that row, bit for bit.
#pragma once
#include "blocks.h"

namespace snapstream {

// A part of a row of activations, as it is multiplied with blocks.
struct Rounded {
  int8_t numbers[PART];
  float scale;
  float total;      // the scale times the sum of the numbers
  int32_t sums[2];  // of the numbers of each half

  static int64_t bytes(int64_t columns) { return columns / PART * sizeof(Rounded); }
};

// Rounds a row. Parts with numbers that are not finite become NaN.
template <typename T>
inline void round_row(const T* from, int64_t columns, Rounded* to) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to nearest, ties to even
  for (const T* end = from + columns; from != end; from += PART, ++to) {
    const vec x[2] = {load_numbers(from), load_numbers(from + LANES)};
    const float peak = largest(larger((vec)((vec_u32)x[0] & 0x7FFFFFFFu), (vec)((vec_u32)x[1] & 0x7FFFFFFFu)));
    const bool finite = !any(~(x[0] * 0.0f + x[1] * 0.0f == 0.0f));
    const float inverse = finite && peak > 1e-30f ? 127.0f / peak : 0.0f;
    for (int half = 0; half < 2; ++half) {
      const vec scaled = finite ? x[half] * inverse : vec{};
      const vec_i32 whole = (vec_i32)(scaled + MAGIC) - 0x4B400000;
      store_bytes(to->numbers + half * LANES, whole);
      to->sums[half] = static_cast<int32_t>(sum(converted<float>(whole)));
    }
    to->scale = finite ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN();
    to->total = to->scale * static_cast<float>(to->sums[0] + to->sums[1]);
  }
}

// The first part of a row, of rows `step` bytes apart.
inline Rounded* rounded_row(const char* rows, int64_t step, int64_t row) {
  return reinterpret_cast<Rounded*>(const_cast<char*>(rows) + row * step);
}

// Most rows that are multiplied while a part of a tile is in registers.
constexpr int64_t BLOCK_ROWS = 8;

// M rows, at most BLOCK_ROWS, times the sixteen rows of a weight at `tiles`: out[m * stride + lane]. Rows are `step`
// bytes apart.
void multiply_blocks(int64_t type, const char* x, int64_t step, int64_t M, const uint8_t* tiles, int64_t columns, float* out,
                     int64_t stride);

// The same in two steps, for many rows: first brings columns begin .. end of the tiles, multiples of their blocks, into the
// form in which they are multiplied, then adds their products to sums[m * LANES + lane].
void unpack_blocks(int64_t type, const uint8_t* tiles, int64_t begin, int64_t end, char* to);
void multiply_unpacked(int64_t type, const char* x, int64_t step, int64_t M, const char* weights, int64_t begin, int64_t end,
                       float* sums);

// A part of a tile as numbers, four columns after four: out[column][lane].
template <typename F>
inline void widen_part(const F& block, int part, float (*out)[LANES]) {
  vec_u32 numbers[QUADS];
  block.read(part, numbers);
  for (int i = 0; i < QUADS; ++i) {
    const vec scale = block.scale(part, i / (QUADS / 2));
    for (int j = 0; j < 4; ++j) {
      const vec_i32 whole = (vec_i32)(numbers[i] >> 8 * j & 0xFFu) - static_cast<int32_t>(F::OFFSET);
      vec wide = converted<float>(whole) * scale;
      if constexpr (F::HAS_MINIMUM) wide -= block.minimum(part);
      store(out[4 * i + j], wide);
    }
  }
}

// Calls function(column, values) for each part of columns begin .. end, multiples of the tiles' blocks:
// values[column][lane].
template <typename Function>
inline void read_blocks(int64_t type, const uint8_t* tiles, int64_t begin, int64_t end, const Function& function) {
  with_format(type, [&](auto* format) {
    using F = std::remove_pointer_t<decltype(format)>;
    alignas(64) float values[PART][LANES];
    for (int64_t at = begin; at < end; at += F::BLOCK) {
      const F block(tiles + at / F::BLOCK * LANES * F::BYTES);
      for (int part = 0; part < F::BLOCK / PART; ++part) {
        widen_part(block, part, values);
        function(at + part * PART, values);
      }
    }
  });
}

// Numbers of sixteen rows of a weight: out[row * stride + column].
template <typename T>
void widen_blocks(int64_t type, const uint8_t* tiles, int64_t columns, T* out, int64_t stride);

// Numbers of one of them.
template <typename T>
void widen_row(int64_t type, const uint8_t* tiles, int64_t lane, int64_t columns, T* out);

}  // namespace snapstream
