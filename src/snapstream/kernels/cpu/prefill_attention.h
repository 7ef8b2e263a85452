// Attention of a chunk of a prompt as work for a team; see prefill_attention.cpp.
#pragma once
#include <memory>

#include "interface.h"
#include "numbers.h"
#include "team.h"

namespace snapstream {

// Needs temporaries for so many threads: may throw std::bad_alloc, but does not while it runs.
std::unique_ptr<Work> chunk_attention(const Problem<float>& problem, int64_t instructions, int64_t threads);
std::unique_ptr<Work> chunk_attention(const Problem<bfloat16>& problem, int64_t instructions, int64_t threads);

}  // namespace snapstream
