// The types that kernels support: float and bfloat16, the upper half of a float.
#pragma once
#include <cstdint>
#include <cstring>

namespace snapstream {

struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;

  // Rounds to nearest, ties to even.
  explicit bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof(wide));
    bits = value != value ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
  }

  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};

static_assert(sizeof(bfloat16) == 2);

}  // namespace snapstream
