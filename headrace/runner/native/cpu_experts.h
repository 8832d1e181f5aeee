// Mixtures of experts over narrow weights: each row of x is multiplied with the matrices of the experts that it chose.
//
// Pairs of a row and a choice are sorted by expert. A task is some strips of one expert by all of its rows: they are
// gathered, multiplied (cpu_products.h, on the task's own thread), and results go where their pair's belong. Tasks
// are shared out to threads, the largest first: one for each expert, or several where there are few.
//
// A mixture is two such passes, gate and up with the activation computed where the sums are, then down. Weighted
// results of a row are added up in the order of its choices. So a row's result does not depend on how many rows
// there are, nor on what they chose, to the last bit. Rows pass in blocks, which bounds what lies between the passes.

#pragma once

#include <vector>

#include "cpu_products.h"

namespace headrace {

// Of a gate and what it gates: silu(gate) · up; gelu(gate) · up with the tanh approximation;
// g · sigmoid(alpha · g) · (u + 1) of g = min(gate, limit) and u = up within ±limit.
enum class Activation { none, silu, gelu, clamped };

constexpr int64_t kBlockFloats = 4 << 20;  // between the passes of a mixture, kept by the calling thread
constexpr int kLeastStrips = 16;           // of a task that is one of several for an expert: rows are prepared for each

// A matrix for each expert. With an activation, strips of gate and up lie in turns, and so do their biases.
struct ExpertWeights {
  Form form;
  const uint8_t* weights;
  const float* bias;  // or null; [experts][outputs], with an activation [experts][strips][gate 16, up 16]
  int inputs, outputs;  // outputs: of a gate and of what it gates together
  Activation activation;
  float alpha, limit;

  bool gated() const { return activation != Activation::none; }
  int width() const { return gated() ? outputs / 2 : outputs; }
  int strips() const { return (width() + kStrip - 1) / kStrip; }
  int64_t strip_bytes() const { return form.strip_bytes(inputs) * (gated() ? 2 : 1); }
  int64_t expert_bytes() const { return strips() * strip_bytes(); }
  // Columns that a product gives for so many strips, whose activation is computed afterwards.
  bool apart() const { return gated() && (bias || activation != Activation::silu); }
};

struct Task {
  int expert, first, count, strip, strips;  // pairs as they are sorted; strips of results

  int64_t size() const { return int64_t(count) * strips; }
};

// One product of sorted pairs with their experts' matrices. Rows of x and of out: those of the sorted pairs, or the
// pair itself where there is no list.
struct Pass {
  const ExpertWeights& weights;
  const float* x;
  const int* from;
  float* out;
  const int* to;
  const Task* tasks;
};

inline Floats activated(const ExpertWeights& w, Floats gate, Floats up) {
  if (w.activation == Activation::silu) return silu(gate) * up;
  if (w.activation == Activation::gelu) {  // 0.5 · (1 + tanh(z)) is a sigmoid of 2 z
    const Floats z = gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216f;
    return gate / (exponential(-z) + 1.0f) * up;
  }
  const Floats most = everywhere(w.limit), least = everywhere(-w.limit);
  gate = gate > most ? most : gate;
  up = up > most ? most : up < least ? least : up;
  return gate / (exponential(gate * -w.alpha) + 1.0f) * (up + 1.0f);
}

// Rows [strips][gate 16, up 16] -> `width` values.
inline void activate(const ExpertWeights& w, const float* sums, int width, float* to) {
  for (int column = 0; column < width; column += kLanes) {
    const float* gate = sums + column + column / kStrip * kStrip;
    const Floats value = activated(w, read<Floats>(gate), read<Floats>(gate + kStrip));
    std::memcpy(to + column, &value, sizeof(float) * std::min(kLanes, width - column));
  }
}

inline const float* gathered(const Pass& pass, const Task& task) {
  const int64_t inputs = pass.weights.inputs;
  if (!pass.from) return pass.x + task.first * inputs;
  if (task.count == 1) return pass.x + pass.from[task.first] * inputs;
  auto* rows = static_cast<float*>(scratch<1>(sizeof(float) * task.count * inputs));
  for (int i = 0; i < task.count; i++)
    std::memcpy(rows + i * inputs, pass.x + pass.from[task.first + i] * inputs, sizeof(float) * inputs);
  return rows;
}

inline void compute(const Pass& pass, const Task& task) {
  const ExpertWeights& w = pass.weights;
  const bool apart = w.apart();
  const int column = task.strip * kStrip, width = std::min(task.strips * kStrip, w.width() - column);
  const int columns = apart ? 2 * kStrip * task.strips : width;
  const auto row_of = [&](int i) {
    return pass.out + int64_t(pass.to ? pass.to[task.first + i] : task.first + i) * w.width() + column;
  };
  const bool in_place = !apart && (task.count == 1 || (!pass.to && width == w.width()));
  float* sums = in_place ? row_of(0) : static_cast<float*>(scratch<2>(sizeof(float) * task.count * columns));
  const int64_t bias = w.gated() ? int64_t(task.expert * w.strips() + task.strip) * 2 * kStrip
                                 : int64_t(task.expert) * w.outputs + column;
  Product product{w.form,
                  w.weights + task.expert * w.expert_bytes() + task.strip * w.strip_bytes(),
                  w.bias ? w.bias + bias : nullptr,
                  gathered(pass, task),
                  task.count,
                  w.inputs,
                  w.gated() && !apart ? 2 * width : columns,
                  w.gated() && !apart,
                  1,
                  {sums},
                  {columns}};
  compute(product, Threads{alone, 1});
  for (int i = 0; i < task.count && !in_place; i++) {
    const float* row = sums + int64_t(i) * columns;
    if (apart)
      activate(w, row, width, row_of(i));
    else
      std::memcpy(row_of(i), row, sizeof(float) * width);
  }
}

inline void compute_tasks(const void* task, int first, int last) {
  const Pass& pass = *static_cast<const Pass*>(task);
  for (int i = first; i < last; i++) compute(pass, pass.tasks[i]);
}

// Pairs sorted by the experts that they chose; those of expert e begin at starts[e].
struct Sorted {
  std::vector<int> order, starts;

  Sorted(const int32_t* chosen, int pairs, int experts) : order(pairs), starts(experts + 1) {
    const auto expert_of = [&](int pair) { return std::clamp(int(chosen[pair]), 0, experts - 1); };
    for (int pair = 0; pair < pairs; pair++) starts[expert_of(pair) + 1]++;
    for (int expert = 0; expert < experts; expert++) starts[expert + 1] += starts[expert];
    std::vector<int> next(starts);
    for (int pair = 0; pair < pairs; pair++) order[next[expert_of(pair)]++] = pair;
  }

  int experts() const { return int(starts.size()) - 1; }
};

inline std::vector<Task> tasks_of(const ExpertWeights& w, const Sorted& sorted, int threads) {
  const int strips = w.strips(), least = w.gated() ? kLeastStrips / 2 : kLeastStrips;
  const auto work = [&](int count) { return int64_t(std::max(count, 2)) * w.outputs * w.inputs; };
  int64_t total = 0;
  for (int e = 0; e < sorted.experts(); e++)
    if (sorted.starts[e + 1] > sorted.starts[e]) total += work(sorted.starts[e + 1] - sorted.starts[e]);
  const int64_t worth = threads == 1 ? total + 1 : std::max(kPieceWork, total / (6 * threads));
  std::vector<Task> tasks;
  for (int e = 0; e < sorted.experts(); e++) {
    const int first = sorted.starts[e], count = sorted.starts[e + 1] - first;
    if (count == 0) continue;
    const int cuts = int(std::clamp<int64_t>(work(count) / worth, 1, std::max(1, strips / least)));
    const int step = ((strips + cuts - 1) / cuts + kMostStrips - 1) / kMostStrips * kMostStrips;
    for (int strip = 0; strip < strips; strip += step)
      tasks.push_back({e, first, count, strip, std::min(step, strips - strip)});
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.size() > b.size(); });
  return tasks;
}

inline void multiply(const ExpertWeights& w, const Sorted& sorted, const float* x, const int* from, float* out,
                     const int* to, const Threads& threads) {
  const std::vector<Task> tasks = tasks_of(w, sorted, threads.count);
  const Pass pass{w, x, from, out, to, tasks.data()};
  threads.run(&pass, compute_tasks, int(tasks.size()), 1);
}

// A choice for each of `pairs`, of experts' plain products. x has a row for each pair, or for each `each` of them.
struct Choices {
  const int32_t* chosen;
  int pairs, each, experts;
};

inline void compute(const ExpertWeights& w, const Choices& c, const float* x, float* out, const Threads& threads) {
  const Sorted sorted(c.chosen, c.pairs, c.experts);
  std::vector<int> from(c.pairs);
  for (int i = 0; i < c.pairs; i++) from[i] = sorted.order[i] / c.each;
  multiply(w, sorted, x, from.data(), out, sorted.order.data(), threads);
}

// -- a mixture ----------------------------------------------------------------------------------------------

// [rows][choices] choose among experts. out: [rows][choices][down.outputs], or with weights their sum for each row.
struct Mixture {
  ExpertWeights first, down;
  const float* x;
  const int32_t* chosen;
  const float* shares;  // [rows][choices] or null
  int rows, choices, experts;
  float* out;

  // Rows of a block, as equal as can be.
  int block() const {
    const int64_t floats = int64_t(choices) * (down.inputs + down.outputs);
    const int64_t most = std::max<int64_t>(1, kBlockFloats / floats), blocks = (rows + most - 1) / most;
    return int((rows + blocks - 1) / std::max<int64_t>(1, blocks));
  }
};

struct Weighted {
  const float *parts, *shares;
  int choices, width;
  float* out;
};

inline void add_up(const void* task, int first, int last) {
  const Weighted& s = *static_cast<const Weighted*>(task);
  for (int row = first; row < last; row++) {
    const float* parts = s.parts + int64_t(row) * s.choices * s.width;
    const float* shares = s.shares + int64_t(row) * s.choices;
    for (int column = 0; column < s.width; column += kLanes) {
      const size_t bytes = sizeof(float) * std::min(kLanes, s.width - column);
      Floats total = {}, part = {};
      for (int i = 0; i < s.choices; i++) {
        std::memcpy(&part, parts + int64_t(i) * s.width + column, bytes);
        total = fused(part, everywhere(shares[i]), total);
      }
      std::memcpy(s.out + int64_t(row) * s.width + column, &total, bytes);
    }
  }
}

inline void compute(const Mixture& m, const Threads& threads) {
  const int width = m.down.outputs, block = m.block();
  const int64_t most = int64_t(block) * m.choices;
  auto* hidden = static_cast<float*>(scratch<3>(sizeof(float) * most * m.down.inputs));
  auto* weighted = static_cast<float*>(scratch<4>(m.shares ? sizeof(float) * most * width : 0));
  for (int start = 0; start < m.rows; start += block) {
    const int rows = std::min(block, m.rows - start), pairs = rows * m.choices;
    const int64_t before = int64_t(start) * m.choices;
    const Sorted sorted(m.chosen + before, pairs, m.experts);
    std::vector<int> from(pairs);
    for (int i = 0; i < pairs; i++) from[i] = sorted.order[i] / m.choices;
    multiply(m.first, sorted, m.x + int64_t(start) * m.first.inputs, from.data(), hidden, nullptr, threads);
    float* parts = m.shares ? weighted : m.out + before * width;
    multiply(m.down, sorted, hidden, nullptr, parts, sorted.order.data(), threads);
    if (!m.shares) continue;
    const Weighted sums{parts, m.shares + before, m.choices, width, m.out + int64_t(start) * width};
    const int step = int(std::max<int64_t>(1, 64 * 1024 / (int64_t(m.choices) * width)));
    threads.run(&sums, add_up, rows, step);
  }
}

}  // namespace headrace
