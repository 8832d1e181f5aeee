// Halves of a Llama-pattern decoder block, each one operation of MLX:
//
//     AttentionHalf     h = x + out(attend(rotate(q), K, V)), with q, k, v = product(norm(x)); k and v are stored
//     FeedForwardHalf   h + down(silu(gate(norm(h))) · up(norm(h)))
//
// They call what the single operations call, in their order, so the results are the same to the last bit; what they
// save is MLX's and Python's work for each operation, which for one row costs as much as the arithmetic.

#include "cpu_block.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <mlx/transforms.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cpu_functions.h"
#include "cpu_narrow.h"

namespace nb = nanobind;

namespace headrace {
namespace {

// inputs, outputs, bits, group, dtype of scales
using FormWords = std::tuple<int, int, int, int, std::string>;

Narrow narrow_of(const FormWords& words) {
  return std::apply([](auto... word) { return narrow(word...); }, words);
}

// A narrow matrix and its bias, which may be empty.
struct Matrix {
  Narrow form;
  mx::array strips, bias;

  Matrix(const FormWords& words, const mx::array& weights, const std::optional<mx::array>& added, bool gated = false)
      : form(narrow_of(words)), strips(weights), bias(added ? *added : mx::zeros({0})) {
    const bool plain = bias.dtype() == mx::float32 && (bias.size() == 0 || bias.size() == size_t(form.outputs));
    if (strips.dtype() != mx::uint8 || strips.size() != form.nbytes(gated) || !plain || (gated && form.outputs % 2))
      throw std::invalid_argument("a matrix of the block does not have its form's size");
  }
};

// Fixed inputs are arrays of MLX, evaluated when the half is made, which lives as long as its operations.
const float* floats_of(const mx::array& values) { return values.size() ? values.data<float>() : nullptr; }

Product product_of(const Matrix& m, const float* x, int rows, float* out, bool gated = false) {
  const int width = gated ? m.form.outputs / 2 : m.form.outputs;
  return {m.form.form,    bytes_of(m.strips), floats_of(m.bias), x, rows, m.form.inputs,
          m.form.outputs, gated,              1,                 {out}, {width}};
}

// A norm's weight; empty: there is none.
struct Norm {
  mx::array weight;
  float eps;
};

void check_vector(const mx::array& values, int size) {
  if (values.dtype() != mx::float32 || values.size() != size_t(size) || !values.flags().row_contiguous)
    throw std::invalid_argument("a norm of the block has another width");
}

// Memory of a running task. MLX evaluates a whole forward ahead of its tasks: what each one needs is taken when it runs.
struct Scratch {
  mx::allocator::Data data;
  float* next;

  explicit Scratch(int64_t count)
      : data(mx::allocator::malloc(sizeof(float) * count)), next(static_cast<float*>(data.buffer().raw_ptr())) {}
  float* cut(int64_t count) { return std::exchange(next, next + count); }
};

// [rows, length, width] of any strides.
struct Tokens {
  const float* data;
  int rows, length, width;
  int64_t strides[3];

  explicit Tokens(const mx::array& x)
      : data(x.data<float>()), rows(x.shape(0)), length(x.shape(1)), width(x.shape(2)),
        strides{x.strides(0), x.strides(1), x.strides(2)} {}
  int count() const { return rows * length; }

  // Into `to`, which may be where they are already.
  void copy(float* to) const {
    if (to == data) return;
    for (int r = 0; r < rows; r++)
      for (int l = 0; l < length; l++, to += width)
        for (int i = 0; i < width; i++) to[i] = data[r * strides[0] + l * strides[1] + i * strides[2]];
  }
};

// The residual stream: in the memory of x where nobody else needs that.
float* residual(const mx::array& x, mx::array& out) {
  if (x.is_donatable() && x.flags().row_contiguous)
    out.copy_shared_buffer(x);
  else
    out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<float>();
}

void add(const float* x, int64_t count, float* sum) {
  for (int64_t i = 0; i < count; i++) sum[i] += x[i];
}

class BlockOperation : public mx::Primitive {
 public:
  explicit BlockOperation(const char* name) : mx::Primitive(mx::default_stream(mx::Device::cpu)), name_(name) {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("an operation of the CPU");
  }
  const char* name() const override { return name_; }

 private:
  const char* name_;
};

void check_rows(const mx::array& x, int width) {
  if (x.ndim() != 3 || x.shape(2) != width || x.dtype() != mx::float32)
    throw std::invalid_argument("a half of a block takes float32 [rows, tokens, width] of its own width");
}

// -- attention ----------------------------------------------------------------------------------------------

struct AttentionSpec {
  int heads, kv_heads, dim;
  float scale;
};

struct AttentionHalf {
  const Functions* functions;
  Norm norm;
  Matrix qkv;
  Norm query_norm, key_norm;
  AttentionSpec spec;
  Matrix out;

  AttentionHalf(uintptr_t address, mx::array weight, float eps, Matrix qkv_matrix, Norm queries, Norm keys,
                AttentionSpec shape, Matrix out_matrix)
      : functions(reinterpret_cast<const Functions*>(address)),
        norm{std::move(weight), eps},
        qkv(std::move(qkv_matrix)),
        query_norm(std::move(queries)),
        key_norm(std::move(keys)),
        spec(shape),
        out(std::move(out_matrix)) {
    check_vector(norm.weight, qkv.form.inputs);
    for (const Norm* one : {&query_norm, &key_norm})
      if (one->weight.size()) check_vector(one->weight, spec.dim);
    if (qkv.form.outputs != (spec.heads + 2 * spec.kv_heads) * spec.dim || out.form.inputs != spec.heads * spec.dim ||
        out.form.outputs != qkv.form.inputs || spec.heads % spec.kv_heads || spec.dim % kStrip)
      throw std::invalid_argument("the widths of an attention half do not fit together");
  }
};

// Where the rows' contexts are, as `attend` takes it, and a layer's pools.
enum AttentionInput { kX, kCosine, kSine, kTables, kBases, kOffsets, kEnds, kSlots, kMark, kKeys, kValues };

struct AttentionTask {
  std::shared_ptr<AttentionHalf> half;
  Tokens x;
  Rotation rotation;
  Attention attention;
  const int32_t* slots;
  float *keys, *values;  // pools
  float* h;
  int32_t* mark;

  void operator()() {
    const AttentionHalf& m = *half;
    const AttentionSpec& s = m.spec;
    const int64_t tokens = x.count(), q = int64_t(s.heads) * s.dim, kv = int64_t(s.kv_heads) * s.dim;
    Scratch scratch(tokens * (x.width + 2 * q + 2 * kv + std::max(q, kv)));
    float* normed = scratch.cut(tokens * x.width);
    float *queries = scratch.cut(tokens * q), *k = scratch.cut(tokens * kv), *v = scratch.cut(tokens * kv);
    float* attended = scratch.cut(tokens * q);
    rotation.out = scratch.next;
    x.copy(h);
    m.functions->normed(h, floats_of(m.norm.weight), m.norm.eps, tokens, x.width, normed);
    Product product = product_of(m.qkv, normed, tokens, queries);
    product.parts = 3;
    product.out[1] = k, product.out[2] = v;
    product.widths[0] = q, product.widths[1] = product.widths[2] = kv;
    compute(product, threads());
    turn(m.key_norm, k, s.kv_heads);
    store(rotation.out, keys, kv * x.length, int64_t(x.length) * s.dim, s.dim);
    store(v, values, kv * x.length, s.dim, kv);
    turn(m.query_norm, queries, s.heads);
    attention.queries = rotation.out, attention.out = attended;
    m.functions->attended(attention);
    compute(product_of(m.out, attended, tokens, normed), threads());
    add(normed, tokens * x.width, h);
    *mark = 0;
  }

  // Heads [rows, length, heads, dim] -> [rows, heads, length, dim], normed first where the model does that.
  void turn(const Norm& norm, float* heads, int count) {
    const int dim = half->spec.dim;
    if (norm.weight.size())
      half->functions->normed(heads, floats_of(norm.weight), norm.eps, int64_t(x.count()) * count, dim, heads);
    rotation.x = heads, rotation.heads = count;
    rotation.strides[0] = int64_t(x.length) * count * dim, rotation.strides[1] = dim;
    rotation.strides[2] = int64_t(count) * dim, rotation.strides[3] = 1;
    half->functions->rotated(rotation);
  }

  // Vectors whose rows, heads and positions are so many floats apart.
  void store(const float* from, float* pool, int64_t row, int64_t head, int64_t position) const {
    const AttentionSpec& s = half->spec;
    for (int r = 0; r < x.rows; r++)
      for (int h = 0; h < s.kv_heads; h++)
        for (int l = 0; l < x.length; l++)
          std::memcpy(pool + (h * attention.keys.slots + slots[r * x.length + l]) * s.dim,
                      from + r * row + h * head + l * position, sizeof(float) * s.dim);
  }
};

Cache cache_of(const mx::array& pool) {
  Cache cache{};
  cache.element = Element::float32, cache.data = pool.data<void>();
  cache.slots = pool.shape(1), cache.dim = cache.width = pool.shape(2);
  return cache;
}

class Attended : public BlockOperation {
 public:
  Attended(std::shared_ptr<AttentionHalf> half, int block_size, int window)
      : BlockOperation("headrace_attention_half"), half_(std::move(half)), block_size_(block_size), window_(window) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    if (!in[kCosine].flags().row_contiguous || !in[kSine].flags().row_contiguous)
      throw std::runtime_error("tables of rotations must lie in one piece");
    const AttentionSpec& s = half_->spec;
    const Tokens x(in[kX]);
    const int64_t q = int64_t(s.heads) * s.dim;
    AttentionTask task{half_, x};
    task.rotation = {nullptr, {}, in[kCosine].data<float>(), in[kSine].data<float>(), x.rows, 0, x.length, s.dim / 2};
    Attention& call = task.attention;
    call.batch = x.rows, call.length = x.length, call.heads = s.heads, call.kv_heads = s.kv_heads;
    call.block_size = block_size_, call.table_width = in[kTables].shape(1);
    call.window = window_, call.scale = s.scale;
    call.keys = cache_of(in[kKeys]), call.values = cache_of(in[kValues]);
    call.query_strides[0] = x.length * q, call.query_strides[1] = int64_t(x.length) * s.dim;
    call.query_strides[2] = s.dim, call.query_strides[3] = 1;
    call.tables = in[kTables].data<int32_t>(), call.bases = in[kBases].data<int32_t>();
    call.offsets = in[kOffsets].data<int32_t>(), call.ends = in[kEnds].data<int32_t>();
    task.slots = in[kSlots].data<int32_t>();
    task.keys = const_cast<float*>(in[kKeys].data<float>()), task.values = const_cast<float*>(in[kValues].data<float>());
    task.h = residual(in[kX], out[0]);
    out[1].set_data(mx::allocator::malloc(out[1].nbytes()));
    task.mark = out[1].data<int32_t>();
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

 private:
  std::shared_ptr<AttentionHalf> half_;
  int block_size_, window_;
};

std::vector<mx::array> attended(std::shared_ptr<AttentionHalf> half, std::vector<mx::array> inputs, int block_size,
                                int window) {
  const AttentionSpec& s = half->spec;
  check_rows(inputs.at(kX), half->qkv.form.inputs);
  const size_t tokens = size_t(inputs[kX].shape(0)) * inputs[kX].shape(1);
  for (int pool : {kKeys, kValues})
    if (inputs.at(pool).dtype() != mx::float32 || inputs[pool].shape(0) != s.kv_heads || inputs[pool].shape(2) != s.dim)
      throw std::invalid_argument("an attention half writes into float32 pools of its heads");
  for (int place : {kCosine, kSine})
    if (inputs[place].size() != tokens * s.dim / 2)
      throw std::invalid_argument("tables of rotations must have a row for each token");
  const mx::Shape shape = inputs[kX].shape();
  auto operation = std::make_shared<Attended>(std::move(half), block_size, window);
  return mx::array::make_arrays({shape, {1}}, {mx::float32, mx::int32}, std::move(operation), inputs);
}

// -- feed-forward -------------------------------------------------------------------------------------------

struct FeedForwardHalf {
  const Functions* functions;
  Norm norm;
  Matrix gate_up, down;

  FeedForwardHalf(uintptr_t address, mx::array weight, float eps, Matrix first, Matrix second)
      : functions(reinterpret_cast<const Functions*>(address)),
        norm{std::move(weight), eps},
        gate_up(std::move(first)),
        down(std::move(second)) {
    check_vector(norm.weight, gate_up.form.inputs);
    if (gate_up.form.outputs != 2 * down.form.inputs || down.form.outputs != gate_up.form.inputs)
      throw std::invalid_argument("the widths of a feed-forward half do not fit together");
  }
};

class FedForward : public BlockOperation {
 public:
  explicit FedForward(std::shared_ptr<FeedForwardHalf> half)
      : BlockOperation("headrace_feed_forward_half"), half_(std::move(half)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const auto task = [half = half_, x = Tokens(in[0]), h = residual(in[0], out[0])] {
      const FeedForwardHalf& m = *half;
      const int64_t tokens = x.count(), hidden = m.down.form.inputs;
      Scratch scratch(tokens * (x.width + hidden));
      float *normed = scratch.cut(tokens * x.width), *gated = scratch.cut(tokens * hidden);
      x.copy(h);
      m.functions->normed(h, floats_of(m.norm.weight), m.norm.eps, tokens, x.width, normed);
      compute(product_of(m.gate_up, normed, tokens, gated, true), threads());
      compute(product_of(m.down, gated, tokens, normed), threads());
      add(normed, tokens * x.width, h);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(task);
  }

 private:
  std::shared_ptr<FeedForwardHalf> half_;
};

mx::array fed_forward(std::shared_ptr<FeedForwardHalf> half, const mx::array& h) {
  check_rows(h, half->gate_up.form.inputs);
  return mx::array(h.shape(), mx::float32, std::make_shared<FedForward>(std::move(half)), {h});
}

Norm norm_of(const std::optional<mx::array>& weight, float eps) { return {weight ? *weight : mx::zeros({0}), eps}; }

void evaluate(std::vector<mx::array> arrays) { mx::eval(std::move(arrays)); }

}  // namespace

void bind_blocks(nb::module_& module) {
  using Bias = std::optional<mx::array>;
  nb::class_<AttentionHalf>(module, "AttentionHalf")
      .def(nb::new_([](uintptr_t functions, const mx::array& norm, float eps, const FormWords& qkv_form,
                       const mx::array& qkv, const Bias& qkv_bias, const Bias& query_norm, const Bias& key_norm,
                       float head_eps, int heads, int kv_heads, int dim, float scale,
                       const FormWords& out_form, const mx::array& out, const Bias& out_bias) {
             evaluate({norm, query_norm ? *query_norm : norm, key_norm ? *key_norm : norm});
             auto half = std::make_shared<AttentionHalf>(
                 functions, norm, eps, Matrix(qkv_form, qkv, qkv_bias), norm_of(query_norm, head_eps),
                 norm_of(key_norm, head_eps), AttentionSpec{heads, kv_heads, dim, scale},
                 Matrix(out_form, out, out_bias));
             evaluate({half->qkv.bias, half->out.bias, half->qkv.strips, half->out.strips});
             return half;
           }),
           nb::arg("functions"), nb::arg("norm"), nb::arg("eps"), nb::arg("qkv_form"), nb::arg("qkv"),
           nb::arg("qkv_bias").none(), nb::arg("query_norm").none(), nb::arg("key_norm").none(), nb::arg("head_eps"),
           nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"), nb::arg("scale"),
           nb::arg("out_form"), nb::arg("out"), nb::arg("out_bias").none())
      .def("__call__", attended, nb::arg("inputs"), nb::arg("block_size"), nb::arg("window"));
  nb::class_<FeedForwardHalf>(module, "FeedForwardHalf")
      .def(nb::new_([](uintptr_t functions, const mx::array& norm, float eps, const FormWords& gate_up_form,
                       const mx::array& gate_up, const FormWords& down_form, const mx::array& down,
                       const Bias& down_bias) {
             evaluate({norm});
             auto half = std::make_shared<FeedForwardHalf>(functions, norm, eps,
                                                           Matrix(gate_up_form, gate_up, std::nullopt, true),
                                                           Matrix(down_form, down, down_bias));
             evaluate({half->down.bias, half->down.strips, half->gate_up.strips});
             return half;
           }),
           nb::arg("functions"), nb::arg("norm"), nb::arg("eps"), nb::arg("gate_up_form"), nb::arg("gate_up"),
           nb::arg("down_form"), nb::arg("down"), nb::arg("down_bias").none())
      .def("__call__", fed_forward, nb::arg("h"));
}

}  // namespace headrace
