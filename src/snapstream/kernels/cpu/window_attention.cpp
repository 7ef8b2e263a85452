// The attention that the last queries of a prompt pay to each token, summed over them: the votes of SnapKV. Two passes
// over the keys, normaliser first, so that the logits of no more than a block are ever held.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operations.h"
#include "prefill_kernels.h"

namespace snapstream {
namespace {

constexpr int64_t SPAN = 16 * BLOCK;  // keys of a task: fixed, so that threads do not change a bit

// One sequence. Rows are the window's queries of all heads that share a KV head; row r sees keys first .. last[r].
template <typename K>
struct Window {
  const Problem<typename K::Number>& p;
  int64_t rows, tiles, first, end;
  std::vector<int32_t> last;                         // [tiles * QUERIES]
  std::vector<typename K::Operand> queries;          // [kv_heads][tiles][operands][QUERIES]
  std::vector<float> normalizer;                     // [kv_heads][tiles * QUERIES]
  std::vector<float> maxima, sums;                   // [kv_heads][spans][tiles * QUERIES]

  int64_t spans() const { return (end + SPAN - 1) / SPAN; }
};

// Calls visit(head, span, block, keys, tile, scores) for every KV head, every block of keys and every tile of rows.
template <typename K, typename Visit>
void visit_all(const Window<K>& w, const Visit& visit) {
  const int64_t spans = w.spans(), operands = w.p.size / K::PER_OPERAND * QUERIES;
  share_out(w.p.kv_heads * spans, [&] {
    constexpr int64_t SCORES = BLOCK * QUERIES * sizeof(float);
    return [&, memory = at::empty({SCORES + K::scratch(w.p.size, 0)}, at::kByte),
            session = typename K::Session()](int64_t number) {
      const int64_t head = number / spans, span = number % spans;
      auto* base = static_cast<char*>(memory.mutable_data_ptr());
      auto* scores = reinterpret_cast<float*>(base);
      for (int64_t block = span * SPAN; block < std::min(w.end, (span + 1) * SPAN); block += BLOCK) {
        const int64_t keys = std::min(BLOCK, w.end - block);
        const auto numbers = K::read(w.p, head, block, keys, base + SCORES);
        for (int64_t tile = 0; tile < w.tiles; ++tile) {
          const auto* queries = w.queries.data() + (head * w.tiles + tile) * operands;
          K::score(numbers, round_up(keys, K::MULTIPLE), w.p.size, queries, scores);
          visit(head, span, block, keys, tile, scores);
        }
      }
    };
  });
}

template <typename K>
void normalize(Window<K>& w) {
  const int64_t width = w.tiles * QUERIES, spans = w.spans();
  w.maxima.assign(w.p.kv_heads * spans * width, LOWEST);
  w.sums.assign(w.p.kv_heads * spans * width, 0.0f);
  const vec scale = vec{} + w.p.scale;
  visit_all(w, [&](int64_t head, int64_t span, int64_t block, int64_t keys, int64_t tile, const float* scores) {
    for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
      const int64_t row = tile * QUERIES + lane, state = (head * spans + span) * width + row;
      const vec_i32 last = (vec_i32)load_u32(w.last.data() + row);
      const int64_t from = std::max<int64_t>(0, w.first - block);
      vec highest = vec{} + LOWEST, sum = {};
      for (int64_t key = from; key < keys; ++key) {
        const vec s = load(scores + key * QUERIES + lane) * scale;
        highest = larger(highest, select(last >= static_cast<int32_t>(block + key), s, vec{} + LOWEST));
      }
      const vec before = load(&w.maxima[state]), maximum = larger(before, highest);
      for (int64_t key = from; key < keys; ++key) {
        const vec s = load(scores + key * QUERIES + lane) * scale;
        sum += exp_nonpositive(select(last >= static_cast<int32_t>(block + key), s, vec{} + LOWEST) - maximum);
      }
      // A row that has seen nothing yet has added nothing but ones, which its first real maximum wipes out.
      store(&w.sums[state], load(&w.sums[state]) * exp_nonpositive(before - maximum) + sum);
      store(&w.maxima[state], maximum);
    }
  });
  for (int64_t head = 0; head < w.p.kv_heads; ++head) {
    for (int64_t row = 0; row < w.rows; ++row) {
      float top = LOWEST, sum = 0.0f;
      for (int64_t span = 0; span < spans; ++span) top = std::max(top, w.maxima[(head * spans + span) * width + row]);
      for (int64_t span = 0; span < spans; ++span) {
        const int64_t state = (head * spans + span) * width + row;
        sum += w.sums[state] * std::exp(w.maxima[state] - top);
      }
      float& total = w.normalizer[head * width + row];
      if (top > LOWEST && total == 0.0f) total = top + std::log(sum);  // rows that do not vote stay at infinity
      if (top <= LOWEST) total = std::numeric_limits<float>::infinity();
    }
  }
}

template <typename K>
void vote(const Window<K>& w, float* votes, int64_t votes_head, float share) {
  const int64_t width = w.tiles * QUERIES;
  const vec scale = vec{} + w.p.scale;
  visit_all(w, [&](int64_t head, int64_t, int64_t block, int64_t keys, int64_t tile, const float* scores) {
    float* out = votes + head * votes_head + block;
    for (int64_t key = std::max<int64_t>(0, w.first - block); key < keys; ++key) {
      vec total = {};
      UNROLL for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
        const int64_t row = tile * QUERIES + lane;
        const vec weight = exp_nonpositive(load(scores + key * QUERIES + lane) * scale -
                                           load(&w.normalizer[head * width + row]));
        total += select((vec_i32)load_u32(w.last.data() + row) >= static_cast<int32_t>(block + key), weight, vec{});
      }
      out[key] += sum(total) * share;
    }
  });
}

template <typename K>
void attend_window(const at::Tensor& queries, const at::Tensor& keys, int64_t length, int64_t first_voter,
                   int64_t candidate_end, int64_t sink, double scale, float* votes, int64_t votes_head) {
  using T = typename K::Number;
  const int64_t H = queries.size(0), W = queries.size(1), D = queries.size(2), N = keys.size(0), G = H / N;
  Problem<T> p{};
  p.keys = keys.const_data_ptr<T>();
  p.kv_heads = N, p.size = D, p.readable = keys.size(1);
  p.key_head = keys.stride(0), p.key_row = keys.stride(1);
  p.scale = static_cast<float>(scale);
  const bool everything = sink < 0;  // the softmax runs over the causal prompt, else over the candidates alone
  Window<K> w{p, G * W, (G * W + QUERIES - 1) / QUERIES, everything ? 0 : sink, everything ? length : candidate_end};
  w.end = std::max<int64_t>(0, std::min(w.end, keys.size(1)));
  const int64_t width = w.tiles * QUERIES;
  w.last.assign(width, -1);
  w.normalizer.assign(N * width, std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < w.rows; ++row) {
    const int64_t position = length - W + row % W;
    if (position < first_voter) continue;
    w.last[row] = static_cast<int32_t>(everything ? position : candidate_end - 1);
    for (int64_t head = 0; head < N; ++head) w.normalizer[head * width + row] = 0.0f;
  }
  w.queries.resize(N * w.tiles * (D / K::PER_OPERAND) * QUERIES);
  const T* query = queries.const_data_ptr<T>();
  for (int64_t head = 0; head < N; ++head) {
    pack_queries<K>(
        w.rows, D, w.queries.data() + head * w.tiles * (D / K::PER_OPERAND) * QUERIES,
        [&](int64_t row) { return query + (head * G + row / W) * queries.stride(0) + row % W * queries.stride(1); });
  }
  if (w.end <= w.first) return;
  normalize(w);
  vote(w, votes, votes_head, 1.0f / static_cast<float>(G));
}

}  // namespace

at::Tensor window_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& length,
                            const at::Tensor& first_voter, const at::Tensor& candidate_end, double scale, int64_t sink,
                            int64_t instructions) {
  TORCH_CHECK(queries.dim() == 4 && keys.dim() == 4 && queries.size(0) == keys.size(0) &&
                  queries.size(3) == keys.size(3) && keys.size(1) > 0 && queries.size(1) % keys.size(1) == 0,
              "window_attention: expected queries [B, H, W, D] and keys [B, N, L, D]");
  TORCH_CHECK(queries.size(3) > 0 && queries.size(3) % PAIR == 0 && queries.stride(3) == 1 && keys.stride(3) == 1,
              "window_attention: head sizes must be multiples of ", PAIR, ", and a head's numbers lie side by side");
  TORCH_CHECK(queries.scalar_type() == keys.scalar_type(), "window_attention: types do not match");
  TORCH_CHECK(scale > 0 && has_instructions(instructions), "window_attention: a scale or instructions that cannot be");
  TORCH_CHECK(instructions == PORTABLE || keys.stride(2) % 2 == 0, "window_attention: pairs must be aligned");
  const int64_t B = keys.size(0);
  for (const at::Tensor& each : {length, first_voter, candidate_end})
    TORCH_CHECK(each.scalar_type() == at::kLong && each.is_contiguous() && each.numel() == B,
                "window_attention: lengths must be int64 [B]");
  at::Tensor votes = at::zeros({B, keys.size(1), keys.size(2)}, keys.options().dtype(at::kFloat));
  for (int64_t b = 0; b < B; ++b) {
    auto go = [&](auto kernel) {
      attend_window<decltype(kernel)>(queries[b], keys[b], length.const_data_ptr<int64_t>()[b],
                                      first_voter.const_data_ptr<int64_t>()[b],
                                      candidate_end.const_data_ptr<int64_t>()[b], sink, scale,
                                      votes.mutable_data_ptr<float>() + b * votes.stride(0), votes.stride(1));
    };
    if (keys.scalar_type() == at::kFloat) {
      go(Portable<float>());
      continue;
    }
    TORCH_CHECK(keys.scalar_type() == at::kBFloat16, "window_attention: float32 or bfloat16 only");
    switch (instructions) {
#if defined(SNAPSTREAM_TILES)
      case TILES: go(Tiles()); break;
#endif
#if defined(__AVX512BF16__)
      case PAIRS: go(Pairs()); break;
#endif
      default: go(Portable<at::BFloat16>());
    }
  }
  return votes;
}

}  // namespace snapstream
