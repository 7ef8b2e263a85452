// Matrix products of a prompt's rows: first the rows are brought into the form in which weights multiply them, then a
// thread takes some weights at a time by up to 512 rows.
#pragma once
#include <vector>

#include "panels.h"
#include "step_experts.h"
#include "step_products.h"

namespace snapstream {

// How rows are multiplied: as numbers in one of three ways, see panels.h, or as bytes, see block_products.h.
enum class Way { FLOATS, PAIRS, TILES, BYTES };

// Products of activations of type T.
template <typename T>
class PromptProducts {
 public:
  PromptProducts(Step& step, ProductOperations<T>& products, int64_t threads, Scratch& scratch)
      : s(step), products(products), threads(threads) {
    if (!s.p.many) return;
    int64_t rows_size = 0;
    for (int64_t i = 0; i < s.p.count; ++i)
      if (s.p.operations[i].kind == Kind::Sort) copies = std::max(copies, s.p.operations[i].sort.experts.size);
    const auto needs = [&](const auto& o) {
      if constexpr (requires { o.weight.columns; }) {
        const int64_t blocks = most_blocks(o);
        rows_size = std::max(rows_size, blocks * block_bytes(way_of(o.weight), o.source.size));
        most = std::max(most, blocks);
      }
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) visit(s.p.operations[i], needs);
    rows = scratch.reserve<char>(rows_size);
    panels = scratch.reserve<char>(most ? threads * PANEL_BYTES : 0);
    sums = scratch.reserve<float>(most ? threads * SUMS : 0);
  }

  // Allocates what a launch needs besides its scratch.
  void prepare() { blocks.reserve(most), groups.reserve(most); }

  // Units of the first phase of a product.
  int64_t plan(const Product& o) { return plan_rows(o.weight, o.source.size, units_of(o.target.size)); }
  int64_t plan(const GatedProduct& o) { return plan_rows(o.weight, o.source.size, 2 * units_of(o.target.size)); }
  int64_t plan(const HeadProduct& o) {
    begin(o.weight, o.source.size, units_of(o.target.size));
    for (int64_t head = 0; head < o.source.heads; ++head) add_rows(head, 0, s.row_count());
    return static_cast<int64_t>(blocks.size());
  }
  int64_t plan(const ExpertProduct& o) {
    begin(o.weight, o.source.size, units_of(o.target.size) * (gates(o) ? 2 : 1));
    const int64_t* ends = at<int64_t>(o.ends, 0);
    for (int64_t expert = 0; expert < o.ends.size; ++expert) add_rows(expert, expert ? ends[expert - 1] : 0, ends[expert]);
    return static_cast<int64_t>(blocks.size());
  }

  // Units of the second phase; 0 after it.
  int64_t next() {
    if (stage != 1) return stage = 0;
    stage = 2;
    // Wide enough to read rows rarely, but at least a few units per thread.
    const int64_t fair = halves * static_cast<int64_t>(groups.size()) / (4 * threads) / 2 * 2;
    width = std::clamp<int64_t>(fair, 2, MOST_HALVES);
    return (halves + width - 1) / width * groups.size();
  }

  template <typename O>
  void run(const O& o, int64_t first, int64_t end, int64_t thread) {
    for (int64_t unit = first; unit < end; ++unit) {
      if (stage == 1) {
        with_form([&](auto f) { bring<decltype(f)>(o.source, is_heads<O>, blocks[unit], unit); });
        continue;
      }
      const int64_t strip = unit / groups.size() * width, last = std::min(strip + width, halves);
      const Group group = groups[unit % groups.size()];
      Halves some{o.weight, group.matrix, strip, last, o.target.size};
      if (gates(o)) some.inner = o.target.size;
      if constexpr (is_heads<O>) some.transposed = o.transposed;
      float* own = sums + thread * SUMS;
      const auto done = [&](int64_t row, int64_t count) { finish(o, some, group, own, row, count); };
      const int64_t next = unit + 1, of_groups = groups.size();
      const After after{next / of_groups * width, groups[next % of_groups].matrix};
      with_form([&](auto f) { multiply<decltype(f)>(o, some, group, after, thread, own, done); });
    }
  }

 private:
  static constexpr int64_t MOST_ROWS = 512;         // that panels are multiplied by before the next ones are made
  static constexpr int64_t MOST_ROUNDED = 256;      // the same of rows in bytes, which take more room
  static constexpr int64_t MOST_HALVES = 8;         // halves of panels of a unit
  static constexpr int64_t COLUMNS_AT_ONCE = 1024;  // of blocks that are multiplied as bytes
  static constexpr int64_t SUMS = MOST_HALVES * LANES * MOST_ROWS;
  static constexpr int64_t PANEL_BYTES = MOST_HALVES * LANES * DEPTH * sizeof(float);

  template <typename O>
  static constexpr bool is_heads = std::is_same_v<O, HeadProduct>;

  // Whether the rows of a weight are gates and what they let through.
  template <typename O>
  static bool gates(const O& o) {
    if constexpr (std::is_same_v<O, ExpertProduct>) return o.gated;
    return std::is_same_v<O, GatedProduct>;
  }

  struct Bytes {};  // stands for rows that are rounded to 8 bits

  // Up to HEIGHT rows by one matrix.
  struct Block {
    int64_t matrix, first, count;
  };
  // Up to MOST_ROWS rows in blocks one after another.
  struct Group {
    int64_t matrix, block, blocks, rows;
  };
  // The unit that comes next.
  struct After {
    int64_t strip, matrix;
  };
  // Which sixteen rows of a weight halves of panels have. Gates and what they let through alternate.
  struct Halves {
    const Weight& weight;
    int64_t matrix, first, end;
    int64_t rows, inner = 0;  // of a matrix; of them gates, if there are any
    bool transposed = false;

    int64_t row(int64_t half) const { return inner ? half % 2 * inner + half / 2 * LANES : half * LANES; }
    int64_t size(int64_t half) const {
      return std::min<int64_t>(LANES, inner ? inner - half / 2 * LANES : rows - half * LANES);
    }
  };

  Way way_of(const Weight& weight) const {
    bool numbers = false, wide = std::is_same_v<T, float>, some_blocks = false;
    for (const Weight* part = &weight; part != nullptr; part = static_cast<const Weight*>(part->more)) {
      if (in_blocks(part->type)) some_blocks = true;
      else numbers = true, wide = wide || part->type == FLOAT32;
    }
    const bool tiles = s.p.instructions == TILES;
    if (some_blocks && !numbers && (wide || !tiles)) return Way::BYTES;
    if (wide) return Way::FLOATS;
    return tiles ? Way::TILES : s.p.instructions == PAIRS ? Way::PAIRS : Way::FLOATS;
  }

  template <typename Function>
  void with_form(const Function& function) const {
    if (way == Way::BYTES) return function(Bytes());
    if constexpr (std::is_same_v<T, bfloat16>) {
#if defined(SNAPSTREAM_TILES)
      if (way == Way::TILES) return function(TileForm());
#endif
#if defined(__AVX512BF16__)
      if (way == Way::PAIRS) return function(PairForm());
#endif
    }
    function(FloatForm());
  }

  static int64_t block_bytes(Way way, int64_t size) {
    if (way == Way::BYTES) return HEIGHT * Rounded::bytes(size);
    return HEIGHT * (size + SPARE) * static_cast<int64_t>(way == Way::FLOATS ? sizeof(float) : sizeof(bfloat16));
  }

  template <typename O>
  int64_t most_blocks(const O& o) const {
    const int64_t of_rows = (s.row_limit + HEIGHT - 1) / HEIGHT;
    if constexpr (is_heads<O>) return of_rows * o.source.heads;
    if constexpr (std::is_same_v<O, ExpertProduct>) return (s.row_limit * copies + HEIGHT - 1) / HEIGHT + o.ends.size;
    return of_rows;
  }

  void begin(const Weight& weight, int64_t size, int64_t count) {
    way = way_of(weight), halves = count, step = block_bytes(way, size);
    blocks.clear(), groups.clear(), stage = 1;
  }

  int64_t plan_rows(const Weight& weight, int64_t size, int64_t count) {
    begin(weight, size, count);
    add_rows(0, 0, s.row_count());
    return static_cast<int64_t>(blocks.size());
  }

  void add_rows(int64_t matrix, int64_t first, int64_t end) {
    const int64_t most_rows = way == Way::BYTES ? MOST_ROUNDED : MOST_ROWS;
    for (int64_t from = first; from < end; from += most_rows) {
      const int64_t rows = std::min(most_rows, end - from), before = blocks.size();
      for (int64_t row = 0; row < rows; row += HEIGHT) blocks.push_back({matrix, from + row, std::min(HEIGHT, rows - row)});
      groups.push_back({matrix, before, static_cast<int64_t>(blocks.size()) - before, rows});
    }
  }

  // First phase: brings the rows of a block into their form.
  template <typename F>
  void bring(const BufferView& source, bool of_head, const Block& block, int64_t number) {
    const auto row_at = [&](int64_t row) { return at<T>(source, block.first + row, of_head ? block.matrix : 0); };
    char* to = rows + number * step;
    if constexpr (std::is_same_v<F, Bytes>) {
      for (int64_t row = 0; row < block.count; ++row)
        round_row(row_at(row), source.size, rounded_row(to, Rounded::bytes(source.size), row));
    } else if (!stays<F, T>(block.count, source.size, source.row)) {
      copy_rows<F, T>(block.count, source.size, reinterpret_cast<typename F::Number*>(to), row_at);
    }
  }

  // Second phase: sums of the rows of a group by some halves of panels; done(row, count) is told which are complete.
  template <typename F, typename O, typename Done>
  void multiply(const O& o, const Halves& some, const Group& group, const After& after, int64_t thread, float* own,
                const Done& done) {
    static_assert(PANEL_BYTES >= COLUMNS_AT_ONCE / PART * (QUADS + 2) * sizeof(vec), "room for what is unpacked");
    char* memory = panels + thread * PANEL_BYTES;
    const int64_t size = o.source.size, count = some.end - some.first;
    if constexpr (std::is_same_v<F, Bytes>) {
      multiply_bytes(some, size, group, memory, own);
      done(0, group.rows);
    } else {
      constexpr int64_t PANEL_SIZE = DEPTH / F::PER_OPERAND * PANEL;
      using Number = typename F::Number;
      [[maybe_unused]] const typename F::Session session{};
      auto* panel = reinterpret_cast<typename F::Operand*>(memory);
      const int64_t calls = group.blocks * ((count + 1) / 2);
      for (int64_t begin = 0; begin < size; begin += DEPTH) {
        const int64_t depth = std::min(DEPTH, round_up(size - begin, PAIR)), end = begin + depth;
        for (int64_t i = 0; i < count; ++i) {
          int64_t n = some.row(some.first + i);
          const int64_t rows = some.size(some.first + i);
          auto* to = panel + i / 2 * PANEL_SIZE + i % 2 * LANES;
          if (some.transposed) {
            pack_transposed<F>(some.weight, some.matrix, n, rows, begin, end, size, to);
          } else {
            const Weight& part = part_of(some.weight, n);
            pack_weights<F>(part, some.matrix, n, rows, begin, end, to);
          }
        }
        // Meanwhile, memory is asked for the weights that come next.
        const int64_t first_after = end < size ? some.first : after.strip, begin_after = end < size ? end : 0;
        const int64_t matrix_after = end < size ? some.matrix : after.matrix;
        int64_t call = 0, asked = 0;
        for (int64_t b = 0; b < group.blocks; ++b) {
          const Block& block = blocks[group.block + b];
          const Number* from = reinterpret_cast<const Number*>(rows + (group.block + b) * step);
          int64_t distance = size + SPARE;
          if constexpr (std::is_same_v<Number, T>)
            if (stays<F, T>(block.count, size, o.source.row)) from = at<T>(o.source, block.first, is_heads<O> ? block.matrix : 0), distance = o.source.row;
          for (int64_t i = 0; i < count; i += 2) {
            for (const int64_t until = ++call * count * LANES / calls; asked < until; ++asked)
              prefetch(some, matrix_after, first_after + asked / LANES, asked % LANES, begin_after, size);
            F::multiply(from + begin, distance, block.count, depth, panel + i / 2 * PANEL_SIZE, sums_at(own, i, b), begin > 0);
          }
          if (end >= size) done(b * HEIGHT, block.count);
        }
      }
    }
  }

  // Asks for a row of half a panel, or a sixteenth of its blocks.
  void prefetch(const Halves& some, int64_t matrix, int64_t half, int64_t sixteenth, int64_t begin, int64_t size) const {
    if (some.transposed || half >= halves || sixteenth >= some.size(half)) return;
    int64_t n = some.row(half);
    const Weight& part = part_of(some.weight, n);
    prefetch_weights(part, matrix, n, begin, std::min(begin + DEPTH, size), sixteenth);
  }

  // Some columns of the rows stay in the second-level cache while all tiles pass, those of a tile in the first-level one.
  void multiply_bytes(const Halves& some, int64_t size, const Group& group, char* unpacked, float* own) {
    const int64_t bytes = Rounded::bytes(size);
    for (int64_t i = 0; i < some.end - some.first; ++i) std::fill_n(own + i * MOST_ROWS * LANES, group.blocks * HEIGHT * LANES, 0.0f);
    for (int64_t begin = 0; begin < size; begin += COLUMNS_AT_ONCE) {
      const int64_t end = std::min(begin + COLUMNS_AT_ONCE, size);
      for (int64_t i = 0; i < some.end - some.first; ++i) {
        int64_t n = some.row(some.first + i);
        const Weight& part = part_of(some.weight, n);
        unpack_blocks(part.type, tile_of(part, some.matrix, n), begin, end, unpacked);
        const char* from = rows + group.block * step;  // blocks of bytes have nothing between them
        for (int64_t row = 0; row < group.rows; row += BLOCK_ROWS)
          multiply_unpacked(part.type, from + row * bytes, bytes, std::min(BLOCK_ROWS, group.rows - row), unpacked, begin, end,
                            own + (i * MOST_ROWS + row) * LANES);
      }
    }
  }

  // Where the sums of a half of a panel begin, for a block of rows.
  static float* sums_at(float* own, int64_t half, int64_t block) {
    return own + (half / 2 * MOST_ROWS / HEIGHT + block) * HEIGHT * PANEL + half % 2 * LANES;
  }

  const float* sums_of(const float* own, int64_t half, int64_t row) const {
    if (way == Way::BYTES) return own + (half * MOST_ROWS + row) * LANES;
    return sums_at(const_cast<float*>(own), half, row / HEIGHT) + row % HEIGHT * PANEL;
  }

  template <typename O>
  void finish(const O& o, const Halves& some, const Group& group, const float* own, int64_t from_row, int64_t count_of_rows) {
    const int64_t first = blocks[group.block].first;
    if constexpr (std::is_same_v<O, Product>) {
      if (o.bias.data == nullptr && !o.add && o.factor == 1.0 && o.target.type != FLOAT32) {  // most are
        for (int64_t row = from_row; row < from_row + count_of_rows; ++row) {
          T* to = at<T>(o.target, first + row);
          for (int64_t i = 0; i < some.end - some.first; ++i)
            put(to + some.row(some.first + i), load(sums_of(own, i, row)), some.size(some.first + i));
        }
        return;
      }
    }
    for (int64_t row = from_row; row < from_row + count_of_rows; ++row) {
      for (int64_t i = 0; i < some.end - some.first; i += some.inner ? 2 : 1) {
        const int64_t n = some.row(some.first + i), count = some.size(some.first + i);
        const float* from = sums_of(own, i, row);
        if (some.inner) {
          if constexpr (requires { o.activation; })
            products.gate(o, group.matrix, first + row, n, count, from, sums_of(own, i + 1, row));
        } else if constexpr (!std::is_same_v<O, GatedProduct>) {
          products.finish(o, group.matrix, first + row, n, count, from);
        }
      }
    }
  }

  Step& s;
  ProductOperations<T>& products;
  const int64_t threads;
  int64_t copies = 1;        // rows per token that experts have at most
  int64_t most = 0;          // blocks of rows
  char* rows = nullptr;      // in their form, block by block
  char* panels = nullptr;    // per thread
  float* sums = nullptr;     // per thread
  Way way = Way::FLOATS;
  int64_t step = 0, halves = 0, width = 0, stage = 0;
  std::vector<Block> blocks;
  std::vector<Group> groups;
};

}  // namespace snapstream
