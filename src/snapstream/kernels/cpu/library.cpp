#include <torch/library.h>

#include "operations.h"

TORCH_LIBRARY(snapstream_cpu, m) {
  m.def("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("grouped_linear(Tensor x, Tensor weight, Tensor ends) -> Tensor");
  m.def("decode_attention(Tensor query, Tensor keys, Tensor values, Tensor valid, float scale) -> Tensor");
  m.def(
      "prefill_attention(Tensor query, Tensor keys, Tensor values, Tensor start, float scale, Tensor(a!) packed, "
      "Tensor first, int instructions) -> Tensor");
  m.def(
      "window_attention(Tensor queries, Tensor keys, Tensor length, Tensor first_voter, Tensor candidate_end, "
      "float scale, int sink, int instructions) -> Tensor");
  m.def("best_instructions() -> int", &snapstream::best_instructions);
  m.def("has_instructions(int instructions) -> bool", &snapstream::has_instructions);
}

TORCH_LIBRARY_IMPL(snapstream_cpu, CPU, m) {
  m.impl("skinny_linear", &snapstream::skinny_linear);
  m.impl("grouped_linear", &snapstream::grouped_linear);
  m.impl("decode_attention", &snapstream::decode_attention);
  m.impl("prefill_attention", &snapstream::prefill_attention);
  m.impl("window_attention", &snapstream::window_attention);
}
