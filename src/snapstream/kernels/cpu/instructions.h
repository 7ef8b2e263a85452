// Ways to multiply, numbered as in prefill.py.
#pragma once
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace snapstream {

enum Instructions : int64_t { PORTABLE = 0, PAIRS = 1, TILES = 2 };

}  // namespace snapstream
