// A piece is large enough to be worth taking; less than two pieces are computed by the caller. Every row, or value,
// is one sequence of roundings, whatever is computed beside it.

#include "cpu_elementwise.h"

#include <cmath>

#include "cpu_vectors.h"

namespace headrace {
namespace {

constexpr int64_t kPieceValues = 16 * 1024;

int rows_of_piece(int64_t width) { return int(std::max<int64_t>(1, kPieceValues / width)); }

inline Vector gated(Vector gate, Vector up, bool gelu) {
  // 0.5 (1 + tanh z) is the logistic function of 2z.
  constexpr float kDouble = 2.0f * 0.7978845608028654f;
  Vector z = gelu ? kDouble * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * up / (1.0f + exp(-z));
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int width, float* out) {
  parallel(int(rows), rows_of_piece(width), [=](int first, int last) {
    for (int64_t row = first; row < last; row++) {
      const float* from = x + row * width;
      float* to = out + row * width;
      Vector squares = {};
      int i = 0;
      for (; i + kLanes <= width; i += kLanes) squares += load(from + i) * load(from + i);
      if (i < width) {
        Vector rest = {};
        std::memcpy(&rest, from + i, 4 * size_t(width - i));
        squares += rest * rest;
      }
      float factor = 1 / std::sqrt(sum(squares) / float(width) + eps);
      for (int j = 0; j < width; j++) to[j] = from[j] * factor * weight[j];
    }
  });
}

void rotate(const Rotation& call) {
  int rows = call.batch * call.length, half = call.half;
  parallel(rows, rows_of_piece(int64_t(call.heads) * 2 * half), [=](int first, int last) {
    for (int row = first; row < last; row++) {
      int b = row / call.length, l = row % call.length;
      const float* __restrict cosine = call.cosine + int64_t(row) * half;
      const float* __restrict sine = call.sine + int64_t(row) * half;
      for (int h = 0; h < call.heads; h++) {
        const float* x = call.x + b * call.strides[0] + h * call.strides[1] + l * call.strides[2];
        const float* y = x + half * call.strides[3];
        float* __restrict to = call.out + ((int64_t(b) * call.heads + h) * call.length + l) * 2 * half;
        if (call.strides[3] == 1) {
          for (int i = 0; i < half; i++) {
            to[i] = x[i] * cosine[i] - y[i] * sine[i];
            to[half + i] = x[i] * sine[i] + y[i] * cosine[i];
          }
        } else {
          for (int i = 0; i < half; i++) {
            float low = x[i * call.strides[3]], high = y[i * call.strides[3]];
            to[i] = low * cosine[i] - high * sine[i];
            to[half + i] = low * sine[i] + high * cosine[i];
          }
        }
      }
    }
  });
}

void gate(const float* gates, const float* up, bool gelu, int64_t size, float* out) {
  int blocks = int((size + kLanes - 1) / kLanes);
  parallel(blocks, int(kPieceValues / 2 / kLanes), [=](int first, int last) {
    for (int64_t i = int64_t(first) * kLanes; i < int64_t(last) * kLanes; i += kLanes) {
      if (i + kLanes <= size) {
        save(out + i, gated(load(gates + i), load(up + i), gelu));
        continue;
      }
      Vector a = {}, b = {};
      std::memcpy(&a, gates + i, 4 * size_t(size - i));
      std::memcpy(&b, up + i, 4 * size_t(size - i));
      a = gated(a, b, gelu);
      std::memcpy(out + i, &a, 4 * size_t(size - i));
    }
  });
}

}  // namespace headrace
