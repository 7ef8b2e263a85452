// Weights in blocks: brings them into tiles, and widens them.
#include "block_products.h"
#include "step.h"
#include "team.h"

namespace snapstream {
namespace {

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
