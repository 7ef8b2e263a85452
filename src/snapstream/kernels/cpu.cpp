// Decode on a CPU is bound by memory: a step reads every weight once and every valid cache entry once. Stock kernels
// reach a quarter to a half of what the memory can deliver for these shapes (few rows, grouped heads), so the two
// operations that read memory are written out here, with the vector extensions of GCC and Clang, for any instruction
// set; one intrinsic is used where there is one, to multiply bfloat16 pairs. Each row of the batch is
// computed in an order that does not depend on the other rows.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int PAIR = 2 * LANES;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_u32 __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_i32 __attribute__((vector_size(4 * LANES)));

// The accumulators must live in registers, so every loop over them has to be unrolled.
#define UNROLL _Pragma("GCC unroll 16")

// Keeps a vector in a register: left alone, the compiler loads it again for every use, and loads are what is scarce.
inline void pin(vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
}

inline vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// 32 numbers at a time, as two vectors. A bfloat16 is the upper half of a float32, so of 32 bfloat16 the odd ones need
// a mask and the even ones a shift, and nothing has to be unpacked: `low` holds the even, `high` the odd ones. What
// they are combined with must be in the same order; interleave() puts it there. For float32 the order is the plain one.
inline void load_pair(const float* p, vec& low, vec& high) {
  low = load(p);
  high = load(p + LANES);
}

inline void load_pair(const at::BFloat16* p, vec& low, vec& high) {
  vec_u32 both;
  std::memcpy(&both, p, sizeof(both));
  low = (vec)(both << 16);
  high = (vec)(both & 0xFFFF0000u);
}

template <typename T>
inline int64_t interleave(int64_t i) {
  if constexpr (std::is_same_v<T, float>) return i;
  return i / PAIR * PAIR + (i % 2) * LANES + i % PAIR / 2;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof(v)); }

inline float sum(vec v) {
  typedef float vec8 __attribute__((vector_size(32)));
  typedef float vec4 __attribute__((vector_size(16)));
  vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// exp(x) for x <= 0: 2^n * p(r), with the polynomial's relative error below 1e-7. Very negative x gives 0.
inline vec exp_nonpositive(vec x) {
  const vec lowest = vec{} - 87.0f;
  const vec_i32 underflow = x < lowest;
  x = (vec)(((vec_i32)x & ~underflow) | ((vec_i32)lowest & underflow));
  const vec t = x * 1.44269504088896341f;
  const vec_i32 n = __builtin_convertvector(t - 0.5f, vec_i32);  // rounds to nearest for t <= 0
  const vec nf = __builtin_convertvector(n, vec);
  const vec r = (x - nf * 0.693359375f) + nf * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vec scaled = p * (vec)((n + 127) << 23);
  return (vec)((vec_i32)scaled & ~underflow);
}

// ---- y[M, N] = x[M, K] W[N, K]^T for few rows M: W is read once for up to eight rows of x ----

// 32 numbers on either side of a dot product, in whatever form multiplies fastest.
template <typename T>
struct Operand {
  vec low, high;
  void read(const T* p) { load_pair(p, low, high); }
  void hold() { pin(low), pin(high); }
  void add_product(vec& total, const Operand& other) const {
    total += low * other.low;
    total += high * other.high;
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 are multiplied exactly and added in float32; nothing has to be widened first.
template <>
struct Operand<at::BFloat16> {
  __m512i both;
  void read(const at::BFloat16* p) { both = _mm512_loadu_si512(p); }
  void hold() { asm("" : "+v"(both)); }
  void add_product(vec& total, const Operand& other) const {
    total = (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)both, (__m512bh)other.both);
  }
};
#endif

template <typename T, int M, int ROWS>
inline void linear_block(const T* x, const T* weight, int64_t K, float* out, int64_t out_stride) {
  vec total[ROWS][M] = {};
  for (int64_t k = 0; k < K; k += PAIR) {
    Operand<T> w[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      w[r].read(weight + r * K + k);
      // Rows are too short for the hardware to get into its stride; ask for those of the next block by hand.
      __builtin_prefetch(weight + (r + ROWS) * K + k);
    }
    UNROLL for (int m = 0; m < M; ++m) {
      Operand<T> xm;
      xm.read(x + m * K + k);
      xm.hold();
      UNROLL for (int r = 0; r < ROWS; ++r) w[r].add_product(total[r][m], xm);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int m = 0; m < M; ++m) out[m * out_stride + r] = sum(total[r][m]);
  }
}

template <typename T, int M>
inline void linear_tile(const T* x, const T* w, int64_t K, int64_t rows, float* out, int64_t stride) {
  constexpr int ROWS = M <= 1 ? 8 : M <= 4 ? 4 : 2;
  int64_t n = 0;
  for (; n + ROWS <= rows; n += ROWS) linear_block<T, M, ROWS>(x, w + n * K, K, out + n, stride);
  for (; n < rows; ++n) linear_block<T, M, 1>(x, w + n * K, K, out + n, stride);
}

template <typename T>
inline void linear_rows(const T* x, int64_t M, const T* w, int64_t K, int64_t rows, float* out, int64_t stride) {
  switch (M) {
    case 1: return linear_tile<T, 1>(x, w, K, rows, out, stride);
    case 2: return linear_tile<T, 2>(x, w, K, rows, out, stride);
    case 3: return linear_tile<T, 3>(x, w, K, rows, out, stride);
    case 4: return linear_tile<T, 4>(x, w, K, rows, out, stride);
    case 5: return linear_tile<T, 5>(x, w, K, rows, out, stride);
    case 6: return linear_tile<T, 6>(x, w, K, rows, out, stride);
    case 7: return linear_tile<T, 7>(x, w, K, rows, out, stride);
    default: return linear_tile<T, 8>(x, w, K, rows, out, stride);
  }
}

constexpr int64_t TILE = 32;  // weight rows per task; all groups of eight x rows pass over a tile while it is cached

// Rows m0 .. m1 of x times the tile of weight rows that begins at n0, into the same rows and columns of out [M, N].
template <typename T>
inline void multiply_tile(const T* x, int64_t m0, int64_t m1, const T* w, const T* bias, int64_t n0, int64_t K, int64_t N,
                          T* out) {
  const int64_t n1 = std::min(N, n0 + TILE);
  for (; m0 < m1; m0 += 8) {
    const int64_t group = std::min<int64_t>(8, m1 - m0);
    float y[8 * TILE];
    linear_rows(x + m0 * K, group, w + n0 * K, K, n1 - n0, y, TILE);
    for (int64_t m = 0; m < group; ++m)
      for (int64_t n = n0; n < n1; ++n)
        out[(m0 + m) * N + n] = static_cast<T>(y[m * TILE + n - n0] + (bias ? static_cast<float>(bias[n]) : 0.0f));
  }
}

template <typename T>
void linear_kernel(const at::Tensor& x, const at::Tensor& weight, const T* bias, at::Tensor& out) {
  const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
  const T* xp = x.const_data_ptr<T>();
  const T* wp = weight.const_data_ptr<T>();
  T* op = out.mutable_data_ptr<T>();
  at::parallel_for(0, (N + TILE - 1) / TILE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) multiply_tile(xp, 0, M, wp, bias, tile * TILE, K, N, op);
  });
}

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "skinny_linear: shapes do not match");
  TORCH_CHECK(x.size(1) % PAIR == 0, "skinny_linear: input size must be a multiple of ", PAIR);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "skinny_linear: types do not match");
  TORCH_CHECK(weight.is_contiguous() && (!bias || bias->is_contiguous()), "skinny_linear: weight must be contiguous");
  const at::Tensor xc = x.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  if (x.scalar_type() == at::kBFloat16) {
    linear_kernel<at::BFloat16>(xc, weight, bias ? bias->const_data_ptr<at::BFloat16>() : nullptr, out);
  } else {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "skinny_linear: float32 or bfloat16 only");
    linear_kernel<float>(xc, weight, bias ? bias->const_data_ptr<float>() : nullptr, out);
  }
  return out;
}

// ---- the same for rows sorted by expert, each expert with weights of its own: weight[E, N, K], read once each ----

template <typename T>
void grouped_kernel(const at::Tensor& x, const at::Tensor& weight, const int64_t* ends, at::Tensor& out) {
  const int64_t E = weight.size(0), N = weight.size(1), K = weight.size(2);
  const T* xp = x.const_data_ptr<T>();
  const T* wp = weight.const_data_ptr<T>();
  T* op = out.mutable_data_ptr<T>();
  const int64_t tiles = (N + TILE - 1) / TILE;
  std::vector<int64_t> chosen;  // experts that have rows; the others' weights are not touched
  for (int64_t e = 0; e < E; ++e)
    if (ends[e] > (e ? ends[e - 1] : 0)) chosen.push_back(e);
  at::parallel_for(0, static_cast<int64_t>(chosen.size()) * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t e = chosen[task / tiles];
      const T* none = nullptr;
      multiply_tile(xp, e ? ends[e - 1] : 0, ends[e], wp + e * N * K, none, task % tiles * TILE, K, N, op);
    }
  });
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2) && ends.dim() == 1 &&
                  ends.size(0) == weight.size(0),
              "grouped_linear: shapes do not match");
  TORCH_CHECK(x.size(1) % PAIR == 0, "grouped_linear: input size must be a multiple of ", PAIR);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() && ends.scalar_type() == at::kLong,
              "grouped_linear: types do not match, or ends are not int64");
  TORCH_CHECK(weight.is_contiguous() && ends.is_contiguous(), "grouped_linear: weight and ends must be contiguous");
  const int64_t* last = ends.const_data_ptr<int64_t>();
  for (int64_t e = 0; e < ends.size(0); ++e)
    TORCH_CHECK(last[e] >= (e ? last[e - 1] : 0), "grouped_linear: ends are not in order");
  TORCH_CHECK(last[ends.size(0) - 1] == x.size(0), "grouped_linear: the last end is not the number of rows");
  const at::Tensor xc = x.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
  if (x.scalar_type() == at::kBFloat16) {
    grouped_kernel<at::BFloat16>(xc, weight, last, out);
  } else {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "grouped_linear: float32 or bfloat16 only");
    grouped_kernel<float>(xc, weight, last, out);
  }
  return out;
}

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

}  // namespace

TORCH_LIBRARY(snapstream_cpu, m) {
  m.def("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("grouped_linear(Tensor x, Tensor weight, Tensor ends) -> Tensor");
  m.def("decode_attention(Tensor query, Tensor keys, Tensor values, Tensor valid, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(snapstream_cpu, CPU, m) {
  m.impl("skinny_linear", &skinny_linear);
  m.impl("grouped_linear", &grouped_linear);
  m.impl("decode_attention", &decode_attention);
}
