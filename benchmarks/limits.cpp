// How fast this processor multiplies when nothing else is in the way: the limits that benchmarks/prefill.py compares with.
// Prints one line of JSON: GFLOP/s of all threads together, by kind of multiplication.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Independent sums, so that none waits for itself; as many as registers hold, of which the smaller ones make up a vector
// of 64 bytes together.
#if defined(__AVX512F__)
constexpr int CHAINS = 16;
#define HIDE(v) asm volatile("" : "+v"(v))
#else
constexpr int CHAINS = 4;
#define HIDE(v) asm volatile("" ::"r"(&v))
#endif
constexpr int64_t TURNS = 4'000'000;
#define UNROLL _Pragma("GCC unroll 16")

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The best of five: what the processor can do, not what its neighbours left of it.
template <typename Work>
double rate(double operations_per_thread, Work work) {
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const double start = now();
#pragma omp parallel
    work();
    best = std::max(best, operations_per_thread * omp_get_max_threads() / (now() - start) / 1e9);
  }
  return best;
}

typedef float vec __attribute__((vector_size(64)));

void float32() {
  vec sums[CHAINS];
  vec one = vec{} + 1.0f;
  HIDE(one);  // or the compiler makes an addition of it
  UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = vec{} + static_cast<float>(i);
  for (int64_t turn = 0; turn < TURNS; ++turn) {
    UNROLL for (int i = 0; i < CHAINS; ++i) {
      sums[i] += one * one;
      HIDE(sums[i]);
    }
  }
}

#if defined(__AVX512BF16__)
void pairs() {
  __m512 sums[CHAINS];
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3F80);
  UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t turn = 0; turn < TURNS; ++turn) {
    UNROLL for (int i = 0; i < CHAINS; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], one, one);
      asm volatile("" : "+v"(sums[i]));
    }
  }
}
#endif

#if defined(__AMX_BF16__)
void tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } configuration;
  asm volatile("ldtilecfg %0" : : "m"(configuration));
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t turn = 0; turn < TURNS; ++turn) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

}  // namespace

int main() {
  std::printf("{\"portable\": %.0f", rate(2.0 * TURNS * CHAINS * 16, float32));
#if defined(__AVX512BF16__)
  std::printf(", \"pairs\": %.0f", rate(2.0 * TURNS * CHAINS * 32, pairs));
#endif
#if defined(__AMX_BF16__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0)  // ask the system for tile registers
    std::printf(", \"tiles\": %.0f", rate(2.0 * TURNS * 4 * 16 * 16 * 32, tiles));
#endif
  std::printf("}\n");
}
