// A team of threads that works phase by phase, without barriers between phases.
//
// Each thread has a range of the units of a phase, takes a few of them at once, and then helps the others. The thread
// that finishes the last unit prepares and opens the next phase; the others find it open. A thread that the system has
// descheduled therefore delays the others only if it was in the middle of its units. A launch ends when its work is
// done, whether or not all threads are awake.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace snapstream {

class Work {
 public:
  virtual ~Work() = default;

  // Units of the next phase; 0 if there is none. Called by one thread at a time, after all units before are done.
  virtual int64_t next_phase() = 0;

  // Does units begin .. end of the phase, on thread number `thread`.
  virtual void run(int64_t begin, int64_t end, int64_t thread) = 0;

  // A thread takes the rest of a range divided by this at once; 0: one unit.
  int64_t divisor = 0;
};

// Runs all phases on up to `threads` threads, including the caller's. While another thread uses the team, the caller
// works alone.
void run_team(Work& work, int64_t threads);

// Calls make_task()(number) for all numbers below `count`, with one task object per thread. Each takes the next number
// when it has finished the last.
template <typename MakeTask>
void share_out(int64_t threads, int64_t count, const MakeTask& make_task) {
  using Task = decltype(make_task());
  struct Numbers : Work {
    int64_t count;
    std::vector<Task> tasks;
    int64_t next_phase() override { return std::exchange(count, 0); }
    void run(int64_t begin, int64_t end, int64_t thread) override {
      for (int64_t number = begin; number < end; ++number) tasks[thread](number);
    }
  } work;
  work.count = count;
  work.tasks.reserve(threads);
  for (int64_t thread = 0; thread < threads; ++thread) work.tasks.push_back(make_task());
  run_team(work, count == 1 ? 1 : threads);
}

}  // namespace snapstream
