// Experts of a step: rows are sorted by expert, so the weights of each chosen expert are read once.
#pragma once
#include <limits>

#include "step_products.h"

namespace snapstream {

// `A` defines how to multiply, see vectors.h.
template <typename A>
class ExpertOperations {
 public:
  using T = typename A::Number;
  using Left = typename A::Left::Number;

  ExpertOperations(Step& step, ProductOperations<A>& products, int64_t threads, Scratch& scratch)
      : s(step), products(products) {
    for (int64_t i = 0; i < s.p.count; ++i) {
      const Operation& o = s.p.operations[i];
      if (o.kind == SORT) chosen = std::max(chosen, o.other.size);
      if (o.kind == SORT || o.kind == EXPERT_PRODUCT) experts = std::max(experts, o.number[0]);
      if (o.kind == CHOOSE) candidates = std::max(candidates, o.source.size);
    }
    rankings = scratch.reserve<float>(threads * 4 * candidates);
    sorted_at = scratch.reserve<int64_t>(s.p.slots * s.p.tokens * chosen);
  }

  // Allocates what a launch needs besides its scratch.
  void prepare() { order.reserve(s.place.size() * chosen), used.reserve(experts), next.reserve(experts); }

  // Chooses experts from a row's logits, see models/experts.py.
  void choose(const Operation& o, int64_t row, int64_t thread) {
    const int64_t count = o.source.size, chosen = o.target.size, groups = o.number[0], chosen_groups = o.number[1];
    const bool corrected = o.number[2] != 0, normalize = o.number[3] != 0;
    const float *logits = at<float>(o.source, row), *correction = static_cast<const float*>(o.bias);
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
    if (groups > 1) keep_best_groups(ranking, count, groups, chosen_groups, corrected);
    float* weights = at<float>(o.target, row);
    int64_t* experts = at<int64_t>(o.other, row);
    float sum = 0.0f;
    for (int64_t i = 0; i < chosen; ++i) {
      const int64_t best = std::max_element(ranking, ranking + count) - ranking;
      experts[i] = best, weights[i] = scores[best], sum += scores[best];
      ranking[best] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t i = 0; i < chosen; ++i)
      weights[i] = (normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * static_cast<float>(o.real);
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
  int64_t plan_sorting(const Operation& o) {
    const int64_t chosen = o.other.size, count = o.number[0];
    int64_t* ends = static_cast<int64_t*>(const_cast<void*>(o.bias));
    std::fill_n(ends, count, 0);
    for (const int64_t row : s.rows)
      for (int64_t i = 0; i < chosen; ++i) ++ends[at<int64_t>(o.other, row)[i]];
    for (int64_t e = 1; e < count; ++e) ends[e] += ends[e - 1];
    next.assign(1, 0), next.insert(next.end(), ends, ends + count - 1);  // where each expert's rows begin
    order.clear(), order.resize(s.rows.size() * chosen);
    for (const int64_t row : s.rows) {
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
    used.clear();  // the weights of other experts are not read
    for (int64_t e = 0; e < o.number[0]; ++e)
      if (ends[e] > (e ? ends[e - 1] : 0)) used.push_back(e);
    return static_cast<int64_t>(used.size());
  }

  void expert_product(const Operation& o, int64_t begin, int64_t end, int64_t thread) {
    const int64_t K = o.source.size, N = o.target.size, tiles = units_of(N);
    const bool gated = o.kind == EXPERT_GATED_PRODUCT;
    const int64_t* ends = static_cast<const int64_t*>(o.bias);
    while (begin < end) {
      const int64_t expert = used[begin / tiles], tile = begin % tiles, until = std::min(tiles, tile + end - begin);
      const T* weight = static_cast<const T*>(o.weight) + expert * N * K * (gated ? 2 : 1);
      for (int64_t row = expert ? ends[expert - 1] : 0; row < ends[expert]; row += ROWS_AT_ONCE) {
        const int64_t M = std::min(ROWS_AT_ONCE, ends[expert] - row);
        const Left* x = products.gather(o.source, 0, M, thread, [&](int64_t m) { return row + m; });
        const auto target = [&](int64_t m) { return at<T>(o.target, row + m); };
        if (gated) {
          products.gate(x, M, weight, nullptr, K, N, tile, until, target);
        } else {
          products.multiply_units(x, M, weight, K, N, tile, until,
                                  [&](int64_t m, int64_t n, int64_t count, const float* sums) {
                                    put(target(m) + n, load(sums), count);
                                  });
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

 private:
  Step& s;
  ProductOperations<A>& products;
  int64_t chosen = 0, experts = 0, candidates = 0;
  float* rankings;  // per thread
  int64_t* sorted_at;  // where each row's copies are; kept from launch to launch
  std::vector<int64_t> order, used, next;
};

}  // namespace snapstream
