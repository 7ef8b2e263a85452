#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

namespace snapstream {
namespace {

constexpr int SPINS = 500;  // turns of a waiting loop, some microseconds, before a thread lets others have its core

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int64_t size) {
    try {
      for (int64_t thread = 1; thread < size; ++thread) std::thread([this, thread] { serve(thread); }).detach();
    } catch (const std::system_error&) {  // the system gives no more; those that are there do the work
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

  // The life of a thread other than the caller's.
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

  // Does some units of the phase that is open, if any are left.
  bool take(int64_t thread) {
    uint64_t now = ticket.load(std::memory_order_acquire);
    int64_t begin, end, total;
    do {
      begin = static_cast<int64_t>(now & 0xFFFFFFFFu), total = static_cast<int64_t>(now >> 32);
      if (begin >= total) return false;
      // Nobody else ends the phase while units of it are left, so `divisor` is that of the ticket, or the exchange fails.
      const int64_t divisor = fraction.load(std::memory_order_relaxed);
      end = begin + (divisor ? std::max<int64_t>(1, (total - begin) / divisor) : 1);
    } while (!ticket.compare_exchange_weak(now, now + static_cast<uint64_t>(end - begin), std::memory_order_acq_rel,
                                           std::memory_order_acquire));
    work->run(begin, end, thread);
    if (done.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == total) open_next_phase(thread);
    return true;
  }

  // Phases of a single unit are done at once: to hand them out would take longer.
  void open_next_phase(int64_t thread) {
    int64_t units = work->next_phase();
    while (units == 1) {
      work->run(0, 1, thread);
      units = work->next_phase();
    }
    done.store(0, std::memory_order_relaxed);
    fraction.store(work->fraction, std::memory_order_relaxed);
    if (units == 0) {
      ticket.store(0, std::memory_order_release);
      launch.fetch_add(1, std::memory_order_acq_rel);
    } else {
      ticket.store(static_cast<uint64_t>(units) << 32, std::memory_order_release);
    }
  }

  alignas(64) std::atomic<uint64_t> ticket{0};  // units of the phase above, next one below
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<uint32_t> launch{0};
  alignas(64) std::atomic<int64_t> fraction{0};
  Work* work = nullptr;  // of the phase that is open, or the last
};

// Teams by their size, which last as long as the process: their threads sleep while there is nothing to do.
struct Teams {
  std::mutex in_use;
  std::map<int64_t, Team*> by_size;
};

Teams* teams = new Teams;

// A fork has none of its parent's threads.
void forget_teams() { teams = new Teams; }

}  // namespace

void run_team(Work& work, int64_t threads) {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_teams);
  std::unique_lock<std::mutex> lock(teams->in_use, std::try_to_lock);
  if (threads < 2 || !lock) {
    for (int64_t units = work.next_phase(); units > 0; units = work.next_phase()) work.run(0, units, 0);
    return;
  }
  Team*& team = teams->by_size[threads];
  if (team == nullptr) team = new Team(threads);
  team->run(work);
}

}  // namespace snapstream
