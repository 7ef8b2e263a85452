// The native loop: one launch runs a list of operations, for all layers and one or more tokens, in one team of threads.
#include "step.h"

#include <memory>
#include <new>

#include "prefill_attention.h"
#include "step_attention.h"
#include "step_draw.h"
#include "step_experts.h"
#include "step_products.h"
#include "step_prompt.h"
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
        experts(s, products, threads, scratch), recurrence(s, threads, scratch), drawing(s, threads, scratch),
        prompt(s, products, threads, scratch), threads(threads) {}

  // Prepares to run operations first .. last, `steps` times.
  void prepare(int64_t first, int64_t last, int64_t steps) {
    this->first = first, this->last = last, this->steps = steps;
    attention.prepare(), experts.prepare(), prompt.prepare();
    next = first;
    s.begin();
  }

  // Whether memory was lacking, so that operations were left out.
  bool failed = false;

  int64_t next_phase() override {
    if (now != nullptr)
      if (const int64_t count = visit(*now, [&](const auto& o) { return more_units(o); })) return count;
    for (;;) {
      while (next == last) {
        if (++s.number >= steps) {
          now = nullptr;
          return 0;
        }
        next = first;
        s.begin();
      }
      if (s.rows.empty()) {
        s.number = steps, next = last, now = nullptr;
        return 0;
      }
      now = &s.p.operations[next++], ++s.phase;
      divisor = 2;
      if (const int64_t count = visit(*now, [&](const auto& o) { return units(o); })) return count;
    }
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    visit(*now, [&](const auto& o) { work(o, begin, end, thread); });
  }

 private:
  // Units of an operation; also plans what it needs besides its buffers.
  int64_t units(const Product& o) { return s.p.many ? large(prompt.plan(o)) : units_of(o.target.size); }
  int64_t units(const GatedProduct& o) { return s.p.many ? large(prompt.plan(o)) : units_of(o.target.size); }
  int64_t units(const HeadProduct& o) { return s.p.many ? large(prompt.plan(o)) : o.source.heads; }
  int64_t units(const ExpertProduct& o) { return s.p.many ? large(prompt.plan(o)) : experts.plan(o); }
  int64_t units(const Attend& o) { return s.p.certain ? large(begin_chunk(o)) : attention.plan(o); }
  int64_t units(const Sort& o) { return experts.plan(o); }
  int64_t units(const Recur& o) { return recurrence.units(o); }
  int64_t units(const Draw&) { return s.slot_count(); }
  int64_t units(const Verify&) { return s.slot_count(); }
  int64_t units(const Commit&) { return s.slot_count() * s.p.layers; }
  int64_t units(const Advance&) { return s.slot_count(); }
  template <typename O>
  int64_t units(const O&) { return s.row_count(); }

  // Units that take long, so a thread takes one at a time.
  int64_t large(int64_t count) {
    divisor = 0;
    return count;
  }

  // Units of a further phase of the operation; 0 if there is none.
  int64_t more_units(const Attend&) { return s.p.certain ? chunk->next_phase() : 0; }
  template <typename O>
  int64_t more_units(const O& o) {
    if constexpr (requires { prompt.plan(o); })
      if (s.p.many) return prompt.next();
    return 0;
  }

  // Does units begin .. end.
  void work(const Product& o, int64_t begin, int64_t end, int64_t thread) { multiply(products, o, begin, end, thread); }
  void work(const GatedProduct& o, int64_t begin, int64_t end, int64_t thread) { multiply(products, o, begin, end, thread); }
  void work(const HeadProduct& o, int64_t begin, int64_t end, int64_t thread) { multiply(products, o, begin, end, thread); }
  void work(const ExpertProduct& o, int64_t begin, int64_t end, int64_t thread) { multiply(experts, o, begin, end, thread); }
  void work(const Attend& o, int64_t begin, int64_t end, int64_t thread) {
    s.p.certain ? chunk->run(begin, end, thread) : attention.run(o, begin, end, thread);
  }
  void work(const Sort& o, int64_t begin, int64_t end, int64_t) { experts.run(o, begin, end); }
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

  // A product of many rows, or of the few that `few` multiplies.
  template <typename Few, typename O>
  void multiply(Few& few, const O& o, int64_t begin, int64_t end, int64_t thread) {
    s.p.many ? prompt.run(o, begin, end, thread) : few.run(o, begin, end, thread);
  }

  // Units of a chunk's attention. Without memory for it, the launch ends.
  int64_t begin_chunk(const Attend& o) {
    chunk.reset();
    try {
      chunk = attention_of(o);
      return chunk->next_phase();
    } catch (const std::bad_alloc&) {
      failed = true, next = last, s.number = steps;
      return 0;
    }
  }

  std::unique_ptr<Work> attention_of(const Attend& o) const {
    const Cache& cache = s.p.caches[o.layer];
    const auto *keys = static_cast<const T*>(cache.keys), *values = static_cast<const T*>(cache.values);
    const int64_t row = cache.key_row / static_cast<int64_t>(sizeof(T)), value_row = cache.value_row / static_cast<int64_t>(sizeof(T));
    Problem<T> problem{at<T>(o.query, 0), keys, values, at<T>(o.target, 0), static_cast<T*>(cache.packed)};
    problem.tokens = s.row_count(), problem.heads = o.query.heads, problem.kv_heads = cache.kv_heads;
    problem.size = o.query.size, problem.columns = o.target.size;
    problem.query_token = o.query.row, problem.query_head = o.query.stride;
    problem.key_head = cache.entries * row, problem.key_row = row;
    problem.value_head = cache.entries * value_row, problem.value_row = value_row, problem.packed_head = cache.packed_head;
    problem.start = s.p.cached[cache.group * s.p.slots], problem.readable = cache.entries;
    problem.packed_until = *s.p.packed_until, problem.window = o.window, problem.sinks = numbers<float>(o.sinks);
    problem.scale = o.scale, problem.cap = o.cap;
    problem.out_token = o.target.row, problem.out_head = o.target.stride;
    return chunk_attention(problem, s.p.instructions, threads);
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
  PromptProducts<T> prompt;
  std::unique_ptr<Work> chunk;  // attention of a prompt's chunk, while it runs
  const int64_t threads;
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
      return int64_t{!launch.failed};
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
}
