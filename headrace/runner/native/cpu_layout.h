// Weights as checkpoints hold them, laid out in strips (cpu_products.h) by all threads.
//
// Rows of a matrix often lie a power of two apart, so that sixteen of them compete for the same few lines of a cache.
// A strip is therefore turned in blocks: sixteen short runs, each read to its end, are turned in the nearest cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_product.h"

namespace headrace {

constexpr int kRunBytes = 128;             // of a row, turned at a time
constexpr int64_t kTaskBytes = 256 << 10;  // of strips, a thread's at a time

// Matrices [outputs × inputs] of experts, one after the other. Affine: words as MLX packs them, a scale and a bias of
// a group; 16 bits: weights alone. Each expert begins a strip, and its last one is filled with zeros.
struct Layout {
  Form form;
  const uint8_t *weights, *scales, *biases;
  int experts, outputs, inputs;
  uint8_t* to;

  int strips() const { return (outputs + kStrip - 1) / kStrip; }
};

// `rows` rows of values, `stride` bytes apart -> columns of sixteen, each put where `place` says.
template <typename Value, typename Place>
inline void turn(const uint8_t* from, int64_t stride, int rows, int columns, const Place& place) {
  constexpr int kRun = kRunBytes / sizeof(Value);
  alignas(64) Value runs[kStrip][kRun] = {};
  for (int start = 0; start < columns; start += kRun, from += kRunBytes) {
    const int count = std::min(kRun, columns - start);
    for (int row = 0; row < rows; row++) std::memcpy(runs[row], from + row * stride, sizeof(Value) * count);
    for (int i = 0; i < count; i++) {
      Value column[kStrip];
#pragma GCC unroll 16
      for (int row = 0; row < kStrip; row++) column[row] = runs[row][i];
      std::memcpy(place(start + i), column, sizeof column);
    }
  }
}

template <typename Value>
inline void turn_scales(const Layout& l, const uint8_t* from, int rows, uint8_t* to) {
  const int groups = l.inputs / l.form.group;
  turn<Value>(from, sizeof(Value) * groups, rows, groups, [&](int g) { return to + g * l.form.group_bytes(); });
}

inline void lay_out_strip(const Layout& l, int strip) {
  const int first = strip % l.strips() * kStrip, rows = std::min(kStrip, l.outputs - first);
  const int64_t row = int64_t(strip / l.strips()) * l.outputs + first;
  uint8_t* to = l.to + strip * l.form.strip_bytes(l.inputs);
  if (l.form.bits == 16) {
    const int64_t stride = int64_t(l.inputs) * 2;
    turn<uint16_t>(l.weights + row * stride, stride, rows, l.inputs, [&](int k) { return to + k * 2 * kStrip; });
    return;
  }
  const int words = l.form.group * l.form.bits / 32, groups = l.inputs / l.form.group;
  const int64_t stride = int64_t(groups) * words * 4, scales = int64_t(groups) * l.form.scale_bytes();
  turn<uint32_t>(l.weights + row * stride, stride, rows, groups * words, [&](int word) {
    return to + word / words * l.form.group_bytes() + word % words * 4 * kStrip;
  });
  to += words * 4 * kStrip;
  const auto further = l.form.scale == kFloat ? turn_scales<uint32_t> : turn_scales<uint16_t>;
  further(l, l.scales + row * scales, rows, to);
  further(l, l.biases + row * scales, rows, to + kStrip * l.form.scale_bytes());
}

inline void lay_out_strips(const void* task, int first, int last) {
  const Layout& l = *static_cast<const Layout*>(task);
  for (int strip = first; strip < last; strip++) lay_out_strip(l, strip);
}

inline void lay_out(const Layout& l, const Threads& threads) {
  const int step = int(std::max<int64_t>(1, kTaskBytes / l.form.strip_bytes(l.inputs)));
  threads.run(&l, lay_out_strips, l.experts * l.strips(), step);
}

// Strips of two matrices in turns.
struct Turns {
  const uint8_t *gate, *other;
  int strips;  // of each
  int64_t strip_bytes;
  uint8_t* to;
};

inline void take_turns(const void* task, int first, int last) {
  const Turns& t = *static_cast<const Turns*>(task);
  for (int64_t strip = first; strip < last; strip++) {
    uint8_t* to = t.to + 2 * strip * t.strip_bytes;
    std::memcpy(to, t.gate + strip * t.strip_bytes, t.strip_bytes);
    std::memcpy(to + t.strip_bytes, t.other + strip * t.strip_bytes, t.strip_bytes);
  }
}

inline void interleave(const Turns& t, const Threads& threads) {
  threads.run(&t, take_turns, t.strips, int(std::max<int64_t>(1, kTaskBytes / (2 * t.strip_bytes))));
}

}  // namespace headrace
