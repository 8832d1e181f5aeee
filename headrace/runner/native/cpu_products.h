// x · wᵀ on a CPU with weights that stay narrow in memory: a decode step of few rows is bound by the bytes it reads.
//
// Weights lie in strips of sixteen outputs, one after the other, each a single stream over k. A vector (cpu_lanes.h)
// holds one k of a strip's outputs, or two or four, of as many outputs as it has lanes.
//
// - 16-bit weights: [k][16]. Widened in registers and multiplied into a few rows, whose sums are registers; each
//   sum is one chain of multiply-adds over k = 0, 1, 2, …
// - Affine weights (scale · q + bias, q of 4 or 8 bits, a scale and a bias per group along k): per group
//   [words][16] as MLX packs them along k, then scales [16] and biases [16]. x is rounded to 16-bit integers, once
//   per product, with a scale of its own for each row and group: 128 times as fine as bfloat16. Products of integers
//   are summed exactly, two or four a lane and instruction (VNNI: twice the rate of float32), then scaled:
//   Σ_g sx_g · (s_g · Σ q·x + b_g · Σ x), one chain of multiply-adds over groups.
//
// So a row's result does not depend on how many rows there are, to the last bit. Rows are cut into bands whose sums
// fit the registers; strips stay in the cache while they meet all bands. Strips are shared out to threads.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cpu_lanes.h"
#include "cpu_product.h"

namespace headrace {

// Rows of a band: what registers hold. Affine weights: one band of up to kAffineRows, or more of kBandRows. Up to
// kPairRows meet two strips at a time; over 16-bit weights up to kWidePairRows, and up to kWideQuadRows four.
#if HEADRACE_LANES == 16
constexpr int kAffineRows = 12, kBandRows = 6, kPairRows = 6, kWideRows = 24, kWidePairRows = 12, kWideQuadRows = 2;
#elif HEADRACE_LANES == 8
constexpr int kAffineRows = 6, kBandRows = 6, kPairRows = 1, kWideRows = 6, kWidePairRows = 2, kWideQuadRows = 0;
#elif defined(__aarch64__)
constexpr int kAffineRows = 2, kBandRows = 2, kPairRows = 0, kWideRows = 5, kWidePairRows = 2, kWideQuadRows = 0;
#else
constexpr int kAffineRows = 2, kBandRows = 2, kPairRows = 0, kWideRows = 2, kWidePairRows = 0, kWideQuadRows = 0;
#endif
constexpr int kMostRows = std::max(kAffineRows, kWideRows);
constexpr int kChunk = 480;                 // rows prepared at a time: bounds the scratch
constexpr int64_t kPieceWork = 400'000;     // multiplications worth a piece
constexpr int64_t kStripBytes = 96 * 1024;  // of weights that stay in a core's cache while rows pass by …
constexpr int64_t kNearBytes = (kLanes == 16 ? 384 : 192) * 1024;  // … and of rows, while weights do

// -- rows, made ready -------------------------------------------------------------------------------------

// Bands of a chunk of rows, as equal as can be. Values of a band lie as [k][row].
struct Rows {
  int count, bands;
  int32_t* words;   // affine: 16-bit integers as Dots arranges them, [groups][words of a group][row][steps of a word]
  float* scales;    // affine: [groups][row] …
  float* sums;      // … and of the rounded values of a group, scaled
  float* values;    // 16-bit weights: [k][row]

  int start(int band) const { return band * (count / bands) + std::min(band, count % bands); }
  int height(int band) const { return count / bands + (band < count % bands); }
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory of the calling thread that lives until it is next asked for the same use.
template <int Use>
inline void* scratch(size_t bytes) {
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t capacity = 0;
  if (bytes > capacity) {
    memory.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!memory) std::abort();
    capacity = bytes;
  }
  return memory.get();
}

// One group of a row.
template <int Bits>
inline void round_group(const float* x, int group, int rows, int32_t* words, float* scale, float* sum) {
  constexpr int kSteps = Dots<Bits>::kSteps;
  Floats most = {};
  for (int k = 0; k < group; k += kLanes) most = larger(most, magnitude(read<Floats>(x + k)));
  float top = greatest(most);
  if (top < 1e-30f) top = 0;  // so that its inverse is finite
  const float inverse = top == 0 ? 0 : 32767.0f / top;
  Ints total = {};
  for (int k = 0; k < group; k += 2 * kLanes) {
    const Ints a = rounded(read<Floats>(x + k) * inverse), b = rounded(read<Floats>(x + k + kLanes) * inverse);
    total += a + b;
    const Ints arranged = Dots<Bits>::arranged(a, b);
    for (int i = 0; i < kLanes; i++) words[(k / 2 + i) / kSteps * kSteps * rows + i % kSteps] = arranged[i];
  }
  int whole = 0;
  for (int i = 0; i < kLanes; i++) whole += total[i];
  *scale = top / 32767.0f;
  *sum = float(whole) * *scale;
}

struct Preparation {
  const Product& product;
  const Rows& rows;
  const float* x;
};

inline void prepare_row(const Preparation& p, int band, int row) {
  const int start = p.rows.start(band), height = p.rows.height(band), inputs = p.product.inputs;
  const float* x = p.x + int64_t(start + row) * inputs;
  if (p.product.form.bits == 16) {
    float* to = p.rows.values + int64_t(start) * inputs + row;
    for (int k = 0; k < inputs; k++) to[int64_t(k) * height] = x[k];
    return;
  }
  const int group = p.product.form.group, groups = inputs / group;
  int32_t* words = p.rows.words + int64_t(start) * (inputs / 2) + row * (16 / p.product.form.bits);
  float* scales = p.rows.scales + int64_t(start) * groups + row;
  float* sums = p.rows.sums + int64_t(start) * groups + row;
  const auto round = p.product.form.bits == 4 ? round_group<4> : round_group<8>;
  for (int g = 0; g < groups; g++)
    round(x + int64_t(g) * group, group, height, words + int64_t(g) * (group / 2) * height, scales + g * height,
          sums + g * height);
}

inline void prepare_bands(const void* task, int first, int last) {
  const Preparation& p = *static_cast<const Preparation*>(task);
  for (int band = first; band < last; band++)
    for (int row = 0; row < p.rows.height(band); row++) prepare_row(p, band, row);
}

// -- a band by a strip ------------------------------------------------------------------------------------

// What a kernel reads: weights of its strip, its band's rows. It writes sums by vectors of a strip, then by rows.
struct Tile {
  const uint8_t* weights;
  const int32_t* words;
  const float *scales, *sums, *values;
  Form form;
  int inputs;
};
using Kernel = void (*)(const Tile& tile, Floats* sums);

template <Scale S>
inline Floats scale_at(const uint8_t* memory) {
  if constexpr (S == kFloat)
    return read<Floats>(memory);
  else
    return widened<S == kHalf>(memory);
}

// `Strips` strips at a time, so that each value of a row is loaded once for all of them, and the chains of few rows do
// not wait for each other. While one is read, the next is asked for.
template <int Rows, int Strips, int Bits, Scale S>
void affine(const Tile& tile, Floats* out) {
  using Dot = Dots<Bits>;
  constexpr int kVectors = Strips * kParts, kVectorBytes = 4 * kLanes;
  constexpr int kChains = Rows * kVectors >= kSumsUnderWay ? 1 : 2;  // integer sums may be cut at will
  constexpr int kScaleBytes = S == kFloat ? 4 : 2;
  const int64_t stride = tile.form.strip_bytes(tile.inputs);
  const int words = tile.form.group * Bits / 32, groups = tile.inputs / tile.form.group;
  Floats near[kVectors * Rows];
  Floats* total = kLanes == 16 ? near : out;  // elsewhere the integers' sums fill the registers
#pragma GCC unroll 16
  for (int i = 0; i < kVectors * Rows; i++) total[i] = Floats{};
  const uint8_t* w = tile.weights;
  const int32_t* x = tile.words;
  for (int g = 0; g < groups; g++) {
    Sums sum[kChains][kVectors][Rows] = {};
    for (int word = 0; word < words; word++, w += 4 * kStrip) {
      Ints packed[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) packed[v] = read<Ints>(w + v / kParts * stride + v % kParts * kVectorBytes);
      for (int s = 0; s < Strips; s++) __builtin_prefetch(w + (s + Strips) * stride);
      each<Dot::kSteps>([&](auto step) __attribute__((always_inline)) {
        auto& sums = sum[step % kChains];
        Ints q[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) q[v] = Dot::template weights<step>(packed[v]);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; v++)
            sums[v][r] = Dot::template add<step, (kVectors > 1)>(q[v], x + r * Dot::kSteps, sums[v][r]);
      });
      x += Rows * Dot::kSteps;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      const uint8_t* scales = w + v / kParts * stride + v % kParts * kLanes * kScaleBytes;
      const Floats scale = scale_at<S>(scales), bias = scale_at<S>(scales + kStrip * kScaleBytes);
      if (v % kParts == 0) __builtin_prefetch(scales + Strips * stride);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++) {
        Sums whole = sum[0][v][r];
        for (int c = 1; c < kChains; c++) whole = whole + sum[c][v][r];
        Floats& to = total[v * Rows + r];
        to = fused(floats(Dot::whole(whole)), scale * tile.scales[g * Rows + r], to);
        to = fused(bias, tile.sums + g * Rows + r, to);
      }
    }
    w += 2 * kStrip * kScaleBytes;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors * Rows; i++) out[i] = total[i];
}

template <int Rows, int Strips, bool Half>
void wide(const Tile& tile, Floats* out) {
  constexpr int kVectors = Strips * kParts, kVectorBytes = 2 * kLanes;
  const int64_t stride = tile.form.strip_bytes(tile.inputs);
  Floats total[kVectors][Rows] = {};
  const float* x = tile.values;
  const uint8_t* w = tile.weights;
#pragma GCC unroll 2
  for (int k = 0; k < tile.inputs; k++, x += Rows, w += 2 * kStrip) {
    Floats weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      weights[v] = widened<Half>(w + v / kParts * stride + v % kParts * kVectorBytes);
      if (k % 2 == 0 && v % kParts == 0) __builtin_prefetch(w + (v / kParts + Strips) * stride);
    }
#pragma GCC unroll 32
    for (int r = 0; r < Rows; r++) {
      if constexpr (kVectors == 1) {
        total[0][r] = fused(weights[0], x + r, total[0][r]);
      } else {
        const Floats value = everywhere(x[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) total[v][r] = fused(weights[v], value, total[v][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; v++)
#pragma GCC unroll 32
    for (int r = 0; r < Rows; r++) out[v * Rows + r] = total[v][r];
}

constexpr int kMostStrips = 4;
constexpr int affine_strips(int rows) { return rows <= kPairRows ? 2 : 1; }
constexpr int wide_strips(int rows) { return rows <= kWideQuadRows ? kMostStrips : rows <= kWidePairRows ? 2 : 1; }

template <int Rows, int Strips>
Kernel affine_form(const Form& form) {
  const bool four = form.bits == 4;
  switch (form.scale) {
    case kHalf: return four ? affine<Rows, Strips, 4, kHalf> : affine<Rows, Strips, 8, kHalf>;
    case kBfloat: return four ? affine<Rows, Strips, 4, kBfloat> : affine<Rows, Strips, 8, kBfloat>;
    default: return four ? affine<Rows, Strips, 4, kFloat> : affine<Rows, Strips, 8, kFloat>;
  }
}

template <int Rows>
Kernel affine_kernel(const Form& form, int rows, bool together) {
  if constexpr (Rows < kAffineRows)
    if (rows != Rows) return affine_kernel<Rows + 1>(form, rows, together);
  return together ? affine_form<Rows, affine_strips(Rows)>(form) : affine_form<Rows, 1>(form);
}

template <int Rows>
Kernel wide_kernel(const Form& form, int rows, bool together) {
  if constexpr (Rows < kWideRows)
    if (rows != Rows) return wide_kernel<Rows + 1>(form, rows, together);
  constexpr int kStrips = wide_strips(Rows);
  if (together) return form.scale == kHalf ? wide<Rows, kStrips, true> : wide<Rows, kStrips, false>;
  return form.scale == kHalf ? wide<Rows, 1, true> : wide<Rows, 1, false>;
}

inline Kernel kernel_for(const Form& form, int rows, bool together) {
  return form.bits == 16 ? wide_kernel<1>(form, rows, together) : affine_kernel<1>(form, rows, together);
}

inline int strips_together(const Form& form, int rows) {
  return form.bits == 16 ? wide_strips(rows) : affine_strips(rows);
}

// -- a product --------------------------------------------------------------------------------------------

struct Strips {
  const Product& product;
  const Rows& rows;
  int first;  // row of the chunk
};

// Writes the sums of `rows` rows from `row` on, which belong to a strip of outputs from `column` on.
inline void write(const Product& p, int64_t row, int rows, int column, const Floats* sums, const Floats* gates) {
  const float* biases = p.bias ? p.bias + column : nullptr;
  int part = 0;
  for (; column >= p.widths[part]; part++) column -= p.widths[part];
  const int width = p.widths[part];
  for (int v = 0; v < kParts && column < width; v++, column += kLanes) {
    const int count = std::min(kLanes, width - column);
    float* out = p.out[part] + row * width;
    Floats bias = {};
    if (p.bias) std::memcpy(&bias, biases + v * kLanes, sizeof(float) * count);
    for (int r = 0; r < rows; r++, sums++) {
      Floats value = p.bias ? *sums + bias : *sums;
      if (gates) value *= silu(*gates++);
      float* to = out + int64_t(r) * width + column;
      if (count == kLanes)
        save(to, value);
      else
        std::memcpy(to, &value, sizeof(float) * count);
    }
  }
}

// Asks for the memory that write() will fill: rows of a wide result lie in pages of their own, which take long to find.
inline void expect(const Product& p, int64_t row, int rows, int column) {
  int part = 0;
  for (; column >= p.widths[part]; part++) column -= p.widths[part];
  const float* out = p.out[part] + row * p.widths[part] + column;
  for (int r = 0; r < rows; r++) __builtin_prefetch(out + int64_t(r) * p.widths[part], 1);
}

inline Tile tile_of(const Strips& s, int band, int strip) {
  const Product& p = s.product;
  const int start = s.rows.start(band), groups = p.form.bits == 16 ? 0 : p.inputs / p.form.group;
  const int64_t first = int64_t(start) * p.inputs;
  return {p.weights + strip * p.form.strip_bytes(p.inputs), s.rows.words + first / 2, s.rows.scales + start * groups,
          s.rows.sums + start * groups, s.rows.values + first, p.form, p.inputs};
}

// A band by the strips first … last, as many at a time as a kernel takes. Gated: by pairs of strips.
inline void band_by_strips(const Strips& s, int band, int first, int last) {
  const Product& p = s.product;
  const int height = s.rows.height(band), row = s.first + s.rows.start(band);
  Floats sums[kMostStrips * kParts * kMostRows];
  const int each_sums = kParts * height;  // of a strip
  if (p.gated) first *= 2, last *= 2;
  const int each = p.gated ? 2 : strips_together(p.form, height);
  const bool pairs = strips_together(p.form, height) == 2;
  for (int strip = first, together; strip < last; strip += together) {
    together = last - strip >= each ? each : 1;
    expect(p, row, height, (p.gated ? strip / 2 : strip) * kStrip);
    if (p.gated && !pairs) {
      const Kernel kernel = kernel_for(p.form, height, false);
      kernel(tile_of(s, band, strip), sums);
      kernel(tile_of(s, band, strip + 1), sums + each_sums);
    } else {
      kernel_for(p.form, height, together > 1)(tile_of(s, band, strip), sums);
    }
    if (p.gated)
      write(p, row, height, strip / 2 * kStrip, sums + each_sums, sums);
    else
      for (int i = 0; i < together; i++) write(p, row, height, (strip + i) * kStrip, sums + i * each_sums, nullptr);
  }
}

inline void by_strips(const void* task, int first, int last) {
  const Strips& s = *static_cast<const Strips*>(task);
  const int64_t band_bytes = int64_t(s.rows.height(0)) * s.product.inputs * (s.product.form.bits == 16 ? 4 : 2);
  const int group = int(std::max<int64_t>(1, kNearBytes / band_bytes));
  if (s.rows.bands == 1) {
    band_by_strips(s, 0, first, last);
    return;
  }
  const int64_t pairs = kStripBytes / (2 * s.product.form.strip_bytes(s.product.inputs));
  const int strips = 2 * int(std::clamp<int64_t>(pairs, 1, 8));
  for (int start = 0; start < s.rows.bands; start += group)
    for (int strip = first; strip < last; strip += strips)
      for (int band = start; band < std::min(start + group, s.rows.bands); band++)
        band_by_strips(s, band, strip, std::min(strip + strips, last));
}

inline int strips_step(const Product& p, int rows, int strips, int threads) {
  const int64_t work = int64_t(p.outputs) * p.inputs * std::max(rows, 2);
  const int64_t pieces = std::clamp<int64_t>(work / kPieceWork, 1, 6 * threads);
  const int step = int((strips + pieces - 1) / pieces);
  return (step + kMostStrips - 1) / kMostStrips * kMostStrips;
}

inline void compute_chunk(const Product& p, const Threads& threads, int first, int count) {
  const int affine = count <= kAffineRows ? kAffineRows : kBandRows;
  const int most = p.form.bits == 16 ? kWideRows : affine, bands = (count + most - 1) / most;
  const int groups = p.form.bits == 16 ? 0 : p.inputs / p.form.group;
  const int64_t values = int64_t(count) * p.inputs, scales = int64_t(count) * groups;
  Rows rows{count, bands, nullptr, nullptr, nullptr, nullptr};
  auto* memory = static_cast<float*>(scratch<0>(sizeof(float) * (p.form.bits == 16 ? values : values / 2 + 2 * scales)));
  rows.values = memory;
  rows.words = reinterpret_cast<int32_t*>(memory);
  rows.scales = memory + values / 2;
  rows.sums = rows.scales + scales;
  const float* x = p.x + int64_t(first) * p.inputs;
  const Preparation preparation{p, rows, x};
  if (p.form.bits == 16 && count == 1)
    rows.values = const_cast<float*>(x);
  else if (values < 32 * 1024)
    prepare_bands(&preparation, 0, bands);
  else
    threads.run(&preparation, prepare_bands, bands, 1);
  const int width = p.gated ? p.outputs / 2 : p.outputs, strips = (width + kStrip - 1) / kStrip;
  const Strips task{p, rows, first};
  threads.run(&task, by_strips, strips, strips_step(p, count, strips, threads.count));
}

void compute(const Product& p, const Threads& threads) {
  for (int first = 0; first < p.rows; first += kChunk)
    compute_chunk(p, threads, first, std::min(kChunk, p.rows - first));
}

// -- single outputs' weights (an embedding's rows) --------------------------------------------------------

template <Scale S>
inline float scalar_at(const uint8_t* memory, int lane) {
  constexpr int kBytes = S == kFloat ? 4 : 2;
  return scale_at<S>(memory + lane / kLanes * kLanes * kBytes)[lane % kLanes];
}

inline float scale_value(Scale scale, const uint8_t* memory, int lane) {
  if (scale == kHalf) return scalar_at<kHalf>(memory, lane);
  return scale == kBfloat ? scalar_at<kBfloat>(memory, lane) : scalar_at<kFloat>(memory, lane);
}

// The weights of one output, as floats.
inline void widen_output(const Form& form, const uint8_t* weights, int inputs, int64_t output, float* to) {
  const uint8_t* w = weights + output / kStrip * form.strip_bytes(inputs);
  const int lane = int(output % kStrip), values = 32 / form.bits;
  if (form.bits == 16) {
    for (int k = 0; k < inputs; k++, w += 2 * kStrip) to[k] = scale_value(form.scale, w, lane);
    return;
  }
  for (int g = 0; g < inputs / form.group; g++, w += form.group_bytes()) {
    const uint8_t* scales = w + int64_t(form.group) * form.bits * 2;
    const float scale = scale_value(form.scale, scales, lane);
    const float bias = scale_value(form.scale, scales + kStrip * form.scale_bytes(), lane);
    for (int i = 0; i < form.group; i++) {
      const uint32_t word = read<uint32_t>(w + 4 * (int64_t(i / values) * kStrip + lane));
      const uint32_t q = word >> (i % values * form.bits) & ((1u << form.bits) - 1);
      *to++ = scale * float(q) + bias;
    }
  }
}

}  // namespace headrace
