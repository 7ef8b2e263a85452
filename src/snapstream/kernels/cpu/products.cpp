// Decode on a CPU is bound by memory: a step reads every weight once. Stock kernels reach a quarter to a half of what the
// memory can deliver for few rows. Each row is computed in an order that does not depend on the other rows.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "operations.h"
#include "vectors.h"

namespace snapstream {
namespace {

// ---- y[M, N] = x[M, K] W[N, K]^T for few rows M: W is read once for up to eight rows of x ----

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

}  // namespace

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

namespace {

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

}  // namespace

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

}  // namespace snapstream
