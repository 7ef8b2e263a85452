// Cache entries as codes of 8 or 4 bits, as snapstream/cache/codes.py describes them: how numbers become codes, and what
// attention reads.
#pragma once
#include <algorithm>
#include <cmath>

#include "blocks.h"

namespace snapstream {

constexpr int64_t MOST_CHANNELS = 1024;  // MOST_HEAD_SIZE in checks.py
constexpr float SMALLEST_PEAK = 1e-30f;

inline bool is_coded(int64_t type) { return type == INT8 || type == INT4; }

// Sums and differences of lanes that are HALF apart.
template <int HALF>
inline vec with_neighbors(vec x) {
  return [&]<int... LANE>(std::integer_sequence<int, LANE...>) ALWAYS_INLINE {
    constexpr float SIGNS[] = {(LANE & HALF ? -1.0f : 1.0f)...};
    return shuffle<(LANE ^ HALF)...>(x, x) + x * load(SIGNS);
  }(std::make_integer_sequence<int, LANES>());
}

// Multiplies each `width` neighbors by the normalized Hadamard matrix, in place; `width` is at least LANES.
inline void rotate_channels(float* x, int64_t size, int64_t width) {
  for (int64_t i = 0; i < size; i += LANES)
    store(x + i, with_neighbors<8>(with_neighbors<4>(with_neighbors<2>(with_neighbors<1>(load(x + i))))));
  for (int64_t half = LANES; half < width; half *= 2) {
    for (int64_t begin = 0; begin < size; begin += 2 * half) {
      for (int64_t i = begin; i < begin + half; i += LANES) {
        const vec a = load(x + i), b = load(x + i + half);
        store(x + i, a + b), store(x + i + half, a - b);
      }
    }
  }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)));
  for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * factor);
}

// The largest magnitude, or NaN if there is a number that is not finite.
inline float peak_of(const float* x, int64_t size) {
  vec peaks{}, nothing{};
  for (int64_t i = 0; i < size; i += LANES) {
    const vec v = load(x + i);
    peaks = larger(peaks, (vec)((vec_u32)v & 0x7FFFFFFFu)), nothing += v * 0.0f;
  }
  return any(~(nothing == 0.0f)) ? std::numeric_limits<float>::quiet_NaN() : largest(peaks);
}

// Bytes with a sign that have the same bits as bytes without one.
inline vec_i32 signed_byte(vec_i32 byte) { return (byte ^ 128) - 128; }

// Rounds numbers times a factor to integers, to nearest, ties to even.
inline vec_i32 rounded_to_integers(vec x, float factor) {
  const vec y = x * factor;
#if defined(__AVX512F__)
  return (vec_i32)_mm512_cvtps_epi32((__m512)y);
#elif defined(__AVX2__)
  return {(vec_i32::Half)_mm256_cvtps_epi32(y.low), (vec_i32::Half)_mm256_cvtps_epi32(y.high)};
#else
  float whole[LANES];
  for (int lane = 0; lane < LANES; ++lane) whole[lane] = std::rint(y[lane]);
  return converted<int32_t>(load(whole));
#endif
}

// Reads 64 bytes, of which `count` exist; there are zeros after them.
inline vec_u32 load_some(const uint8_t* p, int64_t count) {
  if (count >= 64) return load_u32(p);
#if defined(__AVX512BW__)
  return (vec_u32)_mm512_maskz_loadu_epi8((1ull << count) - 1, p);
#else
  uint8_t bytes[64] = {};
  std::memcpy(bytes, p, count);
  return load_u32(bytes);
#endif
}

// Numbers of type E from the addresses FIRST and following, side by side.
template <typename E, int FIRST = 0, typename V = vec_u32, typename Function>
ALWAYS_INLINE inline V gathered(const Function& address) {
  if constexpr (Parts<V>::SEVERAL) {
    using Half = typename V::Half;
    return {gathered<E, FIRST, Half>(address), gathered<E, FIRST + sizeof(Half) / sizeof(E), Half>(address)};
  } else {
    constexpr int COUNT = sizeof(V) / sizeof(E);
    typename LanesOf<E, COUNT>::Type v;
    UNROLL for (int i = 0; i < COUNT; ++i) {
      E bits;
      std::memcpy(&bits, address(FIRST + i), sizeof(bits));
      v[i] = bits;
    }
    return (V)v;
  }
}

// Eight bytes from each of LANES addresses, of which parts of two bytes can be had as the upper halves of lanes.
struct Eights {
  vec_u32 first, second;

  template <typename Function>
  ALWAYS_INLINE explicit Eights(const Function& address)
      : first(gathered<uint64_t>(address)), second(gathered<uint64_t, LANES / 2>(address)) {}

  vec_u32 upper(int64_t part) const {
    const vec_u32 word = part < 2 ? shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(first, second)
                                  : shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(first, second);
    return part % 2 ? word & 0xFFFF0000u : word << 16;
  }
};

// The formats. CHUNK numbers of an entry have 64 bytes of codes, which have no sign and are OFFSET too large. An entry has
// `scales` of them, each for a part of it.

// 8 bits: a scale per entry.
struct Codes8 {
  static constexpr int64_t OFFSET = 128, CHUNK = 64, WEIGHT_BYTES = 2;  // of a weight that values are multiplied with
  static constexpr bool EIGHT_BITS = true;

  static void encode(const float* x, int64_t size, uint8_t* to) {
    const float peak = peak_of(x, size), scale = peak <= SMALLEST_PEAK ? 0.0f : peak / 127.0f;
    const float factor = 127.0f / peak;
    for (int64_t i = 0; i < size; i += LANES) {
      const vec_i32 whole = peak > SMALLEST_PEAK ? rounded_to_integers(load(x + i), factor) : vec_i32{};
      store_bytes(reinterpret_cast<int8_t*>(to) + i, signed_byte(whole + 128));
    }
    std::memcpy(to + size, &scale, sizeof(scale));
  }

  static int64_t scales(int64_t) { return 1; }

  // The scales of LANES entries.
  ALWAYS_INLINE static void read_scales(const uint8_t* const* rows, int64_t size, int64_t, vec* scales) {
    scales[0] = (vec)gathered<uint32_t>([&](int i) ALWAYS_INLINE { return rows[i] + size; });
  }
};

// 4 bits: a scale per 32 numbers, whose first half is in the low halves of 16 bytes, and whose second one in the high.
struct Codes4 {
  static constexpr int64_t OFFSET = 8, CHUNK = 128, WEIGHT_BYTES = 1;
  static constexpr bool EIGHT_BITS = false;

  static void encode(const float* x, int64_t size, uint8_t* to) {
    uint8_t* scales = to + size / 2;
    for (int64_t at = 0; at < size; at += PART, to += PART / 2, scales += 2) {
      const vec low = load(x + at), high = load(x + at + LANES);
      const float peak = peak_of(x + at, PART), most = largest(larger(low, high));  // not finite: peak is NaN
      const float furthest = most == peak ? peak : -peak;
      const bfloat16 scale(peak <= SMALLEST_PEAK ? 0.0f : furthest / -8.0f);
      const float wide = scale, factor = 1.0f / wide;
      const auto coded = [&](vec v) {
        if (!(peak > SMALLEST_PEAK && wide != 0.0f)) return vec_i32{} + 8;
        const vec_i32 code = rounded_to_integers(v, factor) + 8, above = code > 15;
        return (above & 15) | (~above & code);
      };
      store_bytes(reinterpret_cast<int8_t*>(to), signed_byte(coded(low) | coded(high) << 4));
      std::memcpy(scales, &scale, sizeof(scale));
    }
  }

  static int64_t scales(int64_t size) { return size / PART; }

  // The scales of the parts of LANES entries that are in the chunk from `at` on; 0 where there are none.
  ALWAYS_INLINE static void read_scales(const uint8_t* const* rows, int64_t size, int64_t at, vec* scales) {
    const int64_t count = std::min<int64_t>(CHUNK, size - at) / PART, end = size / 2 + (at / PART + count) * 2;
    const Eights last([&](int i) ALWAYS_INLINE { return rows[i] + end - 8; });  // there are 16 bytes of codes before them
    UNROLL for (int part = 0; part < 4; ++part)
      scales[part] = part < count ? (vec)last.upper(part + 4 - count) : vec{};
  }
};

// Calls function(format).
template <typename Function>
inline auto with_codes(int64_t type, const Function& function) {
  return type == INT8 ? function(Codes8()) : function(Codes4());
}

// Stores a row of numbers as codes. `frame` has the center and then the spread of each channel; no pointer: there is none.
template <typename T>
inline void encode_row(int64_t type, const T* from, int64_t size, const float* frame, int64_t width, uint8_t* to) {
  float x[MOST_CHANNELS];
  for (int64_t i = 0; i < size; i += LANES) {
    const vec numbers = load_numbers(from + i);
    store(x + i, frame ? (numbers - load(frame + i)) / load(frame + size + i) : numbers);
  }
  rotate_channels(x, size, width);
  with_codes(type, [&](auto f) { decltype(f)::encode(x, size, to); });
}

// A query as it is multiplied with codes: 8 bits with a sign. Sums of products start at what the codes' OFFSET adds to
// them, with the opposite sign.
struct CodedQuery {
  float scale;        // of its codes, times the factor on logits
  float constant;     // what the centers of all channels add to each logit
  int32_t starts[MOST_CHANNELS / PART];  // of each of the parts that have a scale
  // 0 after the last channel, as whole vectors are multiplied. Of a fixed size, so that compilers know all addresses.
  int8_t codes[MOST_CHANNELS];

  // Brings a query into this form, in which what is not finite becomes NaN.
  template <typename F, typename T>
  static void prepare(const T* query, int64_t size, const float* frame, int64_t width, float factor, CodedQuery* to) {
    float x[MOST_CHANNELS];
    vec constant{};
    for (int64_t i = 0; i < size; i += LANES) {
      const vec numbers = load_numbers(query + i);
      constant += numbers * load(frame + i);
      store(x + i, numbers * load(frame + size + i));
    }
    rotate_channels(x, size, width);
    const float peak = peak_of(x, size), inverse = 127.0f / peak;
    to->scale = peak / 127.0f * factor;
    to->constant = sum(constant) * factor;
    std::fill(to->codes + size, to->codes + (size + 127) / 128 * 128, 0);
    for (int64_t i = 0; i < size; i += LANES)
      store_bytes(to->codes + i, peak > SMALLEST_PEAK ? rounded_to_integers(load(x + i), inverse) : vec_i32{});
    const int64_t parts = F::scales(size), in_part = size / parts;
    for (int64_t part = 0; part < parts; ++part) {
      vec_i32 total{};
      for (int64_t i = part * in_part; i < (part + 1) * in_part; i += LANES)
        total += load_bytes<true>(reinterpret_cast<const uint8_t*>(to->codes) + i);
      to->starts[part] = -static_cast<int32_t>(F::OFFSET) * static_cast<int32_t>(sum(converted<float>(total)));
    }
  }
};

}  // namespace snapstream
