// The native loop: one launch runs a list of operations, for all layers and one or more tokens, in one team of threads.
#include "step.h"

#include <new>

#include "instructions.h"
#include "step_attention.h"
#include "step_experts.h"
#include "step_products.h"
#include "step_rows.h"
#include "team.h"

namespace snapstream {
namespace {

// A launch of some operations of a program. `A` defines how to multiply, see vectors.h.
template <typename A>
class Launch : public Work {
 public:
  Launch(const Program& program, int64_t threads, Scratch& scratch)
      : s(program), row_operations(s), products(s, threads, scratch), attention(s, threads, scratch),
        experts(s, products, threads, scratch) {
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
      now = &s.p.operations[next++];
      if (const int64_t count = units()) return count;
    }
  }

  void run(int64_t begin, int64_t end, int64_t thread) override {
    const Operation& o = *now;
    auto& r = row_operations;
    switch (o.kind) {
      case EMBED: return each_row(begin, end, [&](int64_t row) { r.embed(o, row); });
      case ANGLES: return each_row(begin, end, [&](int64_t row) { r.angles(o, row); });
      case NORM: return each_row(begin, end, [&](int64_t row) { r.norm(o, row); });
      case ROTATE: return each_row(begin, end, [&](int64_t row) { r.rotate(o, row); });
      case GATE: return each_row(begin, end, [&](int64_t row) { r.gate_row(o, row); });
      case STORE: return each_row(begin, end, [&](int64_t row) { r.store_entry(o, row); });
      case TAKE: return each_slot(begin, end, [&](int64_t slot) { r.take(o, slot); });
      case VERIFY: return each_slot(begin, end, [&](int64_t slot) { r.verify(o, slot); });
      case ADVANCE: return each_slot(begin, end, [&](int64_t slot) { r.advance(slot); });
      case COMMIT: {
        const int64_t slots = s.slot_count();
        for (int64_t i = begin; i < end; ++i) r.commit(s.active[i % slots], s.p.caches[i / slots]);
        return;
      }
      case PRODUCT: return products.product(o, begin, end, thread);
      case GATED_PRODUCT: return products.gated_product(o, begin, end, thread);
      case HEAD_PRODUCT: return products.head_product(o, begin, end, thread);
      case ATTEND: return attention.attend(o, begin, end, thread);
      case CHOOSE: return each_row(begin, end, [&](int64_t row) { experts.choose(o, row, thread); });
      case SORT: return experts.sort(o, begin, end);
      case EXPERT_GATED_PRODUCT:
      case EXPERT_PRODUCT: return experts.expert_product(o, begin, end, thread);
      case COMBINE: return each_row(begin, end, [&](int64_t row) { experts.combine(o, row); });
    }
  }

 private:
  // Units of the next operation; also allocates what it needs besides its buffers.
  int64_t units() {
    const Operation& o = *now;
    switch (o.kind) {
      case PRODUCT:
      case GATED_PRODUCT: return units_of(o.target.size);
      case HEAD_PRODUCT: return o.source.heads;
      case ATTEND: return attention.plan();
      case SORT: return experts.plan_sorting(o);
      case TAKE:
      case VERIFY:
      case ADVANCE: return s.slot_count();
      case COMMIT: return s.slot_count() * o.number[0];
      case EXPERT_GATED_PRODUCT:
      case EXPERT_PRODUCT: return experts.plan_experts(o) * units_of(o.target.size);
      default: return s.row_count();
    }
  }

  template <typename Function>
  void each_row(int64_t begin, int64_t end, const Function& function) {
    for (int64_t i = begin; i < end; ++i) function(s.rows[i]);
  }

  template <typename Function>
  void each_slot(int64_t begin, int64_t end, const Function& function) {
    for (int64_t i = begin; i < end; ++i) function(s.active[i]);
  }

  Step s;
  RowOperations<typename A::Number> row_operations;
  ProductOperations<A> products;
  AttentionOperations<A> attention;
  ExpertOperations<A> experts;
  int64_t first = 0, last = 0, steps = 0, next = 0;
  const Operation* now = nullptr;
};

// Calls function(way to multiply) with the one that the program requests.
template <typename Function>
int64_t with_arithmetic(const Program& program, const Function& function) {
  if (program.type == 0) return function(Widened<float>());
#if defined(__AVX512BF16__)
  // Where there are tiles, the vector unit is slow at pairs, see snapstream_best_instructions().
  if (program.instructions == PAIRS) return function(Paired());
#endif
  return function(Widened<bfloat16>());
}

}  // namespace
}  // namespace snapstream

using namespace snapstream;

// Bytes of temporaries that a program needs; -1 if there is not enough memory to count them.
EXPORT int64_t snapstream_scratch(const Program* program, int64_t threads) {
  try {
    return with_arithmetic(*program, [&](auto arithmetic) {
      Scratch scratch(nullptr);
      Launch<decltype(arithmetic)>(*program, threads, scratch);
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
    return with_arithmetic(*program, [&](auto arithmetic) {
      Scratch scratch(memory);
      Launch<decltype(arithmetic)> launch(*program, threads, scratch);
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
