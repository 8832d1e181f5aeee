// The small operations of a forward: norms, rotations and gates, each in one pass over its rows.

#pragma once

#include <cstdint>

namespace headrace {

// out [rows, width] = x / √(mean(x²) + eps) · weight, row by row.
void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int width, float* out);

// Rotates halves: [x1 | x2] of a position becomes [x1·c − x2·s | x1·s + x2·c].
struct Rotation {
  const float* x;      // [batch, heads, length, 2 · half], of any strides
  int64_t strides[4];
  const float* cosine;  // [batch, length, half]
  const float* sine;
  int batch, heads, length, half;
  float* out;  // [batch, heads, length, 2 · half]
};
void rotate(const Rotation& call);

// out = silu(gate) · up, or gelu(gate) · up with the tanh approximation.
void gate(const float* gate, const float* up, bool gelu, int64_t size, float* out);

}  // namespace headrace
