#include "step.h"

#include <atomic>
#include <memory>
#include <new>

#include "decode_attention.h"
#include "instructions.h"
#include "products.h"
#include "team.h"

namespace snapstream {
namespace {

constexpr int64_t UNIT = 16;  // weights of a unit of work

// x / (1 + exp(-x)), of which exp(-|x|) alone is needed.
vec silu(vec x) {
  const vec e = exp_nonpositive(select(x > 0.0f, -x, x));
  return select(x > 0.0f, x, x * e) / (1.0f + e);
}

// Memory for temporaries: of how many bytes, and where they begin.
class Scratch {
 public:
  explicit Scratch(char* memory) : memory(memory) {}

  template <typename T>
  T* reserve(int64_t count) {
    constexpr int64_t LINE = 64;
    T* place = reinterpret_cast<T*>(memory + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + LINE - 1) / LINE * LINE;
    return place;
  }

  int64_t bytes = 0;

 private:
  char* memory;
};

// A launch: operations first .. last of a program, for one or more tokens in a row.
template <typename A>
class Launch : public Work {
 public:
  using T = typename A::Number;
  using Left = typename A::Left::Number;

  Launch(const Program& program, int64_t threads, Scratch& scratch) : p(program) {
    int64_t depth = 0, states = 0, heads = 0, chosen = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const Operation& o = p.operations[i];
      if (o.kind == PRODUCT || o.kind == GATED_PRODUCT || o.kind == HEAD_PRODUCT || o.kind == EXPERT_GATED_PRODUCT ||
          o.kind == EXPERT_PRODUCT)
        depth = std::max(depth, o.source.size);
      if (o.kind == ATTEND) {
        splits = (p.entries + SPLIT - 1) / SPLIT;
        heads = std::max(heads, o.source.heads);
        states = std::max(states, p.slots * p.tokens * o.source.heads * splits * state_size(o.target.size));
      }
      if (o.kind == SORT) chosen = std::max(chosen, o.other.size);
    }
    left_size = std::max(ROWS_AT_ONCE * depth, p.kv_heads ? heads / p.kv_heads * p.size : 0);
    block_size = p.tokens > 1 ? ENTRIES * p.size : 0;
    left = scratch.reserve<Left>(threads * left_size);
    blocks = scratch.reserve<T>(2 * threads * block_size);
    state = scratch.reserve<float>(states);
    sorted_at = scratch.reserve<int64_t>(p.slots * p.tokens * chosen);
    fraction = 2 * threads;
  }

  void prepare(int64_t first, int64_t last, int64_t steps) {
    const int64_t most = p.slots * p.tokens;
    waiting.reset(new std::atomic<int64_t>[std::max<int64_t>(1, p.slots * p.kv_heads)]);
    place.resize(most), seen.resize(most), rows.reserve(most);
    this->first = first, this->last = last, this->steps = steps;
    step = 0, next = first;
    begin_step();
  }

  int64_t next_phase() override {
    while (next == last) {
      if (++step >= steps) return 0;
      next = first;
      begin_step();
    }
    if (rows.empty()) {
      step = steps, next = last;
      return 0;
    }
    now = &p.operations[next++];
    return units();
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    const Operation& o = *now;
    switch (o.kind) {
      case EMBED: return each_row(begin, end, [&](int64_t row) { embed(o, row); });
      case ANGLES: return each_row(begin, end, [&](int64_t row) { angles(o, row); });
      case NORM: return each_row(begin, end, [&](int64_t row) { norm(o, row); });
      case PRODUCT: return product(o, begin, end, thread);
      case GATED_PRODUCT: return gated_product(o, begin, end, thread);
      case HEAD_PRODUCT: return head_product(o, begin, end, thread);
      case ROTATE: return each_row(begin, end, [&](int64_t row) { rotate(o, row); });
      case STORE: return each_row(begin, end, [&](int64_t row) { store_entry(o, row); });
      case ATTEND: return attend(o, begin, end, thread);
      case CHOOSE: return each_row(begin, end, [&](int64_t row) { choose(o, row); });
      case SORT: return sort(o, begin, end);
      case EXPERT_GATED_PRODUCT:
      case EXPERT_PRODUCT: return expert_product(o, begin, end, thread);
      case COMBINE: return each_row(begin, end, [&](int64_t row) { combine(o, row); });
      case TAKE: return each_row(begin, end, [&](int64_t row) { take(o, row); });
      case GATE: return each_row(begin, end, [&](int64_t row) { gate_row(o, row); });
    }
  }

 private:
  template <typename N>
  static N* at(const Part& part, int64_t row, int64_t head = 0) {
    return static_cast<N*>(part.data) + row * part.row + head * part.stride;
  }

  template <typename Function>
  void each_row(int64_t begin, int64_t end, const Function& function) {
    for (int64_t i = begin; i < end; ++i) function(rows[i]);
  }

  // Which rows there are, where each token goes, and what it sees.
  void begin_step() {
    rows.clear();
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      if (p.active != nullptr && !p.active[slot]) continue;
      for (int64_t t = 0; t < p.tokens; ++t) {
        const int64_t row = slot * p.tokens + t;
        rows.push_back(row);
        if (p.cached == nullptr) continue;
        const int64_t base = p.base[slot], limit = p.limit[slot], count = p.cached[slot] + t;
        place[row] = count < limit ? count : base + (count - base) % std::max<int64_t>(limit - base, 1);
        seen[row] = std::min(count + 1, limit);
      }
    }
  }

  // Units of the operation that comes next; what it needs beside its buffers is made here.
  int64_t units() {
    const Operation& o = *now;
    const auto tiles = [](int64_t weights) { return (weights + UNIT - 1) / UNIT; };
    switch (o.kind) {
      case PRODUCT: return tiles(o.target.size);
      case GATED_PRODUCT: return tiles(o.target.size);
      case HEAD_PRODUCT: return o.source.heads;
      case ATTEND: return plan_attention(o);
      case SORT: return plan_sorting(o);
      case EXPERT_GATED_PRODUCT:
      case EXPERT_PRODUCT: return plan_experts(o) * tiles(o.target.size);
      default: return static_cast<int64_t>(rows.size());
    }
  }

  // ---- row by row ----

  void embed(const Operation& o, int64_t row) {
    const T* table = static_cast<const T*>(o.weight);
    std::copy_n(table + p.token[row] * o.target.size, o.target.size, at<T>(o.target, row));
  }

  // Cosines, then sines, as the model's type has them.
  void angles(const Operation& o, int64_t row) {
    const float* frequencies = static_cast<const float*>(o.weight);
    const int64_t half = o.target.size / 2;
    const float position = static_cast<float>(p.position[row / p.tokens] + row % p.tokens);
    float* out = at<float>(o.target, row);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * frequencies[i], scaling = static_cast<float>(o.real);
      out[i] = static_cast<float>(static_cast<T>(std::cos(angle) * scaling));
      out[half + i] = static_cast<float>(static_cast<T>(std::sin(angle) * scaling));
    }
  }

  void norm(const Operation& o, int64_t row) {
    const T* weight = static_cast<const T*>(o.weight);
    const int64_t size = o.source.size;
    for (int64_t head = 0; head < o.source.heads; ++head) {
      const T* from = at<T>(o.source, row, head);
      T* to = at<T>(o.target, row, head);
      vec total = {};
      for (int64_t i = 0; i < size; i += PAIR) {
        vec low, high;
        load_pair(from + i, low, high);
        total += low * low;
        total += high * high;
      }
      const float factor = 1.0f / std::sqrt(sum(total) / static_cast<float>(size) + static_cast<float>(o.real));
      for (int64_t i = 0; i < size; i += PAIR) {
        vec low, high, weight_low, weight_high;
        load_pair(from + i, low, high);
        load_pair(weight + i, weight_low, weight_high);
        store_pair(to + i, low * factor, high * factor);  // rounded before it is multiplied, as models are trained
        load_pair(to + i, low, high);
        store_pair(to + i, low * weight_low, high * weight_high);
      }
    }
  }

  void rotate(const Operation& o, int64_t row) {
    const int64_t half = o.source.size / 2;
    const float *cosine = at<float>(o.other, row), *sine = cosine + half;
    const int64_t step = o.number[0] ? 2 : 1, second = o.number[0] ? 1 : half;
    for (int64_t head = 0; head < o.source.heads; ++head) {
      const T* from = at<T>(o.source, row, head);
      T* to = at<T>(o.target, row, head);
      float result[2][1024];
      for (int64_t i = 0; i < half; ++i) {
        const float a = from[i * step], b = from[i * step + second];
        result[0][i] = a * cosine[i] - b * sine[i], result[1][i] = b * cosine[i] + a * sine[i];
      }
      for (int64_t i = 0; i < half; ++i) to[i] = static_cast<T>(result[0][i]), to[half + i] = static_cast<T>(result[1][i]);
    }
  }

  void gate_row(const Operation& o, int64_t row) {
    const T *gates = at<T>(o.source, row), *ups = gates + o.target.size;
    T* to = at<T>(o.target, row);
    for (int64_t i = 0; i < o.target.size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, o.target.size - i);
      put(to + i, silu(some(gates + i, count)) * some(ups + i, count), count);
    }
  }

  void store_entry(const Operation& o, int64_t row) {
    const Cache& cache = p.caches[o.number[0]];
    const int64_t slot = row / p.tokens, t = row % p.tokens;
    const bool certain = p.tokens == 1;
    const int64_t length = certain ? p.entries : p.tokens, entry = certain ? place[row] : t;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      const int64_t to = ((slot * p.kv_heads + head) * length + entry) * p.size;
      std::copy_n(at<T>(o.source, row, head), p.size, static_cast<T*>(certain ? cache.keys : cache.pending_keys) + to);
      if (o.target.data != nullptr)
        std::copy_n(at<T>(o.target, row, head), p.size, static_cast<T*>(certain ? cache.values : cache.pending_values) + to);
    }
  }

  // ---- products ----

  // Rows from .. from + M of `rows`, side by side in the form they are multiplied in.
  const Left* gather(const Part& source, int64_t from, int64_t M, int64_t thread) {
    Left* to = left + thread * left_size;
    for (int64_t m = 0; m < M; ++m) A::prepare(at<T>(source, rows[from + m]), source.size, to + m * source.size);
    return to;
  }

  int64_t group_of(int64_t from) const { return std::min<int64_t>(ROWS_AT_ONCE, rows.size() - from); }

  void product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, last_weight = std::min(end * UNIT, o.target.size);
    const T* weight = static_cast<const T*>(o.weight);
    for (int64_t from = 0; from < static_cast<int64_t>(rows.size()); from += ROWS_AT_ONCE) {
      const int64_t M = group_of(from);
      const Left* x = gather(o.source, from, M, thread);
      for (int64_t n = begin * UNIT; n < last_weight; n += UNIT) {
        alignas(64) float y[ROWS_AT_ONCE * UNIT];
        const int64_t count = std::min(UNIT, last_weight - n);
        multiply<A>(x, M, weight + n * K, K, count, y, UNIT);
        for (int64_t m = 0; m < M; ++m) finish(o, rows[from + m], n, count, y + m * UNIT);
      }
    }
  }

  // Sums of `count` weights from n on, at most UNIT, to a row of the target.
  void finish(const Operation& o, int64_t row, int64_t n, int64_t count, const float* sums) {
    enum { PLAIN, ADD, EXACT, ROUNDED };
    const T* bias = static_cast<const T*>(o.bias);
    const vec y = bias ? load(sums) + some(bias + n, count) : load(sums);
    T* numbers = at<T>(o.target, row) + n;
    float* wide = at<float>(o.target, row) + n;
    switch (o.number[0]) {
      case ADD: return put(numbers, some(numbers, count) + rounded<T>(y), count);
      case EXACT: return put(wide, y, count);
      case ROUNDED: return put(wide, rounded<T>(y), count);
      default: put(numbers, y, count);
    }
  }

  static_assert(UNIT == LANES);

  // The first numbers of a vector, and where it is in memory all there is.
  template <typename N>
  static vec some(const N* from, int64_t count) {
    if (count == LANES) return load_numbers(from);
    N all[LANES] = {};
    std::copy_n(from, count, all);
    return load_numbers(all);
  }

  template <typename N>
  static void put(N* to, vec v, int64_t count) {
    if (count == LANES) return store_numbers(to, v);
    N all[LANES];
    store_numbers(all, v);
    std::copy_n(all, count, to);
  }

  // The upper half of the weights are gates.
  void gated_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const T* bias = static_cast<const T*>(o.bias);
    for (int64_t from = 0; from < static_cast<int64_t>(rows.size()); from += ROWS_AT_ONCE) {
      const int64_t M = group_of(from);
      const Left* x = gather(o.source, from, M, thread);
      gate(x, M, static_cast<const T*>(o.weight), bias, o.source.size, o.target.size, begin, end,
           [&](int64_t m) { return at<T>(o.target, rows[from + m]); });
    }
  }

  template <typename Target>
  void gate(const Left* x, int64_t M, const T* weight, const T* bias, int64_t K, int64_t inner, int64_t begin, int64_t end,
            const Target& target) {
    for (int64_t n = begin * UNIT; n < std::min(end * UNIT, inner); n += UNIT) {
      const int64_t count = std::min(UNIT, inner - n);
      alignas(64) float gates[ROWS_AT_ONCE * UNIT], ups[ROWS_AT_ONCE * UNIT];
      multiply<A>(x, M, weight + n * K, K, count, gates, UNIT);
      multiply<A>(x, M, weight + (inner + n) * K, K, count, ups, UNIT);
      for (int64_t m = 0; m < M; ++m) {
        vec a = load(gates + m * UNIT), b = load(ups + m * UNIT);
        if (bias != nullptr) a += some(bias + n, count), b += some(bias + inner + n, count);
        put(target(m) + n, silu(a) * b, count);
      }
    }
  }

  // Every head of a row times a matrix of its own: [out, in], or [in, out] if it is transposed.
  void head_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, N = o.target.size, head_stride = o.number[0];
    const bool transposed = o.number[1] != 0;
    for (int64_t head = begin; head < end; ++head) {
      const T* weight = static_cast<const T*>(o.weight) + head * head_stride;
      for (const int64_t row : rows) {
        const T* from = at<T>(o.source, row, head);
        T* to = at<T>(o.target, row, head);
        if (transposed) {
          for (int64_t n = 0; n < N; n += PAIR) {
            vec low = {}, high = {};
            for (int64_t k = 0; k < K; ++k) {
              vec weight_low, weight_high;
              load_pair(weight + k * N + n, weight_low, weight_high);
              const float factor = from[k];
              low += weight_low * factor, high += weight_high * factor;
            }
            store_pair(to + n, low, high);
          }
        } else {
          Left* x = left + thread * left_size;
          A::prepare(from, K, x);
          for (int64_t n = 0; n < N; n += UNIT) {
            alignas(64) float y[UNIT];
            const int64_t count = std::min(UNIT, N - n);
            multiply<A>(x, 1, weight + n * K, K, count, y, UNIT);
            put(to + n, load(y), count);
          }
        }
      }
    }
  }

  // ---- attention ----

  struct Span {
    int64_t slot, head, split;
  };

  // Only splits that hold valid entries become units, so short sequences and free slots cost nothing.
  int64_t plan_attention(const Operation&) {
    spans.clear();
    for (size_t i = 0; i < rows.size(); i += p.tokens) {
      const int64_t slot = rows[i] / p.tokens, valid = seen[rows[i + p.tokens - 1]];
      const int64_t used = (valid + SPLIT - 1) / SPLIT;
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        waiting[slot * p.kv_heads + head].store(used, std::memory_order_relaxed);
        for (int64_t split = 0; split < used; ++split) spans.push_back({slot, head, split});
      }
    }
    return static_cast<int64_t>(spans.size());
  }

  void attend(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t group = o.source.heads / p.kv_heads, width = state_size(o.target.size);
    for (int64_t i = begin; i < end; ++i) {
      const auto [slot, head, split] = spans[i];
      for (int64_t t = 0; t < p.tokens; ++t) {
        const int64_t row = slot * p.tokens + t;
        if (split * SPLIT < seen[row]) attend_span(o, row, head, split, thread);
      }
      // Whoever has the last part of a head puts all together, in an order that does not depend on who that is.
      if (waiting[slot * p.kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      for (int64_t row = slot * p.tokens; row < (slot + 1) * p.tokens; ++row) {
        for (int64_t g = 0; g < group; ++g)
          merge_states(state_of(o, row, head, 0) + g * width, (seen[row] + SPLIT - 1) / SPLIT, group * width,
                       o.target.size, at<T>(o.target, row, head * group + g));
      }
    }
  }

  float* state_of(const Operation& o, int64_t row, int64_t head, int64_t split) {
    const int64_t group = o.source.heads / p.kv_heads;
    return state + ((row * p.kv_heads + head) * splits + split) * group * state_size(o.target.size);
  }

  void attend_span(const Operation& o, int64_t row, int64_t head, int64_t split, int64_t thread) {
    const int64_t slot = row / p.tokens, D = p.size, V = o.target.size, group = o.source.heads / p.kv_heads;
    const Cache& cache = p.caches[o.number[0]];
    float* states = state_of(o, row, head, split);
    Left* queries = left + thread * left_size;
    for (int64_t g = 0; g < group; ++g) {
      clear_state(states + g * state_size(V), V);
      A::prepare(at<T>(o.source, row, head * group + g), D, queries + g * D);
    }
    const int64_t offset = (slot * p.kv_heads + head) * p.entries * D;
    const T *keys = static_cast<T*>(cache.keys) + offset, *values = static_cast<T*>(cache.values) + offset;
    const int64_t last = std::min((split + 1) * SPLIT, seen[row]);
    for (int64_t entry = split * SPLIT; entry < last; entry += ENTRIES) {
      const int64_t n = std::min(ENTRIES, last - entry);
      Entries<T> block{keys + entry * D, values + entry * D, D, D};
      if (p.tokens > 1) block = with_pending(cache, block, row, head, entry, n, thread);
      attend_block<A>(queries, group, block, n, D, V, static_cast<float>(o.real), states);
    }
  }

  // A block as it will be when this row and those before it have been stored; what is not certain is not written yet.
  Entries<T> with_pending(const Cache& cache, const Entries<T>& block, int64_t row, int64_t head, int64_t entry, int64_t n,
                          int64_t thread) {
    const int64_t slot = row / p.tokens, D = p.size;
    T *keys = blocks + 2 * thread * block_size, *values = keys + block_size;
    bool copied = false;
    for (int64_t before = slot * p.tokens; before <= row; ++before) {
      const int64_t at = place[before] - entry;
      if (at < 0 || at >= n) continue;
      if (!copied) std::copy_n(block.keys, n * D, keys), std::copy_n(block.values, n * D, values), copied = true;
      const int64_t from = ((slot * p.kv_heads + head) * p.tokens + before - slot * p.tokens) * D;
      std::copy_n(static_cast<const T*>(cache.pending_keys) + from, D, keys + at * D);
      std::copy_n(static_cast<const T*>(cache.pending_values) + from, D, values + at * D);
    }
    return copied ? Entries<T>{keys, values, D, D} : block;
  }

  // ---- experts ----

  // Chooses experts from a row's logits, see models/deepseek.py.
  void choose(const Operation& o, int64_t row) {
    const int64_t count = o.source.size, chosen = o.target.size, groups = o.number[0], chosen_groups = o.number[1];
    const bool corrected = o.number[2] != 0, normalize = o.number[3] != 0;
    const float *logits = at<float>(o.source, row), *correction = static_cast<const float*>(o.bias);
    std::vector<float> scores(count), ranking(count);
    float total = 0.0f, top = *std::max_element(logits, logits + count);
    for (int64_t e = 0; e < count; ++e) {
      scores[e] = corrected ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - top);
      total += scores[e];
    }
    for (int64_t e = 0; e < count; ++e) {
      if (!corrected) scores[e] /= total;
      ranking[e] = scores[e] + (correction ? correction[e] : 0.0f);
    }
    if (groups > 1) keep_best_groups(ranking, groups, chosen_groups, corrected);
    float* weights = at<float>(o.target, row);
    int64_t* experts = at<int64_t>(o.other, row);
    float sum = 0.0f;
    for (int64_t i = 0; i < chosen; ++i) {
      const int64_t best = std::max_element(ranking.begin(), ranking.end()) - ranking.begin();
      experts[i] = best, weights[i] = scores[best], sum += scores[best];
      ranking[best] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t i = 0; i < chosen; ++i)
      weights[i] = (normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * static_cast<float>(o.real);
  }

  static void keep_best_groups(std::vector<float>& ranking, int64_t groups, int64_t kept, bool by_two) {
    const float none = -std::numeric_limits<float>::infinity();
    const int64_t size = ranking.size() / groups;
    std::vector<float> quality(groups);
    for (int64_t g = 0; g < groups; ++g) {
      float best = none, second = none;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        if (ranking[e] > best) second = best, best = ranking[e];
        else second = std::max(second, ranking[e]);
      }
      quality[g] = by_two ? best + second : best;
    }
    std::vector<bool> allowed(groups);
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t best = std::max_element(quality.begin(), quality.end()) - quality.begin();
      allowed[best] = true, quality[best] = none;
    }
    for (size_t e = 0; e < ranking.size(); ++e)
      if (!allowed[e / size]) ranking[e] = none;
  }

  // Puts the rows of each expert beside each other: `order` says which row comes where.
  int64_t plan_sorting(const Operation& o) {
    const int64_t chosen = o.other.size, count = o.number[0];
    int64_t* ends = static_cast<int64_t*>(const_cast<void*>(o.bias));
    std::fill_n(ends, count, 0);
    for (const int64_t row : rows)
      for (int64_t i = 0; i < chosen; ++i) ++ends[at<int64_t>(o.other, row)[i]];
    for (int64_t e = 1; e < count; ++e) ends[e] += ends[e - 1];
    std::vector<int64_t> next(count);
    for (int64_t e = 1; e < count; ++e) next[e] = ends[e - 1];
    order.clear(), order.resize(rows.size() * chosen);
    for (const int64_t row : rows) {
      for (int64_t i = 0; i < chosen; ++i) {
        const int64_t to = next[at<int64_t>(o.other, row)[i]]++;
        order[to] = row, sorted_at[row * chosen + i] = to;
      }
    }
    return static_cast<int64_t>(order.size());
  }

  void sort(const Operation& o, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(at<T>(o.source, order[i]), o.source.size, at<T>(o.target, i));
  }

  int64_t plan_experts(const Operation& o) {
    const int64_t* ends = static_cast<const int64_t*>(o.bias);
    used.clear();  // the weights of the others are not touched
    for (int64_t e = 0; e < o.number[0]; ++e)
      if (ends[e] > (e ? ends[e - 1] : 0)) used.push_back(e);
    return static_cast<int64_t>(used.size());
  }

  void expert_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, N = o.target.size, tiles = (N + UNIT - 1) / UNIT;
    const bool gated = o.kind == EXPERT_GATED_PRODUCT;
    const int64_t* ends = static_cast<const int64_t*>(o.bias);
    while (begin < end) {
      const int64_t expert = used[begin / tiles], tile = begin % tiles, until = std::min(tiles, tile + end - begin);
      const T* weight = static_cast<const T*>(o.weight) + expert * N * K * (gated ? 2 : 1);
      for (int64_t row = expert ? ends[expert - 1] : 0; row < ends[expert]; row += ROWS_AT_ONCE) {
        const int64_t M = std::min(ROWS_AT_ONCE, ends[expert] - row);
        Left* x = left + thread * left_size;
        for (int64_t m = 0; m < M; ++m) A::prepare(at<T>(o.source, row + m), K, x + m * K);
        const auto target = [&](int64_t m) { return at<T>(o.target, row + m); };
        if (gated) {
          gate(x, M, weight, nullptr, K, N, tile, until, target);
          continue;
        }
        for (int64_t n = tile * UNIT; n < std::min(until * UNIT, N); n += UNIT) {
          alignas(64) float y[ROWS_AT_ONCE * UNIT];
          const int64_t count = std::min(UNIT, N - n);
          multiply<A>(x, M, weight + n * K, K, count, y, UNIT);
          for (int64_t m = 0; m < M; ++m) put(target(m) + n, load(y + m * UNIT), count);
        }
      }
      begin += until - tile;
    }
  }

  void combine(const Operation& o, int64_t row) {
    const float* weights = at<float>(o.other, row);
    T* to = at<T>(o.target, row);
    for (int64_t n = 0; n < o.target.size; n += LANES) {
      float total[LANES] = {};
      for (int64_t i = 0; i < o.other.size; ++i) {
        const T* from = at<T>(o.source, sorted_at[row * o.other.size + i]) + n;
        for (int64_t lane = 0; lane < LANES; ++lane) total[lane] += static_cast<float>(from[lane]) * weights[i];
      }
      for (int64_t lane = 0; lane < LANES; ++lane)
        to[n + lane] = static_cast<T>(static_cast<float>(to[n + lane]) + static_cast<float>(static_cast<T>(total[lane])));
    }
  }

  // ---- the end of a step ----

  // The most likely token, the first one if several are equal; or the one that has to be taken.
  void take(const Operation& o, int64_t row) {
    const float* logits = at<float>(o.source, row);
    const int64_t slot = row;  // one token per slot
    int64_t* forced = p.forced + slot * p.most_steps;
    int64_t best = forced[0];
    if (best < 0) {
      vec highest = vec{} - std::numeric_limits<float>::infinity();
      int64_t i = 0;
      for (; i + LANES <= o.source.size; i += LANES) highest = larger(highest, load(logits + i));
      float top = highest[0];
      for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
      for (; i < o.source.size; ++i) top = std::max(top, logits[i]);
      best = std::find(logits, logits + o.source.size, top) - logits;
      if (best == o.source.size) best = 0;  // nothing but NaN
    }
    std::copy(forced + 1, forced + p.most_steps, forced);
    forced[p.most_steps - 1] = -1;
    p.taken[step * p.slots + slot] = best;
    p.token[slot] = best, ++p.position[slot], ++p.cached[slot];
  }

  const Program& p;
  int64_t first = 0, last = 0, steps = 0, step = 0, next = 0;
  const Operation* now = nullptr;
  std::vector<int64_t> rows;         // of active slots
  std::vector<int64_t> place, seen;  // of each row: its entry in the cache, and how many entries it attends to
  int64_t left_size = 0, block_size = 0, splits = 0;
  Left* left;          // per thread, rows in the form they are multiplied in
  T* blocks;           // per thread, keys and values of a block with pending ones
  float* state;        // of attention
  int64_t* sorted_at;  // where each row's copies went; kept from launch to launch
  std::unique_ptr<std::atomic<int64_t>[]> waiting;  // parts of each slot's KV head that are not done
  std::vector<Span> spans;
  std::vector<int64_t> order, used;
};

// Calls function(way to multiply) with the one the program asks for.
template <typename Function>
int64_t with_arithmetic(const Program& program, const Function& function) {
  if (program.type == 0) return function(Widened<float>());
#if defined(__AVX512BF16__)
  if (program.instructions != PORTABLE) return function(Paired());
#endif
  return function(Widened<bfloat16>());
}

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Bytes of temporaries that a program needs.
EXPORT int64_t snapstream_scratch(const Program* program, int64_t threads) {
  return with_arithmetic(*program, [&](auto arithmetic) {
    Scratch scratch(nullptr);
    Launch<decltype(arithmetic)>(*program, threads, scratch);
    return scratch.bytes;
  });
}

// Runs operations first .. last, all of them `steps` times, on at most as many threads as there is scratch for; returns
// whether there was memory.
EXPORT int64_t snapstream_run(const Program* program, char* memory, int64_t first, int64_t last, int64_t steps,
                              int64_t threads) {
  try {
    return with_arithmetic(*program, [&](auto arithmetic) {
      Scratch scratch(memory);
      Launch<decltype(arithmetic)> launch(*program, threads, scratch);
      launch.prepare(first, last, steps);
      run_team(launch, threads);
      return int64_t{true};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Runs one operation that takes each row by itself, on all rows.
EXPORT int64_t snapstream_rows(const Operation* operation, int64_t type, int64_t rows, int64_t threads) {
  Program program{};
  program.operations = operation, program.count = 1, program.type = type, program.slots = rows, program.tokens = 1;
  return snapstream_run(&program, nullptr, 0, 1, 1, threads);
}
