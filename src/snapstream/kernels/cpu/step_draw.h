// Choosing a token of a slot: penalties, temperature, limits and a seeded draw, as in snapstream/kernels/sampling.py.
#pragma once
#include <cmath>

#include "step_rows.h"

namespace snapstream {

// The finalizer of MurmurHash3, for a number or a vector.
template <typename N>
inline N mixed(N x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Noise of a slot's tokens at one position; the same as compression/scoring.py's counter_uniform().
class Noise {
 public:
  explicit Noise(uint64_t seed) : low(mixed(static_cast<uint32_t>(seed))), high(static_cast<uint32_t>(seed >> 32)) {}

  float of(int64_t token) const { return -std::log(-std::log(uniform(token))); }

  // The uniform number that a token's noise is made of.
  float uniform(int64_t token) const {
    const uint32_t bits = mixed(low ^ (static_cast<uint32_t>(token) * STRIDE) ^ high);
    return (static_cast<float>(bits >> 9) + 0.5f) * UNIT_OF_NOISE;
  }

  // One minus the uniform numbers of 16 tokens from `token` on.
  vec complements(int64_t token) const {
    constexpr uint32_t FIRST[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec_u32 tokens = load_as<vec_u32>(FIRST);
    tokens = (tokens + static_cast<uint32_t>(token)) * STRIDE;
    const vec_u32 bits = mixed(tokens ^ (low ^ high));
    return 1.0f - (converted<float>((vec_i32)(bits >> 9)) + 0.5f) * UNIT_OF_NOISE;
  }

 private:
  static constexpr uint32_t STRIDE = 0x9E3779B1u;
  static constexpr float UNIT_OF_NOISE = 1.0f / (1 << 23);
  uint32_t low, high;
};

class Drawing {
 public:
  Drawing(Step& step, int64_t threads, Scratch& scratch) : s(step) {
    const auto needed = [](const auto& o) -> int64_t {
      if constexpr (std::is_same_v<std::decay_t<decltype(o)>, Draw>) return o.logits.size;
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) vocabulary = std::max(vocabulary, visit(s.p.operations[i], needed));
    by_slot = s.p.slots < threads;
    const int64_t at_once = std::min(s.p.slots, threads);
    scaled = scratch.reserve<float>(at_once * vocabulary);
    candidates = scratch.reserve<Candidate>(at_once * vocabulary);
  }

  void run(const Draw& o, int64_t slot, int64_t thread) {
    const int64_t forced = s.p.forced[slot * s.p.most_steps];
    const int64_t token = forced >= 0 ? forced : choose(o, slot, by_slot ? slot : thread);
    ++o.state.output_counts[slot * o.logits.size + token];
    s.p.taken[s.number * s.p.slots + slot] = token;
    s.go_on(slot, token, 1);
  }

 private:
  struct Candidate {
    float logit;
    int32_t token;
    float weight;  // its probability divided by that of the likeliest token
    bool operator<(const Candidate& other) const {  // likelier ones first, then smaller tokens
      return logit != other.logit ? logit > other.logit : token < other.token;
    }
  };
  static constexpr float MOST_NOISE = 16.64f;  // more than any noise
  static constexpr float MARGIN = 1.001f;      // for the rounding of exponentials

  int64_t choose(const Draw& o, int64_t slot, int64_t place) {
    const SamplingState& wanted = o.state;
    const int64_t V = o.logits.size, position = s.p.position[slot] + 1;
    const float* logits = at<float>(o.logits, slot);
    float* mine = scaled + place * vocabulary;
    if (is_penalized(wanted, slot, position)) {
      penalize(wanted, slot, position, logits, V, mine);
      logits = mine;
    }
    if (wanted.masked[slot]) {
      mask(wanted.allowed + slot * ((V + 31) / 32), logits, V, mine);
      logits = mine;
    }
    const float temperature = wanted.temperature[slot];
    if (temperature == 0.0f) return likeliest(logits, V);
    for (int64_t i = 0; i < V; ++i) mine[i] = logits[i] / temperature;
    const uint64_t seed = static_cast<uint64_t>(wanted.seed[slot]) * 1000003u + static_cast<uint64_t>(position);
    const int64_t first = likeliest(mine, V);
    const bool limited = wanted.top_k[slot] < V || wanted.top_p[slot] < 1.0f || wanted.min_p[slot] != 0.0f;
    return limited ? draw_best(wanted, slot, mine, V, mine[first], Noise(seed), candidates + place * vocabulary)
                   : draw_any(mine, V, first, Noise(seed));
  }

  static bool is_penalized(const SamplingState& wanted, int64_t slot, int64_t position) {
    return wanted.presence[slot] != 0.0f || wanted.frequency[slot] != 0.0f || wanted.repetition[slot] != 1.0f ||
           wanted.biased[slot] || position < wanted.end_from[slot];
  }

  static void penalize(const SamplingState& wanted, int64_t slot, int64_t position, const float* logits, int64_t V,
                       float* out) {
    const float presence = wanted.presence[slot], frequency = wanted.frequency[slot], factor = wanted.repetition[slot];
    const int32_t* counts = wanted.output_counts + slot * V;
    const bool *in_prompt = wanted.in_prompt + slot * V, *ends = wanted.ends + slot * V;
    const float* bias = wanted.bias + slot * V;
    const bool too_early = position < wanted.end_from[slot];
    for (int64_t i = 0; i < V; ++i) {
      float x = logits[i];
      if (counts[i] > 0 || in_prompt[i]) x = x > 0.0f ? x / factor : x * factor;
      if (counts[i] > 0) x = x - presence - static_cast<float>(counts[i]) * frequency;
      out[i] = too_early && ends[i] ? -std::numeric_limits<float>::infinity() : x + bias[i];
    }
  }

  // Leaves out the tokens whose bits are not set; `out` may be `logits`.
  static void mask(const uint32_t* allowed, const float* logits, int64_t V, float* out) {
    for (int64_t i = 0; i < V; i += 32) {
      const uint32_t word = allowed[i / 32];
      const int64_t end = std::min<int64_t>(V - i, 32);
      for (int64_t bit = 0; bit < end; ++bit)
        out[i + bit] = word >> bit & 1 ? logits[i + bit] : -std::numeric_limits<float>::infinity();
    }
  }

  // The token with the highest sum of logit and noise. The logarithms are computed only where the sum may be the highest:
  // noise exceeds d >= 0 only if 1 - u < exp(-d), because -log(u) >= 1 - u.
  static int64_t draw_any(const float* logits, int64_t V, int64_t first, const Noise& noise) {
    int64_t best = first;
    float highest = logits[first] + noise.of(first);
    const auto compare = [&](int64_t token) {
      const float value = logits[token] + noise.of(token);
      const bool likelier = logits[token] != logits[best] ? logits[token] > logits[best] : token < best;
      if (value > highest || (value == highest && likelier)) best = token, highest = value;
    };
    int64_t i = 0;
    for (; i + LANES <= V; i += LANES) {
      const vec x = load(logits + i);
      if (!any(x >= highest - MOST_NOISE)) continue;
      const vec above = x - highest, reach = exp_nonpositive(select(above > 0.0f, vec{}, above)) * MARGIN;
      const vec_i32 possible = (above > 0.0f) | (noise.complements(i) <= reach);
      if (!any(possible)) continue;
      for (int lane = 0; lane < LANES; ++lane)
        if (possible[lane]) compare(i + lane);
    }
    for (; i < V; ++i) compare(i);
    return best;
  }

  // The same among the best tokens that the limits allow.
  static int64_t draw_best(const SamplingState& wanted, int64_t slot, const float* logits, int64_t V, float peak,
                           const Noise& noise, Candidate* list) {
    const int64_t top_k = std::max<int64_t>(wanted.top_k[slot], 1);
    const float top_p = wanted.top_p[slot], lowest = std::log(wanted.min_p[slot]);
    const bool only_top_p = top_k >= V && wanted.min_p[slot] == 0.0f;
    const double all = only_top_p ? sum_of_weights(logits, V, peak) : 0.0;
    // 1. Collect all tokens within some distance of the peak. Those beyond weigh exp(-distance) at most, so for top-p there
    //    is a distance that suffices; for top-k it becomes larger if these are too few.
    int64_t count = 0;
    float distance = 6.0f;
    if (only_top_p) distance = 0.1f + static_cast<float>(std::log(static_cast<double>(V) / ((1.0 - top_p) * all)));
    for (;; distance *= 2.0f) {
      const bool covers = -distance <= lowest || distance > 1000.0f;
      count = collect(logits, V, peak, covers ? lowest : -distance, list);
      if (covers || only_top_p || count >= top_k) break;
    }
    // 2. Keep the best ones, then those whose probabilities add up to the limit.
    if (top_k < count) std::nth_element(list, list + top_k, list + count), count = top_k;
    if (top_p < 1.0f) count = likeliest_share(list, count, top_p, only_top_p ? all : sum_of_weights(list, count));
    // 3. Draw. As above, noise is computed only where the sum may be the highest.
    const Candidate* best = std::min_element(list, list + count);
    if (count == 0) return 0;  // nothing but NaN
    float highest = best->logit + noise.of(best->token), scale = std::exp(peak - highest) * MARGIN;
    for (const Candidate* each = list; each < list + count; ++each) {
      if (each->logit <= highest && 1.0f - noise.uniform(each->token) > each->weight * scale) continue;
      const float value = each->logit + noise.of(each->token);
      if (value > highest || (value == highest && *each < *best))
        best = each, highest = value, scale = std::exp(peak - highest) * MARGIN;
    }
    return best->token;
  }

  // How many of the likeliest tokens, at least one, have this share of all weights; they come first then.
  static int64_t likeliest_share(Candidate* list, int64_t count, float share, double all) {
    const auto suffices = [&](double weights) { return static_cast<float>(weights / all) >= share; };
    int64_t begin = 0, end = count;
    double before = 0.0;  // sum of the weights up to `begin`
    while (end - begin > 32) {
      const int64_t middle = begin + (end - begin) / 2;
      std::nth_element(list + begin, list + middle, list + end);
      const double half = sum_of_weights(list + begin, middle - begin);
      if (suffices(before + half)) end = middle;
      else before += half, begin = middle;
    }
    std::sort(list + begin, list + end);
    while (begin < end && (begin == 0 || !suffices(before))) before += list[begin++].weight;
    return begin;
  }

  static int64_t collect(const float* logits, int64_t V, float peak, float least, Candidate* list) {
    int64_t count = 0, i = 0;
    for (; i + LANES <= V; i += LANES) {
      const vec below = load(logits + i) - peak;
      const vec_i32 near = below >= least;
      if (!any(near)) continue;
      const vec weights = exp_nonpositive(below);
      for (int lane = 0; lane < LANES; ++lane)
        if (near[lane]) list[count++] = {logits[i + lane], static_cast<int32_t>(i + lane), weights[lane]};
    }
    for (; i < V; ++i) {
      const float below = logits[i] - peak;
      if (below >= least) list[count++] = {logits[i], static_cast<int32_t>(i), std::exp(below)};
    }
    return count;
  }

  static double sum_of_weights(const float* logits, int64_t V, float peak) {
    vec total = {};
    int64_t i = 0;
    for (; i + LANES <= V; i += LANES) total += exp_nonpositive(load(logits + i) - peak);
    double rest = sum(total);
    for (; i < V; ++i) rest += std::exp(logits[i] - peak);
    return rest;
  }

  static double sum_of_weights(const Candidate* list, int64_t count) {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += list[i].weight;
    return total;
  }

  Step& s;
  int64_t vocabulary = 0;
  bool by_slot;           // whether each slot has its memory, rather than each thread: whichever are fewer
  float* scaled;
  Candidate* candidates;
};

}  // namespace snapstream
