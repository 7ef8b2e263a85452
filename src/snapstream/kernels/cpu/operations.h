// What this library adds to torch; shapes and types are documented in __init__.py.
#pragma once
#include <ATen/core/Tensor.h>

namespace snapstream {

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends);
at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                            const at::Tensor& valid, double scale);
at::Tensor prefill_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                             const at::Tensor& start, double scale, const at::Tensor& packed, const at::Tensor& first,
                             int64_t instructions);
at::Tensor window_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& length,
                            const at::Tensor& first_voter, const at::Tensor& candidate_end, double scale, int64_t sink,
                            int64_t instructions);

// Ways to multiply; __init__.py knows them by these numbers.
enum Instructions : int64_t { PORTABLE = 0, PAIRS = 1, TILES = 2 };
int64_t best_instructions();
bool has_instructions(int64_t instructions);

}  // namespace snapstream
