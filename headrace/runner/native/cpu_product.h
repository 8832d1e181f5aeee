// A product over narrow weights, as it is asked for; cpu_products.h computes it, in one translation unit of a library.

#pragma once

#include <cstdint>

namespace headrace {

constexpr int kStrip = 16;  // outputs that lie together

enum Scale { kHalf, kBfloat, kFloat };

// How weights are held. bits 16: no groups, `scale` tells float16 from bfloat16.
struct Form {
  int bits, group;
  Scale scale;

  int64_t group_bytes() const { return int64_t(group) * bits * 2 + 2 * kStrip * scale_bytes(); }
  int scale_bytes() const { return scale == kFloat ? 4 : 2; }
  int64_t strip_bytes(int inputs) const {
    return bits == 16 ? int64_t(inputs) * 2 * kStrip : inputs / group * group_bytes();
  }
};

constexpr int kMostParts = 4;

// gated: weights have strips of a gate and of what it gates in turns; an output is silu(gate) · other. Results go to
// one array, or are cut by outputs into several, whose widths but the last are whole strips.
struct Product {
  Form form;
  const uint8_t* weights;
  const float* bias;  // or null
  const float* x;
  int rows, inputs, outputs;
  bool gated;
  int parts;
  float* out[kMostParts];
  int widths[kMostParts];
};

using Piece = void (*)(const void* task, int first, int last);
using Parallel = void (*)(const void* task, Piece piece, int size, int step);
struct Threads {
  Parallel run;
  int count;
};

inline void alone(const void* task, Piece piece, int size, int) { piece(task, 0, size); }

void compute(const Product& product, const Threads& threads);

}  // namespace headrace
