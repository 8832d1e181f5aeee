// MLX operations over narrow weights: product(x, weights) and the weights of single outputs (cpu_products.h), products
// with the matrices of chosen experts and whole mixtures of them (cpu_experts.h); and how they come to lie so
// (cpu_layout.h).

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cpu_block.h"
#include "cpu_experts.h"
#include "cpu_layout.h"
#include "cpu_narrow.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

using headrace::bytes_of;
using headrace::Narrow;
using headrace::narrow;
using headrace::threads;

class NarrowProduct : public mx::Primitive {
 public:
  NarrowProduct(mx::Stream stream, Narrow weights, bool gated, std::vector<int> widths)
      : mx::Primitive(stream), weights_(weights), gated_(gated), widths_(std::move(widths)) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    headrace::Product product{weights_.form,
                              bytes_of(in[1]),
                              in.size() > 2 ? in[2].data<float>() : nullptr,
                              in[0].data<float>(),
                              int(in[0].size() / weights_.inputs),
                              weights_.inputs,
                              weights_.outputs,
                              gated_,
                              int(out.size()),
                              {},
                              {}};
    for (size_t i = 0; i < out.size(); i++) {
      out[i].set_data(mx::allocator::malloc(out[i].nbytes()));
      encoder.set_output_array(out[i]);
      product.out[i] = out[i].data<float>();
      product.widths[i] = widths_[i];
    }
    encoder.dispatch([product]() { headrace::compute(product, threads()); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("narrow products are computed on the CPU");
  }
  const char* name() const override { return "NarrowProduct"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const NarrowProduct&>(other);
    return weights_ == same.weights_ && gated_ == same.gated_ && widths_ == same.widths_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    std::vector<mx::Shape> shapes;
    for (int width : widths_) {
      shapes.push_back(in[0].shape());
      shapes.back().back() = width;
    }
    return shapes;
  }

 private:
  Narrow weights_;
  bool gated_;
  std::vector<int> widths_;
};

class NarrowRows : public mx::Primitive {
 public:
  NarrowRows(mx::Stream stream, Narrow weights) : mx::Primitive(stream), weights_(weights) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    encoder.set_output_array(out[0]);
    encoder.dispatch([w = weights_, index = in[0].data<int32_t>(), bytes = bytes_of(in[1]),
                      to = out[0].data<float>(), count = in[0].size()]() {
      for (size_t i = 0; i < count; i++) {
        const int64_t output = index[i] < 0 ? int64_t(index[i]) + w.outputs : index[i];
        headrace::widen_output(w.form, bytes, w.inputs, std::clamp<int64_t>(output, 0, w.outputs - 1),
                               to + i * w.inputs);
      }
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("narrow weights are read on the CPU");
  }
  const char* name() const override { return "NarrowRows"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return weights_ == static_cast<const NarrowRows&>(other).weights_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    mx::Shape shape = in[0].shape();
    shape.push_back(weights_.inputs);
    return {shape};
  }

 private:
  Narrow weights_;
};

void check(const mx::array& weights, const Narrow& form, bool gated) {
  if (weights.dtype() != mx::uint8 || weights.size() != form.nbytes(gated) || (gated && form.outputs % 2))
    throw std::invalid_argument("narrow weights do not have their form's size");
}

// Widths of the results: the matrix's own, or those asked for.
std::vector<int> checked(std::vector<int> widths, int outputs) {
  if (widths.empty()) return {outputs};
  int total = 0;
  for (size_t i = 0; i < widths.size(); i++) {
    if (widths[i] < 1 || (i + 1 < widths.size() && widths[i] % headrace::kStrip))
      throw std::invalid_argument("parts of a product must be whole strips");
    total += widths[i];
  }
  if (total != outputs || widths.size() > headrace::kMostParts)
    throw std::invalid_argument("the parts are not the product");
  return widths;
}

std::vector<mx::array> product(const mx::array& x, const mx::array& weights, const std::optional<mx::array>& bias,
                               int outputs, int bits, int group, const std::string& scale, bool gated,
                               std::vector<int> widths) {
  const int inputs = x.ndim() ? x.shape(-1) : 0;
  const Narrow form = narrow(inputs, outputs, bits, group, scale);
  check(weights, form, gated);
  if (bias && (bias->size() != size_t(outputs) || gated))
    throw std::invalid_argument("the bias must have one value per output, and a gated product has none");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> in = {mx::contiguous(mx::astype(x, mx::float32, stream), false, stream), weights};
  if (bias) in.push_back(mx::contiguous(mx::astype(*bias, mx::float32, stream), false, stream));
  widths = checked(std::move(widths), gated ? outputs / 2 : outputs);
  std::vector<mx::Shape> shapes(widths.size(), x.shape());
  for (size_t i = 0; i < widths.size(); i++) shapes[i].back() = widths[i];
  const std::vector<mx::Dtype> dtypes(widths.size(), mx::float32);
  const auto primitive = std::make_shared<NarrowProduct>(stream, form, gated, std::move(widths));
  return mx::array::make_arrays(shapes, dtypes, primitive, in);
}

mx::array rows(const mx::array& index, const mx::array& weights, int inputs, int outputs, int bits, int group,
               const std::string& scale) {
  const Narrow form = narrow(inputs, outputs, bits, group, scale);
  check(weights, form, false);
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  mx::Shape shape = index.shape();
  shape.push_back(inputs);
  std::vector<mx::array> in = {mx::contiguous(mx::astype(index, mx::int32, stream), false, stream), weights};
  return mx::array(shape, mx::float32, std::make_shared<NarrowRows>(stream, form), std::move(in));
}

// -- layout -------------------------------------------------------------------------------------------------

// Inputs: weights [experts, outputs, …], then scales and biases as there are. One strip after the other.
class StripsLaidOut : public mx::Primitive {
 public:
  StripsLaidOut(mx::Stream stream, Narrow one, int experts) : mx::Primitive(stream), one_(one), experts_(experts) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    encoder.set_output_array(out[0]);
    const auto memory = [&](size_t i) { return i < in.size() ? in[i].data<uint8_t>() : nullptr; };
    const headrace::Layout layout{one_.form,    memory(0),   memory(1),           memory(2), experts_,
                                  one_.outputs, one_.inputs, out[0].data<uint8_t>()};
    encoder.dispatch([layout]() { headrace::lay_out(layout, threads()); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("narrow weights are laid out on the CPU");
  }
  const char* name() const override { return "StripsLaidOut"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const StripsLaidOut&>(other);
    return one_ == same.one_ && experts_ == same.experts_;
  }

 private:
  Narrow one_;
  int experts_;
};

class Interleaved : public mx::Primitive {
 public:
  explicit Interleaved(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    encoder.set_output_array(out[0]);
    const int64_t strip = in[0].shape(-1);
    const headrace::Turns turns{bytes_of(in[0]), bytes_of(in[1]), int(in[0].size() / strip), strip,
                                out[0].data<uint8_t>()};
    encoder.dispatch([turns]() { headrace::interleave(turns, threads()); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("narrow weights are laid out on the CPU");
  }
  const char* name() const override { return "Interleaved"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

// weights [outputs, …] or [experts, outputs, …] -> uint8 [strips, bytes], or [experts, strips, bytes].
mx::array strips(const mx::array& weights, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, int inputs, int bits, int group, const std::string& scale) {
  if (weights.ndim() != 2 && weights.ndim() != 3) throw std::invalid_argument("weights are matrices, or one per expert");
  const int experts = weights.ndim() == 3 ? weights.shape(0) : 1, outputs = weights.shape(-2);
  const Narrow one = narrow(inputs, outputs, bits, group, scale);
  const size_t rows = size_t(experts) * outputs, further = bits == 16 ? 0 : rows * (inputs / group);
  if (experts < 1 || weights.nbytes() != rows * inputs * bits / 8 || scales.has_value() != (bits != 16) ||
      biases.has_value() != (bits != 16))
    throw std::invalid_argument("weights do not have their form's size");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> in = {mx::contiguous(weights, false, stream)};
  for (const auto& part : {scales, biases}) {
    if (!part) continue;
    if (part->size() != further || part->itemsize() != size_t(one.form.scale_bytes()))
      throw std::invalid_argument("scales and biases do not have their form's size");
    in.push_back(mx::contiguous(*part, false, stream));
  }
  mx::Shape shape = {(outputs + headrace::kStrip - 1) / headrace::kStrip, int(one.form.strip_bytes(inputs))};
  if (weights.ndim() == 3) shape.insert(shape.begin(), experts);
  return mx::array(shape, mx::uint8, std::make_shared<StripsLaidOut>(stream, one, experts), std::move(in));
}

// Two of the same form, [..., strips, bytes] -> [..., 2 strips, bytes].
mx::array interleaved(const mx::array& gate, const mx::array& other) {
  if (gate.ndim() < 2 || gate.shape() != other.shape() || gate.dtype() != mx::uint8 || other.dtype() != mx::uint8)
    throw std::invalid_argument("strips in turns must be of one form");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  mx::Shape shape = gate.shape();
  shape[shape.size() - 2] *= 2;
  return mx::array(shape, mx::uint8, std::make_shared<Interleaved>(stream),
                   {mx::contiguous(gate, false, stream), mx::contiguous(other, false, stream)});
}

// -- experts ------------------------------------------------------------------------------------------------

// Matrices of `experts`, each in the form `one`; the activation that follows the product.
struct NarrowStack {
  Narrow one;
  int experts;
  headrace::Activation activation = headrace::Activation::none;
  float alpha = 0, limit = 0;

  bool operator==(const NarrowStack& o) const {
    return one == o.one && experts == o.experts && activation == o.activation && alpha == o.alpha && limit == o.limit;
  }
  headrace::ExpertWeights with(const mx::array& weights, const mx::array* bias) const {
    return {one.form,   bytes_of(weights), bias ? bias->data<float>() : nullptr, one.inputs, one.outputs,
            activation, alpha,             limit};
  }
  void check(const mx::array& weights, const std::optional<mx::array>& bias) const {
    const bool gated = activation != headrace::Activation::none;
    if (experts < 1 || weights.dtype() != mx::uint8 || weights.size() != experts * one.nbytes(gated) ||
        (gated && one.outputs % 2))
      throw std::invalid_argument("experts' weights do not have their form's size");
    const int strips = (one.outputs / 2 + headrace::kStrip - 1) / headrace::kStrip;
    const size_t values = gated ? 2 * headrace::kStrip * strips : one.outputs;
    if (bias && (bias->dtype() != mx::float32 || bias->size() != experts * values))
      throw std::invalid_argument("experts' biases must be float32, one for each output");
  }
};

class ExpertsProduct : public mx::Primitive {
 public:
  ExpertsProduct(mx::Stream stream, NarrowStack stack, int each)
      : mx::Primitive(stream), stack_(stack), each_(each) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    encoder.set_output_array(out[0]);
    const auto weights = stack_.with(in[2], in.size() > 3 ? &in[3] : nullptr);
    const headrace::Choices choices{in[1].data<int32_t>(), int(in[1].size()), each_, stack_.experts};
    encoder.dispatch([weights, choices, x = in[0].data<float>(), to = out[0].data<float>()]() {
      headrace::compute(weights, choices, x, to, threads());
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("narrow products are computed on the CPU");
  }
  const char* name() const override { return "ExpertsProduct"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const ExpertsProduct&>(other);
    return stack_ == same.stack_ && each_ == same.each_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    mx::Shape shape = in[1].shape();
    shape.push_back(stack_.one.outputs);
    return {shape};
  }

 private:
  NarrowStack stack_;
  int each_;
};

// Inputs: x, chosen, weights of gate and up, of down, then shares and both biases as there are.
class ExpertsMixture : public mx::Primitive {
 public:
  ExpertsMixture(mx::Stream stream, NarrowStack first, NarrowStack down, int choices, bool weighted, bool biased)
      : mx::Primitive(stream), first_(first), down_(down), choices_(choices), weighted_(weighted), biased_(biased) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const auto& array : in) encoder.set_input_array(array);
    encoder.set_output_array(out[0]);
    const mx::array* bias = biased_ ? &in[in.size() - 2] : nullptr;
    const headrace::Mixture mixture{first_.with(in[2], bias),
                                    down_.with(in[3], bias ? bias + 1 : nullptr),
                                    in[0].data<float>(),
                                    in[1].data<int32_t>(),
                                    weighted_ ? in[4].data<float>() : nullptr,
                                    int(in[1].size()) / choices_,
                                    choices_,
                                    first_.experts,
                                    out[0].data<float>()};
    encoder.dispatch([mixture]() { headrace::compute(mixture, threads()); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mixtures over narrow weights are computed on the CPU");
  }
  const char* name() const override { return "ExpertsMixture"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const ExpertsMixture&>(other);
    return first_ == same.first_ && down_ == same.down_ && choices_ == same.choices_ && weighted_ == same.weighted_ &&
           biased_ == same.biased_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    mx::Shape shape = in[1].shape();
    if (weighted_) shape.pop_back();
    shape.push_back(down_.one.outputs);
    return {shape};
  }

 private:
  NarrowStack first_, down_;
  int choices_;
  bool weighted_, biased_;
};

mx::array as_rows(const mx::array& array, mx::Dtype dtype, mx::Stream stream) {
  return mx::contiguous(mx::astype(array, dtype, stream), false, stream);
}

// x: a row for each choice, or for each last axis of them.
mx::array expert_products(const mx::array& x, const mx::array& chosen, const mx::array& weights,
                          const std::optional<mx::array>& bias, int experts, int outputs, int bits, int group,
                          const std::string& scale) {
  const int inputs = x.ndim() ? x.shape(-1) : 0;
  const NarrowStack stack{narrow(inputs, outputs, bits, group, scale), experts};
  stack.check(weights, bias);
  const size_t rows = x.size() / inputs;
  const int each = rows == chosen.size() || chosen.ndim() == 0 ? 1 : chosen.shape(-1);
  if (rows * each != chosen.size()) throw std::invalid_argument("x must have a row for each choice, or for all of a row");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> in = {as_rows(x, mx::float32, stream), as_rows(chosen, mx::int32, stream), weights};
  if (bias) in.push_back(as_rows(*bias, mx::float32, stream));
  mx::Shape shape = chosen.shape();
  shape.push_back(outputs);
  return mx::array(shape, mx::float32, std::make_shared<ExpertsProduct>(stream, stack, each), std::move(in));
}

headrace::Activation activation_of(const std::string& name) {
  if (name == "silu") return headrace::Activation::silu;
  if (name == "gelu") return headrace::Activation::gelu;
  if (name == "clamped") return headrace::Activation::clamped;
  throw std::invalid_argument("no such activation of experts");
}

// forms: bits, group and scale of gate and up, and of down.
using FormName = std::tuple<int, int, std::string>;

mx::array mixture(const mx::array& x, const mx::array& chosen, const mx::array& first, const mx::array& down,
                  const std::optional<mx::array>& shares, const std::optional<mx::array>& first_bias,
                  const std::optional<mx::array>& down_bias, int experts, int hidden,
                  const std::tuple<FormName, FormName>& forms, const std::string& activation, float alpha,
                  float limit) {
  const int inputs = x.ndim() ? x.shape(-1) : 0, choices = chosen.ndim() ? chosen.shape(-1) : 0;
  const auto stack = [&](int from, int to, const FormName& form) {
    return NarrowStack{narrow(from, to, std::get<0>(form), std::get<1>(form), std::get<2>(form)), experts};
  };
  NarrowStack gate_up = stack(inputs, 2 * hidden, std::get<0>(forms));
  gate_up.activation = activation_of(activation), gate_up.alpha = alpha, gate_up.limit = limit;
  const NarrowStack back = stack(hidden, inputs, std::get<1>(forms));
  gate_up.check(first, first_bias);
  back.check(down, down_bias);
  if (choices < 1 || x.size() / inputs * choices != chosen.size() || (shares && shares->shape() != chosen.shape()) ||
      first_bias.has_value() != down_bias.has_value())
    throw std::invalid_argument("a mixture needs choices and shares for each row of x, and both biases or none");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> in = {as_rows(x, mx::float32, stream), as_rows(chosen, mx::int32, stream), first, down};
  for (const auto& further : {shares, first_bias, down_bias})
    if (further) in.push_back(as_rows(*further, mx::float32, stream));
  mx::Shape shape = chosen.shape();
  if (shares) shape.pop_back();
  shape.push_back(inputs);
  const auto primitive = std::make_shared<ExpertsMixture>(stream, gate_up, back, choices, shares.has_value(),
                                                          first_bias.has_value());
  return mx::array(shape, mx::float32, primitive, std::move(in));
}

}  // namespace

NB_MODULE(headrace_cpu_products, m) {
  m.def("product", &product, nb::arg("x"), nb::arg("weights"), nb::arg("bias").none(), nb::kw_only(),
        nb::arg("outputs"), nb::arg("bits"), nb::arg("group"), nb::arg("scale"), nb::arg("gated") = false,
        nb::arg("widths") = std::vector<int>());
  m.def("rows", &rows, nb::arg("index"), nb::arg("weights"), nb::kw_only(), nb::arg("inputs"), nb::arg("outputs"),
        nb::arg("bits"), nb::arg("group"), nb::arg("scale"));
  m.def("strips", &strips, nb::arg("weights"), nb::arg("scales").none(), nb::arg("biases").none(), nb::kw_only(),
        nb::arg("inputs"), nb::arg("bits"), nb::arg("group"), nb::arg("scale"));
  m.def("interleaved", &interleaved, nb::arg("gate"), nb::arg("other"));
  m.def("expert_products", &expert_products, nb::arg("x"), nb::arg("chosen"), nb::arg("weights"),
        nb::arg("bias").none(), nb::kw_only(), nb::arg("experts"), nb::arg("outputs"), nb::arg("bits"),
        nb::arg("group"), nb::arg("scale"));
  m.def("mixture", &mixture, nb::arg("x"), nb::arg("chosen"), nb::arg("first"), nb::arg("down"),
        nb::arg("shares").none(), nb::arg("first_bias").none(), nb::arg("down_bias").none(), nb::kw_only(),
        nb::arg("experts"), nb::arg("hidden"), nb::arg("forms"), nb::arg("activation"), nb::arg("alpha") = 0.0f,
        nb::arg("limit") = 0.0f);
  headrace::bind_blocks(m);
  m.def("threads", []() { return threads().count; });
  m.def("lanes", []() { return headrace::kLanes; });
}
