// Weights in blocks: brings them into tiles, widens them, and multiplies the many rows of a prompt.
#include "block_products.h"
#include "step.h"
#include "step_rows.h"
#include "team.h"

namespace snapstream {
namespace {

constexpr int64_t CACHED = 512 * 1024;  // bytes of rounded rows that fit the second-level cache with some weights
constexpr int64_t TILES_AT_ONCE = 8;    // tiles in a unit of work

// Tiles of sixteen rows, transposed field by field.
struct Packing {
  const Stored& p;

  void operator()(int64_t group) const {
    const int64_t blocks = p.columns / p.block, bytes = p.bytes;
    for (int64_t at = 0; at < blocks; ++at) {
      uint8_t* to = p.tiles + (group * blocks + at) * LANES * bytes;
      int64_t from = 0;
      for (int64_t field = 0; field < p.fields; ++field) {
        const int64_t count = p.counts[field], width = p.widths[field];
        for (int64_t i = 0; i < count; ++i, from += width, to += LANES * width)
          for (int64_t lane = 0; lane < LANES; ++lane) put(group * LANES + lane, at * bytes + from, width, to + lane * width);
      }
      if (p.type == Q8_0) {
        uint8_t* numbers = to - LANES * 32;
        for (int64_t i = 0; i < LANES * 32; ++i) numbers[i] ^= 0x80;
      }
      if (p.type == Q5_0 || p.type == Q5_1)
        for (int64_t lane = 0; lane < LANES; ++lane) spread(to - LANES * 20 + lane * 4);
    }
  }

 private:
  void put(int64_t row, int64_t offset, int64_t width, uint8_t* to) const {
    if (row >= p.rows) return std::fill_n(to, width, 0), void();
    const uint8_t* from = p.rows_from + (p.order == nullptr ? row : p.order[row]) * (p.columns / p.block * p.bytes) + offset;
    if (width == 4) std::memcpy(to, from, 4);
    else std::memcpy(to, from, width);
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
};

// All rows by one weight: first rounds them, then takes a few of them by a few tiles at once.
template <typename T>
class Multiplication : public Work {
 public:
  explicit Multiplication(const BlockProduct& product)
      : p(product), step(Rounded::bytes(p.weight.columns)), at_once(std::max(CACHED / step / BLOCK_ROWS, int64_t{1}) * BLOCK_ROWS),
        tiles((p.weight.rows + LANES - 1) / LANES), groups((tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE) {
    divisor = 4;
  }

  int64_t next_phase() override {
    switch (phase++) {
      case 0: return p.count;
      case 1: return (p.count + at_once - 1) / at_once * groups;
      default: return 0;
    }
  }

  void run(int64_t begin, int64_t end, int64_t) override {
    for (int64_t unit = begin; unit < end; ++unit) {
      if (phase == 1) {
        round_row(at<T>(p.source, unit), p.weight.columns, Rounded(p.rounded + unit * step, p.weight.columns));
      } else {
        multiply(unit / groups * at_once, unit % groups * TILES_AT_ONCE);
      }
    }
  }

 private:
  void multiply(int64_t first_row, int64_t first_tile) {
    const int64_t last_row = std::min(first_row + at_once, p.count), columns = p.weight.columns;
    for (int64_t tile = first_tile; tile < std::min(first_tile + TILES_AT_ONCE, tiles); ++tile) {
      const int64_t n = tile * LANES, count = std::min<int64_t>(LANES, p.weight.rows - n);
      const vec bias = p.bias.data == nullptr ? vec{} : some_of(p.bias, n, count);
      for (int64_t row = first_row; row < last_row; row += BLOCK_ROWS) {
        const int64_t M = std::min(BLOCK_ROWS, last_row - row);
        alignas(64) float sums[BLOCK_ROWS * LANES];
        multiply_blocks(p.weight.type, p.rounded + row * step, step, M, tile_of(p.weight, 0, n), columns, sums, LANES);
        for (int64_t m = 0; m < M; ++m) {
          const vec y = load(sums + m * LANES) + bias;
          if (p.target.type == FLOAT32) put(at<float>(p.target, row + m) + n, y, count);
          else put(at<bfloat16>(p.target, row + m) + n, y, count);
        }
      }
    }
  }

  static vec some_of(const Vector& vector, int64_t n, int64_t count) {
    return vector.type == FLOAT32 ? some(numbers<float>(vector) + n, count) : some(numbers<bfloat16>(vector) + n, count);
  }

  const BlockProduct& p;
  int64_t step, at_once, tiles, groups;
  int64_t phase = 0;
};

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Brings rows as GGUF stores them into tiles.
EXPORT int64_t snapstream_pack(const Stored* stored, int64_t threads) {
  try {
    share_out(threads, (stored->rows + LANES - 1) / LANES, [&] { return Packing{*stored}; });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Multiplies rows by a weight in blocks.
EXPORT int64_t snapstream_multiply(const BlockProduct* product, int64_t threads) {
  return with_type(product->source.type, [&](auto number) {
    Multiplication<decltype(number)> work(*product);
    run_team(work, threads);
    return int64_t{true};
  });
}

// Widens the first matrix of a weight in blocks to [rows, columns] of the target's type.
EXPORT int64_t snapstream_widen(const Weight* weight, const Part* target, int64_t threads) {
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
