// The native loop: one launch runs a list of operations, for all layers and one or more tokens, in one team of threads.
#include "step.h"

#include <new>

#include "step_attention.h"
#include "step_draw.h"
#include "step_experts.h"
#include "step_products.h"
#include "step_recurrence.h"
#include "step_rows.h"
#include "team.h"

namespace snapstream {
namespace {

// A launch of some operations of a program with activations of type T.
template <typename T>
class Launch : public Work {
 public:
  Launch(const Program& program, int64_t threads, Scratch& scratch)
      : s(program), row_operations(s), products(s, threads, scratch), attention(s, threads, scratch),
        experts(s, products, threads, scratch), recurrence(s, threads, scratch), drawing(s, threads, scratch) {
    divisor = 2;
  }

  // Prepares to run operations first .. last, `steps` times.
  void prepare(int64_t first, int64_t last, int64_t steps) {
    this->first = first, this->last = last, this->steps = steps;
    attention.prepare(), experts.prepare();
    next = first;
    s.begin();
  }

  int64_t next_phase() override {
    for (;;) {
      while (next == last) {
        if (++s.number >= steps) return 0;
        next = first;
        s.begin();
      }
      if (s.rows.empty()) {
        s.number = steps, next = last;
        return 0;
      }
      now = &s.p.operations[next++], ++s.phase;
      if (const int64_t count = visit(*now, [&](const auto& o) { return units(o); })) return count;
    }
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    visit(*now, [&](const auto& o) { work(o, begin, end, thread); });
  }

 private:
  // Units of an operation; also plans what it needs besides its buffers.
  int64_t units(const Product& o) { return units_of(o.target.size); }
  int64_t units(const GatedProduct& o) { return units_of(o.target.size); }
  int64_t units(const HeadProduct& o) { return o.source.heads; }
  int64_t units(const Attend& o) { return attention.plan(o); }
  int64_t units(const Sort& o) { return experts.plan(o); }
  int64_t units(const ExpertProduct& o) { return experts.plan(o); }
  int64_t units(const Recur& o) { return recurrence.units(o); }
  int64_t units(const Draw&) { return s.slot_count(); }
  int64_t units(const Verify&) { return s.slot_count(); }
  int64_t units(const Commit&) { return s.slot_count() * s.p.layers; }
  int64_t units(const Advance&) { return s.slot_count(); }
  template <typename O>
  int64_t units(const O&) { return s.row_count(); }

  // Does units begin .. end.
  void work(const Product& o, int64_t begin, int64_t end, int64_t thread) { products.run(o, begin, end, thread); }
  void work(const GatedProduct& o, int64_t begin, int64_t end, int64_t thread) { products.run(o, begin, end, thread); }
  void work(const HeadProduct& o, int64_t begin, int64_t end, int64_t thread) { products.run(o, begin, end, thread); }
  void work(const Attend& o, int64_t begin, int64_t end, int64_t thread) { attention.run(o, begin, end, thread); }
  void work(const Sort& o, int64_t begin, int64_t end, int64_t) { experts.run(o, begin, end); }
  void work(const ExpertProduct& o, int64_t begin, int64_t end, int64_t thread) { experts.run(o, begin, end, thread); }
  void work(const Choose& o, int64_t begin, int64_t end, int64_t thread) {
    for (int64_t i = begin; i < end; ++i) experts.run(o, s.rows[i], thread);
  }
  void work(const Combine& o, int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) experts.run(o, s.rows[i]);
  }
  void work(const Recur& o, int64_t begin, int64_t end, int64_t thread) { recurrence.run(o, begin, end, thread); }
  void work(const Draw& o, int64_t begin, int64_t end, int64_t thread) {
    for (int64_t i = begin; i < end; ++i) drawing.run(o, s.active[i], thread);
  }
  void work(const Verify& o, int64_t begin, int64_t end, int64_t) { each_slot(o, begin, end); }
  void work(const Advance& o, int64_t begin, int64_t end, int64_t) { each_slot(o, begin, end); }
  void work(const Commit&, int64_t begin, int64_t end, int64_t) {
    const int64_t slots = s.slot_count();
    for (int64_t i = begin; i < end; ++i) row_operations.commit(s.active[i % slots], s.p.caches[i / slots]);
  }
  template <typename O>
  void work(const O& o, int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) row_operations.run(o, s.rows[i]);
  }

  template <typename O>
  void each_slot(const O& o, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row_operations.run(o, s.active[i]);
  }

  Step s;
  RowOperations<T> row_operations;
  ProductOperations<T> products;
  AttentionOperations<T> attention;
  ExpertOperations<T> experts;
  RecurrenceOperations<T> recurrence;
  Drawing drawing;
  int64_t first = 0, last = 0, steps = 0, next = 0;
  const Operation* now = nullptr;
};

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Bytes of temporaries that a program needs; -1 if there is not enough memory to count them.
EXPORT int64_t snapstream_scratch(const Program* program, int64_t threads) {
  try {
    return with_type(program->type, [&](auto number) {
      Scratch scratch(nullptr);
      Launch<decltype(number)>(*program, threads, scratch);
      return scratch.bytes;
    });
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Runs operations first .. last, `steps` times, on at most as many threads as there is scratch for. Returns false if it
// ran out of memory.
EXPORT int64_t snapstream_run(const Program* program, char* memory, int64_t first, int64_t last, int64_t steps,
                              int64_t threads) {
  try {
    return with_type(program->type, [&](auto number) {
      Scratch scratch(memory);
      Launch<decltype(number)> launch(*program, threads, scratch);
      launch.prepare(first, last, steps);
      run_team(launch, threads);
      return int64_t{true};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Runs one row-wise operation on all rows.
EXPORT int64_t snapstream_rows(const Operation* operation, int64_t type, int64_t rows, int64_t threads) {
  Program program{};
  program.operations = operation, program.count = 1, program.type = type, program.slots = rows, program.tokens = 1;
  return snapstream_run(&program, nullptr, 0, 1, 1, threads);
}
