#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace snapstream {
namespace {

constexpr int SPINS = 500;  // iterations of a waiting loop, some microseconds, before a thread yields its core

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int64_t size) : ranges(size) {
    try {
      for (int64_t thread = 1; thread < size; ++thread) std::thread([this, thread] { serve(thread); }).detach();
    } catch (...) {  // no more threads, or no memory for them: the existing ones do the work
    }
  }

  void run(Work& to_do) {
    work = &to_do;
    const uint32_t this_launch = launch.load(std::memory_order_relaxed) + 1;  // odd while there is work
    launch.store(this_launch, std::memory_order_release);
    launch.notify_all();
    open_next_phase(0);
    int idle = 0;
    while (launch.load(std::memory_order_acquire) == this_launch) {
      if (take(0)) {
        idle = 0;
      } else {
        wait(idle);
      }
    }
  }

 private:
  void wait(int& idle) {
    if (++idle < SPINS) {
      relax();
    } else {
      sched_yield();
    }
  }

  // The main loop of a thread other than the caller's.
  void serve(int64_t thread) {
    int idle = 0;
    for (;;) {
      const uint32_t seen = launch.load(std::memory_order_acquire);
      if (take(thread)) {
        idle = 0;
      } else if (seen % 2 == 1 || idle < SPINS) {
        wait(idle);
      } else {
        launch.wait(seen, std::memory_order_acquire);
        idle = 0;
      }
    }
  }

  // Processes some units of the open phase, if any are left: the thread's own, or else another's.
  bool take(int64_t thread) {
    const int64_t threads = static_cast<int64_t>(ranges.size());
    for (int64_t i = 0; i < threads; ++i)
      if (take_from((thread + i) % threads, thread)) return true;
    return false;
  }

  // A thread takes from the front of its own range, which it thus reads sequentially, and from the back of others'.
  bool take_from(int64_t owner, int64_t thread) {
    std::atomic<uint64_t>& range = ranges[owner].units;
    uint64_t now = range.load(std::memory_order_acquire), then;
    int64_t begin, end;
    do {
      const int64_t first = static_cast<int64_t>(now & 0xFFFFFFFFu), last = static_cast<int64_t>(now >> 32);
      if (first >= last) return false;
      const int64_t part = divisor.load(std::memory_order_relaxed);
      const int64_t count = part ? std::max<int64_t>(1, (last - first) / part) : 1;
      if (owner == thread) {
        begin = first, end = first + count, then = packed(end, last);
      } else {
        begin = last - count, end = last, then = packed(first, begin);
      }
      // If the phase has changed but the range is the same, the units taken belong to the phase that is open now.
    } while (!range.compare_exchange_weak(now, then, std::memory_order_acq_rel, std::memory_order_acquire));
    work->run(begin, end, thread);
    if (left.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin) open_next_phase(thread);
    return true;
  }

  // Phases of a single unit run at once, because distributing them would take longer.
  void open_next_phase(int64_t thread) {
    int64_t units = work->next_phase();
    while (units == 1) {
      work->run(0, 1, thread);
      units = work->next_phase();
    }
    if (units == 0) {
      launch.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    const int64_t threads = static_cast<int64_t>(ranges.size());
    left.store(units, std::memory_order_relaxed);
    divisor.store(work->divisor, std::memory_order_relaxed);
    for (int64_t i = 0; i < threads; ++i)
      ranges[i].units.store(packed(i * units / threads, (i + 1) * units / threads), std::memory_order_release);
  }

  static uint64_t packed(int64_t first, int64_t last) {
    return static_cast<uint64_t>(last) << 32 | static_cast<uint64_t>(first);
  }

  // Units of a thread that are not taken yet: the first one in the lower half, their end in the upper half.
  struct alignas(64) Range {
    std::atomic<uint64_t> units{0};
  };

  std::vector<Range> ranges;
  alignas(64) std::atomic<int64_t> left{0};  // units of the phase that are not done
  alignas(64) std::atomic<uint32_t> launch{0};
  alignas(64) std::atomic<int64_t> divisor{0};
  Work* work = nullptr;  // of the current launch, or the last one
};

// Teams by size. They live as long as the process; their threads sleep while there is no work.
struct Teams {
  std::mutex in_use;
  std::map<int64_t, Team*> by_size;
};

Teams* teams = new Teams;

// A forked process has none of its parent's threads.
void forget_teams() { teams = new Teams; }

}  // namespace

void run_team(Work& work, int64_t threads) {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_teams);
  const auto alone = [&] {
    for (int64_t units = work.next_phase(); units > 0; units = work.next_phase()) work.run(0, units, 0);
  };
  if (threads < 2) return alone();
  std::unique_lock<std::mutex> lock(teams->in_use, std::try_to_lock);
  if (!lock) return alone();
  Team*& team = teams->by_size[threads];
  if (team == nullptr) team = new Team(threads);
  team->run(work);
}

}  // namespace snapstream
