// Reads memory as fast as this machine can: the floor that benchmarks/engine.py compares decoding with.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

typedef float vec __attribute__((vector_size(64)));
constexpr int64_t ROW = 1536;  // bytes

// Reads so many rows side by side. One is fastest on some processors, eight on others.
template <int64_t STREAMS>
float add_up(const char* from, int64_t bytes) {
  vec sums[STREAMS] = {};
  for (int64_t at = 0; at + STREAMS * ROW <= bytes; at += STREAMS * ROW) {
    for (int64_t i = 0; i < ROW; i += static_cast<int64_t>(sizeof(vec))) {
#pragma GCC unroll 8
      for (int64_t s = 0; s < STREAMS; ++s) {
        const char* row = from + at + s * ROW + i;
        __builtin_prefetch(row + STREAMS * ROW);
        vec v;
        std::memcpy(&v, row, sizeof(v));
        sums[s] += v;
      }
    }
  }
  float total = 0;
  for (const vec& sum : sums)
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  return total;
}

}  // namespace

// Reads `bytes` of a buffer `passes` times, on so many threads, one or eight rows at once.
extern "C" float read_memory(const char* buffer, int64_t bytes, int64_t passes, int64_t threads, int64_t streams) {
  std::vector<float> sums(threads);
  std::vector<std::thread> team;
  const int64_t share = bytes / threads / 64 * 64;
  for (int64_t thread = 0; thread < threads; ++thread) {
    team.emplace_back([&, thread] {
      const auto read = streams == 1 ? add_up<1> : add_up<8>;
      for (int64_t pass = 0; pass < passes; ++pass) sums[thread] += read(buffer + thread * share, share);
    });
  }
  for (std::thread& each : team) each.join();
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}
