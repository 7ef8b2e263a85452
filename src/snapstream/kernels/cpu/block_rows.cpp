// Weights in blocks: brings them into tiles, widens them, and multiplies the many rows of a prompt.
#include "block_products.h"
#include "memory.h"
#include "step.h"
#include "step_rows.h"
#include "team.h"

namespace snapstream {
namespace {

// A unit of work.
constexpr int64_t COLUMNS_AT_ONCE = 1024, TILES_AT_ONCE = 8, MANY_ROWS = 256;
constexpr int64_t SUMS = TILES_AT_ONCE * MANY_ROWS * LANES;

// Tiles of sixteen rows, transposed field by field.
struct Packing {
  explicit Packing(const Stored& stored) : p(stored), zeros(p.columns / p.block * p.bytes) {}

  void operator()(int64_t group) const {
    const int64_t blocks = p.columns / p.block, bytes = p.bytes;
    const uint8_t* rows[LANES];
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const int64_t row = group * LANES + lane;
      rows[lane] = row < p.rows ? p.rows_from + (p.order == nullptr ? row : p.order[row]) * blocks * bytes : zeros.data();
    }
    uint8_t* tile = p.tiles + group * blocks * LANES * bytes;
    for (int64_t at = 0; at < blocks; ++at, tile += LANES * bytes) {
      uint8_t* to = tile;
      int64_t from = at * bytes;
      for (int64_t field = 0; field < p.fields; ++field) {
        const int64_t count = p.counts[field];
        switch (p.widths[field]) {
          case 1: to = transpose<uint8_t>(rows, from, count, to); break;
          case 2: to = transpose<uint16_t>(rows, from, count, to); break;
          default: to = transpose<uint32_t>(rows, from, count, to);
        }
        from += count * p.widths[field];
      }
      if (p.type == Q8_0)
        for (uint8_t* number = to - LANES * 32; number < to; ++number) *number ^= 0x80;
      if (p.type == Q5_0 || p.type == Q5_1)
        for (int64_t lane = 0; lane < LANES; ++lane) spread(to - LANES * 20 + lane * 4);
    }
  }

 private:
  template <typename N>
  static uint8_t* transpose(const uint8_t* const* rows, int64_t from, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count; ++i, from += sizeof(N))
      for (int64_t lane = 0; lane < LANES; ++lane, to += sizeof(N)) std::memcpy(to, rows[lane] + from, sizeof(N));
    return to;
  }

  // Bit 4 * i + j, of column 4 * i + j, becomes bit i of byte j.
  static void spread(uint8_t* four) {
    uint32_t bits;
    std::memcpy(&bits, four, sizeof(bits));
    for (int j = 0; j < 4; ++j) {
      four[j] = 0;
      for (int i = 0; i < QUADS; ++i) four[j] |= (bits >> (4 * i + j) & 1) << i;
    }
  }

  const Stored& p;
  std::vector<uint8_t> zeros;  // the rows that the last tile lacks
};

// All rows by one weight: first rounds them, then takes a few of them by a few tiles at once.
template <typename T>
class Multiplication : public Work {
 public:
  Multiplication(const BlockProduct& product, int64_t threads)
      : p(product), step(Rounded::bytes(p.weight.columns)), tiles((p.weight.rows + LANES - 1) / LANES),
        groups((tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE), unpacked(threads * unpacked_bytes(COLUMNS_AT_ONCE)),
        sums(threads * SUMS) {
    divisor = 4;
  }

  int64_t next_phase() override {
    switch (phase++) {
      case 0: return p.count;
      case 1: return (p.count + MANY_ROWS - 1) / MANY_ROWS * groups;
      default: return 0;
    }
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    for (int64_t unit = begin; unit < end; ++unit) {
      if (phase == 1) {
        round_row(at<T>(p.source, unit), p.weight.columns, rounded_row(p.rounded, step, unit));
      } else {
        multiply(unit / groups * MANY_ROWS, unit % groups * TILES_AT_ONCE, thread);
      }
    }
  }

 private:
  // Some columns of rows stay in the second-level cache while all tiles pass, those of a tile in the first-level one.
  void multiply(int64_t first_row, int64_t first_tile, int64_t thread) {
    const int64_t last_row = std::min(first_row + MANY_ROWS, p.count), columns = p.weight.columns;
    const int64_t last_tile = std::min(first_tile + TILES_AT_ONCE, tiles), count = last_row - first_row;
    char* weights = unpacked.get() + thread * unpacked_bytes(COLUMNS_AT_ONCE);
    float* own = sums.get() + thread * SUMS;
    for (int64_t tile = 0; tile < last_tile - first_tile; ++tile) std::fill_n(own + tile * MANY_ROWS * LANES, count * LANES, 0.0f);
    for (int64_t begin = 0; begin < columns; begin += COLUMNS_AT_ONCE) {
      const int64_t end = std::min(begin + COLUMNS_AT_ONCE, columns);
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        unpack_blocks(p.weight.type, tile_of(p.weight, 0, tile * LANES), begin, end, weights);
        float* of_tile = own + (tile - first_tile) * MANY_ROWS * LANES;
        for (int64_t row = 0; row < count; row += BLOCK_ROWS)
          multiply_unpacked(p.weight.type, p.rounded + (first_row + row) * step, step, std::min(BLOCK_ROWS, count - row), weights,
                            begin, end, of_tile + row * LANES);
      }
    }
    for (int64_t tile = first_tile; tile < last_tile; ++tile)
      for (int64_t row = 0; row < count; ++row)
        finish(first_row + row, tile * LANES, own + ((tile - first_tile) * MANY_ROWS + row) * LANES);
  }

  void finish(int64_t row, int64_t n, const float* total) {
    const int64_t count = std::min<int64_t>(LANES, p.weight.rows - n);
    const vec y = load(total) + (p.bias.data == nullptr ? vec{} : some(p.bias, n, count));
    if (p.target.type == FLOAT32) put(at<float>(p.target, row) + n, y, count);
    else put(at<bfloat16>(p.target, row) + n, y, count);
  }

  const BlockProduct& p;
  int64_t step, tiles, groups, phase = 0;
  Memory<char> unpacked;  // per thread: some columns of a tile
  Memory<float> sums;     // per thread: of each tile and row
};

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Brings rows as GGUF stores them into tiles.
EXPORT int64_t snapstream_pack(const Stored* stored, int64_t threads) {
  try {
    share_out(threads, (stored->rows + LANES - 1) / LANES, [&] { return Packing(*stored); });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Multiplies rows by a weight in blocks.
EXPORT int64_t snapstream_multiply(const BlockProduct* product, int64_t threads) {
  try {
    return with_type(product->source.type, [&](auto number) {
      Multiplication<decltype(number)> work(*product, threads);
      run_team(work, threads);
      return int64_t{true};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Widens the first matrix of a weight in blocks to [rows, columns] of the target's type.
EXPORT int64_t snapstream_widen(const Weight* weight, const BufferView* target, int64_t threads) {
  try {
    return with_type(target->type, [&](auto number) {
      using T = decltype(number);
      const auto widen = [&] {
        return [&](int64_t group) {
          const int64_t n = group * LANES, count = std::min<int64_t>(LANES, weight->rows - n);
          if (count == LANES) return widen_blocks(weight->type, tile_of(*weight, 0, n), weight->columns, at<T>(*target, n), target->row);
          for (int64_t lane = 0; lane < count; ++lane)
            widen_row(weight->type, tile_of(*weight, 0, n), lane, weight->columns, at<T>(*target, n + lane));
        };
      };
      share_out(threads, (weight->rows + LANES - 1) / LANES, widen);
      return int64_t{true};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}
