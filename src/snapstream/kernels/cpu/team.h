// A team of threads that does work phase by phase without a barrier between them.
//
// Each thread has a range of the units of a phase, takes a few of them at a time, and then helps the others. Whoever
// finishes the last unit prepares the next phase and opens it; the others find it open. So a thread that the system has
// put to sleep holds up the others only if it slept in the middle of its units, and a launch is over when its work is
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

  // Units of the next phase; 0 when there is none. One thread at a time calls it, after all units before are done.
  virtual int64_t next_phase() = 0;

  // Does units begin .. end of the phase, on thread number `thread`.
  virtual void run(int64_t begin, int64_t end, int64_t thread) = 0;

  // Those that are left of a range, divided by this, are taken at once; 0: one.
  int64_t divisor = 0;
};

// Does all phases on up to `threads` threads, the caller's among them. While another thread
// uses the team, the caller works alone.
void run_team(Work& work, int64_t threads);

// Calls make_task()(number) for all numbers below `count`: one task object a thread, which takes the next number when it
// is done with the last.
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
