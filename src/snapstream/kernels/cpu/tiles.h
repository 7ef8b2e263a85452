// Tile registers (AMX), and products of few rows in them.
#pragma once
#include "transpose.h"

#if defined(SNAPSTREAM_TILES)
namespace snapstream {

// Eight registers of up to 16 rows of 64 bytes. One instruction multiplies 16 x 32 by 32 x 16 bfloat16.
struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  // The compiler's own intrinsic does not declare that it reads the whole structure.
  void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};

// Clears registers 0 to 3.
inline void clear_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Held while a thread uses tile registers.
struct TileSession {
  explicit TileSession(const TileConfiguration& configuration = {}) { configuration.load(); }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
};

// Products of up to ROWS rows: the instructions for one suffice for all. Weights are the left operand, as they are in memory:
// LANES of them, PAIR columns at a time. Rows are the right one, packed: [columns / 2][ROWS] pairs.
template <int ROWS>
struct TileProduct {
  using Number = bfloat16;  // of weights
  using Left = bfloat16;    // of packed rows
  static constexpr int64_t ROW_BYTES = ROWS * sizeof(float);  // of pairs and of sums

  // Registers 0 and 1 are for sums, 4 and 5 for `count` weights, 6 and 7 for rows.
  static TileConfiguration configuration(int64_t count = LANES) {
    TileConfiguration c;
    for (const int sums : {0, 1}) c.rows[sums] = count, c.bytes_per_row[sums] = ROW_BYTES;
    for (const int weights : {4, 5}) c.rows[weights] = count;
    for (const int rows : {6, 7}) c.bytes_per_row[rows] = ROW_BYTES;
    return c;
  }

  // Packs row m, after those before it.
  static void pack(const bfloat16* row, int64_t columns, int64_t m, bfloat16* packed) {
    bfloat16* group = packed + m / ROWS * ROWS * columns;
    if (m % ROWS == 0) std::fill_n(group, ROWS * columns, bfloat16());
    for (int64_t k = 0; k < columns; k += 2) std::memcpy(group + k * ROWS + m % ROWS * 2, row + k, 2 * sizeof(bfloat16));
  }

  // out[m * stride + n] of M rows and `count` weights, at most LANES. The session has the configuration above.
  static void multiply(const bfloat16* packed, int64_t M, const bfloat16* weight, int64_t columns, int64_t count, float* out,
                       int64_t stride) {
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(bfloat16));
    const auto prefetch = [&](int64_t k) {
      for (int64_t n = 0; n < LANES; ++n)
        __builtin_prefetch(reinterpret_cast<const char*>(weight + k) + n * bytes + AHEAD_BYTES, 0, 2);
    };
    if (count < LANES) configuration(count).load();
    _tile_zero(0);
    _tile_zero(1);
    int64_t k = 0;
    for (; k + 2 * PAIR <= columns; k += 2 * PAIR) {
      prefetch(k), prefetch(k + PAIR);
      _tile_loadd(4, weight + k, bytes);
      _tile_loadd(6, packed + k * ROWS, ROW_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weight + k + PAIR, bytes);
      _tile_loadd(7, packed + (k + PAIR) * ROWS, ROW_BYTES);
      _tile_dpbf16ps(1, 5, 7);
    }
    if (k < columns) {
      prefetch(k);
      _tile_loadd(4, weight + k, bytes);
      _tile_loadd(6, packed + k * ROWS, ROW_BYTES);
      _tile_dpbf16ps(0, 4, 6);
    }
    alignas(64) float sums[2][LANES * LANES] = {};  // a vector per weight
    _tile_stored(0, sums[0], sizeof(vec));
    _tile_stored(1, sums[1], sizeof(vec));
    if (count < LANES) configuration().load();
    vec_u32 rows[LANES];
    UNROLL for (int n = 0; n < LANES; ++n) rows[n] = (vec_u32)(load(sums[0] + n * LANES) + load(sums[1] + n * LANES));
    transpose(rows);
    for (int64_t m = 0; m < M; ++m) store_u32(out + m * stride, rows[m]);
  }
};

}  // namespace snapstream
#endif
