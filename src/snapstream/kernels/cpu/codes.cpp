// Numbers become codes, see snapstream/cache/codes.py.
#include "codes.h"
#include "team.h"

using namespace snapstream;

EXPORT int64_t snapstream_encode(const Encoding* a, int64_t threads) {
  constexpr int64_t ROWS = 64;  // per task
  const int64_t parts = (a->entries + ROWS - 1) / ROWS;
  try {
    share_out(threads, a->heads * parts, [a, parts] {
      return [a, parts](int64_t number) {
        const int64_t head = number / parts, first = number % parts * ROWS, end = std::min(first + ROWS, a->entries);
        const float* frame = a->frames ? a->frames + head * 2 * a->size : nullptr;
        with_type(a->type, [&](auto n) {
          const auto* from = static_cast<const decltype(n)*>(a->numbers) + head * a->head;
          for (int64_t i = first; i < end; ++i)
            encode_row(a->codes, from + i * a->row, a->size, frame, a->rotation, a->out + head * a->out_head + i * a->out_row);
        });
      };
    });
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
