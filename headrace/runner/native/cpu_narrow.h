// What the operations over narrow weights have in common: how MLX's arrays hold them, and the threads.
//
// Threads are those of sgemm.cpp, when that library was loaded for the whole process; else the stream's own thread
// computes alone.

#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include <mlx/array.h>

#include "cpu_product.h"

namespace headrace {

namespace mx = mlx::core;

inline Threads threads() {
  static const auto run = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "headrace_parallel"));
  static const auto count = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "headrace_threads"));
  return run && count ? Threads{run, count()} : Threads{alone, 1};
}

// Weights [outputs × inputs] in a form; `outputs` counts those of both halves when gated.
struct Narrow {
  Form form;
  int inputs, outputs;

  bool operator==(const Narrow& o) const {
    return form.bits == o.form.bits && form.group == o.form.group && form.scale == o.form.scale &&
           inputs == o.inputs && outputs == o.outputs;
  }

  size_t nbytes(bool gated) const {
    const int strips = gated ? (outputs / 2 + kStrip - 1) / kStrip * 2
                             : (outputs + kStrip - 1) / kStrip;
    return size_t(strips) * form.strip_bytes(inputs);
  }
};

inline Narrow narrow(int inputs, int outputs, int bits, int group, const std::string& scale) {
  const bool known = scale == "float16" || scale == "bfloat16" || (scale == "float32" && bits != 16);
  const bool grouped = (bits == 4 || bits == 8) && (group == 32 || group == 64 || group == 128) && inputs % group == 0;
  if (!known || inputs < 1 || outputs < 1 || !(bits == 16 || grouped))
    throw std::invalid_argument("no such form of narrow weights");
  const auto kind = scale == "float16" ? kHalf : scale == "bfloat16" ? kBfloat : kFloat;
  return {{bits, group, kind}, inputs, outputs};
}

inline const uint8_t* bytes_of(const mx::array& weights) {
  if (!weights.flags().row_contiguous) throw std::invalid_argument("narrow weights must lie in one piece");
  return weights.data<uint8_t>();
}

}  // namespace headrace
