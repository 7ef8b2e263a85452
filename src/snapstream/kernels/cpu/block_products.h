// Products of rows of activations with weights in blocks. Rows are rounded to 8 bits first, in parts of 32 columns with a
// scale each; sums within a part are exact integers. The result of a row depends only on that row, bit for bit.
#pragma once
#include "blocks.h"

namespace snapstream {

// A row of activations as it is multiplied with blocks.
struct Rounded {
  explicit Rounded(char* memory, int64_t columns)
      : numbers(reinterpret_cast<int8_t*>(memory)), scales(reinterpret_cast<float*>(memory + columns)),
        totals(scales + columns / PART), sums(reinterpret_cast<int32_t*>(totals + columns / PART)) {}

  static int64_t bytes(int64_t columns) { return columns + columns / PART * 16; }

  int8_t* numbers;
  float* scales;  // of each part
  float* totals;  // of each part: its scale times the sum of its numbers
  int32_t* sums;  // of each half of a part: the sum of its numbers
};

// Rounds a row. Parts with numbers that are not finite become NaN.
template <typename T>
inline void round_row(const T* from, int64_t columns, const Rounded& to) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, to nearest, ties to even
  for (int64_t part = 0; part < columns / PART; ++part) {
    vec x[2], most{};
    for (int half = 0; half < 2; ++half) {
      x[half] = load_numbers(from + part * PART + half * LANES);
      most = larger(most, (vec)((vec_u32)x[half] & 0x7FFFFFFFu));
    }
    const float peak = largest(most);
    const bool finite = !any(~(x[0] * 0.0f + x[1] * 0.0f == 0.0f));
    const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    int32_t sum = 0;
    for (int half = 0; half < 2; ++half) {
      const vec_i32 whole = (vec_i32)(x[half] * inverse + MAGIC) - 0x4B400000;
      store_bytes(to.numbers + part * PART + half * LANES, whole);
      const int32_t own = static_cast<int32_t>(snapstream::sum(__builtin_convertvector(whole, vec)));
      to.sums[2 * part + half] = own, sum += own;
    }
    to.scales[part] = finite ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN();
    to.totals[part] = to.scales[part] * static_cast<float>(sum);
  }
}

// Most rows that are multiplied while a part of a tile is in registers.
constexpr int64_t BLOCK_ROWS = 8;

// M rows, at most BLOCK_ROWS, times the sixteen rows of a weight at `tiles`: out[m * stride + lane]. Rows are `step`
// bytes apart.
void multiply_blocks(int64_t type, const char* x, int64_t step, int64_t M, const uint8_t* tiles, int64_t columns, float* out,
                     int64_t stride);

// Numbers of sixteen rows of a weight: out[row * stride + column].
template <typename T>
void widen_blocks(int64_t type, const uint8_t* tiles, int64_t columns, T* out, int64_t stride);

// Numbers of one of them.
template <typename T>
void widen_row(int64_t type, const uint8_t* tiles, int64_t lane, int64_t columns, T* out);

}  // namespace snapstream
