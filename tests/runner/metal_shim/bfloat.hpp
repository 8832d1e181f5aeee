// The 16-bit float type that this compiler lacks.
#pragma once
#include <cstdint>
#include <cstring>

// bfloat16, rounded to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
};
