// Experts of a step: rows are sorted by expert, so the weights of each chosen expert are read once.
#pragma once
#include <limits>

#include "step_products.h"

namespace snapstream {

// Experts of activations of type T.
template <typename T>
class ExpertOperations {
 public:
  ExpertOperations(Step& step, ProductOperations<T>& products, int64_t threads, Scratch& scratch)
      : s(step), products(products) {
    const auto needs = [&](const auto& o) {
      using O = std::decay_t<decltype(o)>;
      if constexpr (std::is_same_v<O, Sort>) chosen = std::max(chosen, o.experts.size);
      if constexpr (std::is_same_v<O, Sort> || std::is_same_v<O, ExpertProduct>) experts = std::max(experts, o.ends.size);
      if constexpr (std::is_same_v<O, Choose>) candidates = std::max(candidates, o.logits.size);
      return 0;
    };
    for (int64_t i = 0; i < s.p.count; ++i) visit(s.p.operations[i], needs);
    rankings = scratch.reserve<float>(threads * 4 * candidates);
    sorted_at = scratch.reserve<int64_t>(s.p.slots * s.p.tokens * chosen);
  }

  // Allocates what a launch needs besides its scratch.
  void prepare() { order.reserve(s.row_limit * chosen), used.reserve(experts), next.reserve(experts); }

  // Chooses experts from a row's logits, see models/experts.py.
  void run(const Choose& o, int64_t row, int64_t thread) {
    const int64_t count = o.logits.size, chosen = o.experts.size;
    const bool corrected = o.corrected != 0;
    const float *logits = at<float>(o.logits, row), *correction = numbers<float>(o.correction);
    float *scores = rankings + thread * 4 * candidates, *ranking = scores + count;
    float total = 0.0f, top = *std::max_element(logits, logits + count);
    for (int64_t e = 0; e < count; ++e) {
      scores[e] = corrected ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - top);
      total += scores[e];
    }
    for (int64_t e = 0; e < count; ++e) {
      if (!corrected) scores[e] /= total;
      ranking[e] = scores[e] + (correction ? correction[e] : 0.0f);
    }
    if (o.groups > 1) keep_best_groups(ranking, count, o.groups, o.chosen_groups, corrected);
    float* weights = at<float>(o.weights, row);
    int64_t* experts = at<int64_t>(o.experts, row);
    float sum = 0.0f;
    for (int64_t i = 0; i < chosen; ++i) {
      const int64_t best = std::max_element(ranking, ranking + count) - ranking;
      experts[i] = best, weights[i] = scores[best], sum += scores[best];
      ranking[best] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t i = 0; i < chosen; ++i)
      weights[i] = (o.normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * static_cast<float>(o.scale);
    if (const float* factors = numbers<float>(o.factors))
      for (int64_t i = 0; i < chosen; ++i) weights[i] *= factors[experts[i]];
  }

  // After the ranking there is room for two values per group.
  static void keep_best_groups(float* ranking, int64_t count, int64_t groups, int64_t kept, bool by_two) {
    const float none = -std::numeric_limits<float>::infinity();
    const int64_t size = count / groups;
    float *quality = ranking + count, *allowed = quality + groups;
    for (int64_t g = 0; g < groups; ++g) {
      float best = none, second = none;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        if (ranking[e] > best) second = best, best = ranking[e];
        else second = std::max(second, ranking[e]);
      }
      quality[g] = by_two ? best + second : best;
    }
    std::fill_n(allowed, groups, 0.0f);
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t best = std::max_element(quality, quality + groups) - quality;
      allowed[best] = 1.0f, quality[best] = none;
    }
    for (int64_t e = 0; e < count; ++e)
      if (allowed[e / size] == 0.0f) ranking[e] = none;
  }

  // Plans a contiguous range of rows for each expert: `order` holds the row for each place.
  int64_t plan(const Sort& o) {
    const int64_t chosen = o.experts.size, count = o.count;
    int64_t* ends = at<int64_t>(o.ends, 0);
    std::fill_n(ends, count, 0);
    for (const int64_t row : s.rows)
      for (int64_t i = 0; i < chosen; ++i) ++ends[at<int64_t>(o.experts, row)[i]];
    for (int64_t e = 1; e < count; ++e) ends[e] += ends[e - 1];
    next.assign(1, 0), next.insert(next.end(), ends, ends + count - 1);  // where each expert's rows begin
    order.clear(), order.resize(s.rows.size() * chosen);
    for (const int64_t row : s.rows) {
      for (int64_t i = 0; i < chosen; ++i) {
        const int64_t to = next[at<int64_t>(o.experts, row)[i]]++;
        order[to] = row, sorted_at[row * chosen + i] = to;
      }
    }
    return static_cast<int64_t>(order.size());
  }

  void run(const Sort& o, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(at<T>(o.source, order[i]), o.source.size, at<T>(o.target, i));
  }

  int64_t plan(const ExpertProduct& o) {
    const int64_t* ends = at<int64_t>(o.ends, 0);
    used.clear();  // the weights of other experts are not read
    for (int64_t e = 0; e < o.ends.size; ++e)
      if (ends[e] > (e ? ends[e - 1] : 0)) used.push_back(e);
    return static_cast<int64_t>(used.size()) * units_of(o.target.size);
  }

  void run(const ExpertProduct& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t tiles = units_of(o.target.size);
    const int64_t* ends = at<int64_t>(o.ends, 0);
    while (begin < end) {
      const int64_t expert = used[begin / tiles], tile = begin % tiles, until = std::min(tiles, tile + end - begin);
      for (int64_t row = expert ? ends[expert - 1] : 0; row < ends[expert]; row += products.most) {
        const int64_t M = std::min(products.most, ends[expert] - row);
        const Gathered x = products.gather(o.weight, o.source, 0, M, thread, [&](int64_t m) { return row + m; });
        if (o.gated) {
          products.gate_units(o, x, expert, tile, until, [&](int64_t m) { return row + m; });
        } else {
          products.multiply_units(x, o.weight, expert, tile, until,
                                  [&](int64_t m, int64_t n, int64_t count, const float* sums) {
                                    products.finish(o, expert, row + m, n, count, sums);
                                  });
        }
      }
      begin += until - tile;
    }
  }

  void run(const Combine& o, int64_t row) {
    const float* weights = at<float>(o.weights, row);
    T* to = at<T>(o.target, row);
    for (int64_t n = 0; n < o.target.size; n += LANES) {
      float total[LANES] = {};
      for (int64_t i = 0; i < o.weights.size; ++i) {
        const T* from = at<T>(o.source, sorted_at[row * o.weights.size + i]) + n;
        for (int64_t lane = 0; lane < LANES; ++lane) total[lane] += static_cast<float>(from[lane]) * weights[i];
      }
      for (int64_t lane = 0; lane < LANES; ++lane)
        to[n + lane] = static_cast<T>((o.add ? static_cast<float>(to[n + lane]) : 0.0f) + static_cast<float>(static_cast<T>(total[lane])));
    }
  }

 private:
  Step& s;
  ProductOperations<T>& products;
  int64_t chosen = 0, experts = 0, candidates = 0;
  float* rankings;  // per thread
  int64_t* sorted_at;  // where each row's copies are, from Sort to Combine
  std::vector<int64_t> order, used, next;
};

}  // namespace snapstream
