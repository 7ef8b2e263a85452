// Decode on a CPU is bound by memory: a step reads every valid cache entry once. Stock kernels expand grouped heads and
// read entries that are not valid. Each row of the batch is computed in an order that does not depend on the other rows.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operations.h"
#include "vectors.h"

namespace snapstream {
namespace {

// ---- attention of one query token per sequence over the valid prefix of its cache ----

constexpr int64_t SPLIT = 512;  // entries per task: fixed, so that results do not depend on the batch
constexpr int BLOCK = 64;       // entries per softmax update: keys and values of a block stay in the first-level cache

template <typename T, int HEADS, int KEYS>
inline void score_keys(const T* q, const T* keys, const T* values, int64_t D, float scale, float* scores) {
  vec dot[HEADS][KEYS] = {};
  for (int64_t d = 0; d < D; d += PAIR) {
    Operand<T> k[KEYS];
    UNROLL for (int i = 0; i < KEYS; ++i) {
      k[i].read(keys + i * D + d);
      __builtin_prefetch(values + i * D + d);  // needed next, when all keys of the block are scored
    }
    UNROLL for (int h = 0; h < HEADS; ++h) {
      Operand<T> qh;
      qh.read(q + h * D + d);
      qh.hold();
      UNROLL for (int i = 0; i < KEYS; ++i) k[i].add_product(dot[h][i], qh);
    }
  }
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int i = 0; i < KEYS; ++i) scores[h * BLOCK + i] = sum(dot[h][i]) * scale;
  }
}

// Adds n rows of values, weighted, to PAIRS * 32 columns of each head's output (at `out`, heads D + LANES apart).
template <typename T, int HEADS, int PAIRS>
inline void add_values(const float* weights, const T* values, const T* next_keys, int n, int64_t D, float* out) {
  vec total[HEADS][2 * PAIRS];
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int j = 0; j < 2 * PAIRS; ++j) total[h][j] = load(out + h * (D + LANES) + j * LANES);
  }
  for (int i = 0; i < n; ++i) {
    UNROLL for (int j = 0; j < PAIRS; ++j) {
      vec low, high;
      load_pair(values + i * D + j * PAIR, low, high);
      __builtin_prefetch(next_keys + i * D + j * PAIR);
      UNROLL for (int h = 0; h < HEADS; ++h) total[h][2 * j] += low * weights[h * BLOCK + i];
      UNROLL for (int h = 0; h < HEADS; ++h) total[h][2 * j + 1] += high * weights[h * BLOCK + i];
    }
  }
  UNROLL for (int h = 0; h < HEADS; ++h) {
    UNROLL for (int j = 0; j < 2 * PAIRS; ++j) store(out + h * (D + LANES) + j * LANES, total[h][j]);
  }
}

// A task covers up to SPLIT entries for all G query heads of one KV head. state per head: maximum,
// sum, (padding,) output[D].
template <typename T, int HEADS>
void attend_split(const T* q, const T* keys, const T* values, int64_t entries, int64_t D, float scale, float* state) {
  constexpr int KEYS = 4;
  const int64_t stride = D + LANES;
  alignas(64) float scores[HEADS][BLOCK];
  float top[HEADS], total[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    top[h] = -std::numeric_limits<float>::infinity();
    total[h] = 0.0f;
    std::fill_n(state + h * stride + LANES, D, 0.0f);
  }
  for (int64_t start = 0; start < entries; start += BLOCK) {
    const int n = static_cast<int>(std::min<int64_t>(BLOCK, entries - start));
    int i = 0;
    const T *block_keys = keys + start * D, *block_values = values + start * D;
    for (; i + KEYS <= n; i += KEYS)
      score_keys<T, HEADS, KEYS>(q, block_keys + i * D, block_values + i * D, D, scale, &scores[0][i]);
    for (; i < n; ++i) score_keys<T, HEADS, 1>(q, block_keys + i * D, block_values + i * D, D, scale, &scores[0][i]);
    for (int h = 0; h < HEADS; ++h) {
      for (int i = n; i < BLOCK; ++i) scores[h][i] = -std::numeric_limits<float>::infinity();
      float highest = top[h];
      for (int i = 0; i < BLOCK; ++i) highest = std::max(highest, scores[h][i]);
      const vec shift = exp_nonpositive(vec{} + std::max(top[h] - highest, -100.0f));
      const float rescale = top[h] == highest ? 1.0f : shift[0];
      vec added = {};
      for (int i = 0; i < BLOCK; i += LANES) {
        vec p = load(scores[h] + i) - highest;
        p = exp_nonpositive(p);
        store(scores[h] + i, p);
        added += p;
      }
      total[h] = total[h] * rescale + sum(added);
      if (rescale != 1.0f)
        for (int64_t d = 0; d < D; ++d) state[h * stride + LANES + d] *= rescale;
      top[h] = highest;
    }
    int64_t d = 0;  // 64 values of each head at a time stay in registers
    const T* next_keys = block_keys + BLOCK * D;
    for (; d + 2 * PAIR <= D; d += 2 * PAIR)
      add_values<T, HEADS, 2>(scores[0], block_values + d, next_keys + d, n, D, state + LANES + d);
    for (; d < D; d += PAIR)
      add_values<T, HEADS, 1>(scores[0], block_values + d, next_keys + d, n, D, state + LANES + d);
  }
  for (int h = 0; h < HEADS; ++h) {
    state[h * stride] = top[h];
    state[h * stride + 1] = total[h];
  }
}

template <typename T>
void attend_heads(const T* q, const T* k, const T* v, int64_t entries, int64_t D, int64_t G, float scale,
                  float* state) {
  for (int64_t g = 0; g < G;) {
    float* s = state + g * (D + LANES);
    switch (std::min<int64_t>(4, G - g)) {
      case 1: attend_split<T, 1>(q + g * D, k, v, entries, D, scale, s); g += 1; break;
      case 2: attend_split<T, 2>(q + g * D, k, v, entries, D, scale, s); g += 2; break;
      case 3: attend_split<T, 3>(q + g * D, k, v, entries, D, scale, s); g += 3; break;
      default: attend_split<T, 4>(q + g * D, k, v, entries, D, scale, s); g += 4; break;
    }
  }
}

template <typename T>
void attention_kernel(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                      const at::Tensor& valid, double scale, at::Tensor& out) {
  const int64_t B = query.size(0), H = query.size(1), D = query.size(2), N = keys.size(1), C = keys.size(2);
  const int64_t G = H / N, splits = (C + SPLIT - 1) / SPLIT, stride = D + LANES;
  const T* qp = query.const_data_ptr<T>();
  const T* kp = keys.const_data_ptr<T>();
  const T* vp = values.const_data_ptr<T>();
  const int64_t* lengths = valid.const_data_ptr<int64_t>();
  T* op = out.mutable_data_ptr<T>();
  const at::Tensor scratch = at::empty({B * N * splits * G * stride}, query.options().dtype(at::kFloat));
  float* states = scratch.mutable_data_ptr<float>();
  // Only splits that hold valid entries become tasks, so short sequences and free slots cost nothing.
  std::vector<int64_t> tasks;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t s = 0; s * SPLIT < std::min(lengths[b], C); ++s) tasks.push_back((b * N + n) * splits + s);
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t task = tasks[t], s = task % splits, row = task / splits, b = row / N;
      const int64_t first = s * SPLIT, entries = std::min(SPLIT, std::min(lengths[b], C) - first);
      const int64_t offset = (row * C + first) * D;
      attend_heads<T>(qp + row * G * D, kp + offset, vp + offset, entries, D, G, static_cast<float>(scale),
                      states + task * G * stride);
    }
  });
  for (int64_t row = 0; row < B * N; ++row) {
    const int64_t used = (std::max<int64_t>(std::min(lengths[row / N], C), 0) + SPLIT - 1) / SPLIT;
    for (int64_t g = 0; g < G; ++g) {
      const float* state = states + (row * splits * G + g) * stride;
      float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
      for (int64_t s = 0; s < used; ++s) top = std::max(top, state[s * G * stride]);
      float merged[1024] = {};
      for (int64_t s = 0; s < used; ++s) {
        const float* part = state + s * G * stride;
        const float weight = std::exp(part[0] - top);
        total += weight * part[1];
        for (int64_t d = 0; d < D; ++d) merged[d] += weight * part[LANES + d];
      }
      T* o = op + (row * G + g) * D;
      for (int64_t d = 0; d < D; ++d) o[d] = static_cast<T>(used ? merged[interleave<T>(d)] / total : 0.0f);
    }
  }
}

}  // namespace

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                            const at::Tensor& valid, double scale) {
  TORCH_CHECK(query.dim() == 3 && keys.dim() == 4 && keys.sizes() == values.sizes() && valid.dim() == 1,
              "decode_attention: expected query [B, H, D], keys and values [B, N, C, D], valid [B]");
  TORCH_CHECK(query.size(0) == keys.size(0) && valid.size(0) == keys.size(0) && query.size(2) == keys.size(3) &&
                  query.size(1) % keys.size(1) == 0,
              "decode_attention: shapes do not match");
  TORCH_CHECK(query.size(2) % PAIR == 0 && query.size(2) <= 1024, "decode_attention: head size must be a multiple of ",
              PAIR, ", at most 1024");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && valid.is_contiguous() &&
                  valid.scalar_type() == at::kLong,
              "decode_attention: caches and lengths must be contiguous, lengths int64");
  TORCH_CHECK(keys.scalar_type() == query.scalar_type() && values.scalar_type() == query.scalar_type(),
              "decode_attention: types do not match");
  const at::Tensor q = query.contiguous();
  at::Tensor out = at::empty(query.sizes(), query.options());
  if (query.scalar_type() == at::kBFloat16) {
    attention_kernel<at::BFloat16>(q, keys, values, valid, scale, out);
  } else {
    TORCH_CHECK(query.scalar_type() == at::kFloat, "decode_attention: float32 or bfloat16 only");
    attention_kernel<float>(q, keys, values, valid, scale, out);
  }
  return out;
}

}  // namespace snapstream
