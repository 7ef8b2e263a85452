// Selection: votes smoothed along the sequence, ranks of scores, merged in rounds from several lists, and the token that
// every entry holds. Neighbors are added from left to right, and scores are compared as integers, so results equal those
// of plain torch bit for bit (compression/scoring.py, ranks.py, compress.py).
#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "memory.h"
#include "team.h"
#include "vectors.h"

namespace snapstream {
namespace {

int32_t bits_of(float score) {
  int32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits;
}

// The tokens with the highest scores, with ties in token order. The bits of non-negative floats sort like the floats.
class Order {
 public:
  explicit Order(int64_t length) : items(length), others(length) {}

  // Sorts the best `most` of the scores from .. end of a row, and perhaps some more. Returns how many.
  int64_t sort(const float* scores, int64_t from, int64_t end, int64_t most) {
    // 1. A threshold that at least `most` scores reach, and not many more: bit by bit, from the first one.
    int32_t reached = 0;
    for (int32_t bit = end - from > most + most / 4 ? 1 << 30 : 0; bit > 0; bit >>= 1) {
      int32_t count = 0;
      for (int64_t at = from; at < end; ++at) count += bits_of(scores[at]) >= (reached | bit);
      if (count >= most) reached |= bit;
      if (count >= most && count <= most + most / 4) break;
    }
    // 2. Those that reach it, the highest first: a radix sort, which is stable.
    int64_t count = 0;
    for (int64_t at = from; at < end; ++at) {
      const int32_t bits = bits_of(scores[at]);
      items.get()[count] = {0x7FFFFFFFu - static_cast<uint32_t>(bits), static_cast<uint32_t>(at)};
      count += bits >= reached;
    }
    for (int shift = 0; shift < 32; shift += BITS) {
      std::array<uint32_t, 1 << BITS> starts{};
      const auto digit = [&](int64_t i) { return items.get()[i].key >> shift & ((1u << BITS) - 1); };
      for (int64_t i = 0; i < count; ++i) ++starts[digit(i)];
      uint32_t next = 0;
      for (auto& start : starts) next += std::exchange(start, next);
      for (int64_t i = 0; i < count; ++i) others.get()[starts[digit(i)]++] = items.get()[i];
      std::swap(items, others);
    }
    return count;
  }

  uint32_t operator[](int64_t place) const { return items.get()[place].at; }

 private:
  static constexpr int BITS = 8;

  struct Item {
    uint32_t key, at;
  };

  Memory<Item> items, others;
};

// Floats that smooth() needs: the row, zeros on both sides, and room to read past the end.
int64_t padded_length(const Smoothing& a) { return a.shift + a.length + a.width + LANES; }

void smooth(const Smoothing& a, int64_t row, float* padded) {
  float* votes = padded + a.width / 2 + a.shift;
  std::fill(padded, votes, 0.0f);
  std::copy_n(a.votes + row * a.length, a.length, votes);
  std::fill(votes + a.length, padded + padded_length(a), 0.0f);
  const vec width = vec{} + static_cast<float>(a.width);
  float* out = a.out + row * a.length;
  for (int64_t at = 0; at < a.length; at += LANES) {
    vec result = load(padded + at);
    for (int64_t neighbor = 1; neighbor < a.width; ++neighbor) {
      const vec vote = load(padded + at + neighbor);
      result = a.largest ? larger(result, vote) : result + vote;
    }
    if (!a.largest) result /= width;
    put(out + at, result, std::min<int64_t>(LANES, a.length - at));
  }
}

void take_in_turn(const Lists& a, int64_t row, Order& order, float* best) {
  const int64_t from = std::max<int64_t>(a.sink, 0), end = std::min(a.candidate_end[row / a.heads], a.length);
  if (from >= end) return;
  std::fill(best + from, best + end, static_cast<float>(a.most));
  for (int64_t list = 0; list < a.lists; ++list) {
    const int64_t every = a.every[list * a.sequences + row / a.heads];
    const int64_t rounds = every > 1 ? (a.most + every - 1) / every : a.most;  // in which this list offers a token
    const int64_t sorted = order.sort(a.scores[list] + row * a.length, from, end, std::min(rounds, end - from));
    for (int64_t place = 0; place < std::min(rounds, sorted); ++place) {
      float& mine = best[order[place]];
      mine = std::min(mine, static_cast<float>(place * every));
    }
  }
  float* out = a.out + row * a.length;
  for (int64_t at = from; at < end; ++at) out[at] = 1.0f / (1.0f + best[at]);
}

void select_entries(const Selection& a, int64_t row, int32_t* memory) {
  const int64_t b = row / a.heads, base = a.base[b], count = a.count[b], length = a.lengths[b];
  const int64_t pinned = std::clamp<int64_t>(base - a.sink, 0, std::min(a.top_k, a.length));
  const float* scores = a.scores + row * a.length;
  int64_t* positions = a.positions + row * a.capacity;
  std::fill(positions, positions + a.capacity, -1);
  // The score of the last pinned token. Tokens above it are pinned, and the first of those that equal it.
  int32_t last = 0;
  int64_t equals_left = 0;
  if (pinned > 0) {
    std::memcpy(memory, scores, a.length * sizeof(float));
    std::nth_element(memory, memory + pinned - 1, memory + a.length, std::greater<int32_t>());
    last = memory[pinned - 1];
    equals_left = std::count(memory, memory + pinned, last);
  }
  int64_t next_pinned = a.sink, next_other = base - (length - count);  // the last others fill base .. count
  for (int64_t at = 0; at < std::min(a.length, length); ++at) {
    const int32_t bits = bits_of(scores[at]);
    const bool is_pinned = pinned > 0 && (bits > last || (bits == last && equals_left-- > 0));
    const bool is_other = at >= a.sink && !is_pinned;
    const int64_t place = is_pinned ? next_pinned++ : is_other ? next_other++ : at;
    const int64_t entry = at < a.sink ? at : place;
    if (entry < a.capacity && !(is_other && entry < base)) positions[entry] = at;
  }
}

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// All return false if they ran out of memory.
EXPORT int64_t snapstream_smooth(const Smoothing* a, int64_t threads) {
  try {
    share_out(threads, a->rows, [a] {
      return [a, padded = Memory<float>(padded_length(*a))](int64_t row) { smooth(*a, row, padded.get()); };
    });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

EXPORT int64_t snapstream_take_in_turn(const Lists* a, int64_t threads) {
  try {
    share_out(threads, a->sequences * a->heads, [a] {
      return [a, order = Order(a->length), best = Memory<float>(a->length)](int64_t row) mutable {
        take_in_turn(*a, row, order, best.get());
      };
    });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

EXPORT int64_t snapstream_select_entries(const Selection* a, int64_t threads) {
  try {
    share_out(threads, a->sequences * a->heads, [a] {
      return [a, memory = Memory<int32_t>(a->length)](int64_t row) { select_entries(*a, row, memory.get()); };
    });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
