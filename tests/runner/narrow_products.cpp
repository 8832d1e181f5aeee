// Products over narrow weights (native/cpu_products.h) against sums in double over every form, for processors that
// Python with MLX cannot be run for here. Prints how many results were compared; exits with 1 where one is wrong.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu_products.h"

using headrace::Form, headrace::Product, headrace::kStrip;

namespace {

std::mt19937 source(1);
int64_t compared = 0;

void alone(const void* task, headrace::Piece piece, int size, int) { piece(task, 0, size); }

[[noreturn]] void wrong(const Form& form, const char* what, int outputs, int inputs, int rows) {
  std::printf("%d bits, groups of %d, scale %d: %s (%d outputs, %d inputs, %d rows)\n", form.bits, form.group,
              int(form.scale), what, outputs, inputs, rows);
  std::exit(1);
}

// A matrix in a form: its bytes as cpu/narrow_weights.py lays them out, and its weights.
struct Matrix {
  Form form;
  int outputs, inputs;
  std::vector<uint8_t> bytes;
  std::vector<double> weights;

  uint8_t* strip(int output) { return bytes.data() + output / kStrip * form.strip_bytes(inputs); }
};

// Stores a random number between -2 and 2, small ones among them, in a form's type, and returns it.
double put(headrace::Scale scale, uint8_t* to) {
  if (scale == headrace::kFloat) {
    const float value = float(source() % 4001) / 1000 - 2;
    std::memcpy(to, &value, sizeof value);
    return value;
  }
  const int mantissa_bits = scale == headrace::kHalf ? 10 : 7, bias = scale == headrace::kHalf ? 15 : 127;
  const int low = scale == headrace::kHalf ? 0 : 110;  // float16: subnormal numbers as well
  const int exponent = source() % 3 ? bias - int(source() % 3) : low + int(source() % 15);
  const int mantissa = int(source() % (1 << mantissa_bits)), sign = source() % 2;
  const auto bits = uint16_t(sign << 15 | exponent << mantissa_bits | mantissa);
  std::memcpy(to, &bits, sizeof bits);
  const double fraction = double(mantissa) / (1 << mantissa_bits) + (exponent ? 1 : 0);
  return (sign ? -1 : 1) * std::ldexp(fraction, std::max(exponent, 1) - bias);
}

void fill_group(Matrix& m, int output, int group) {
  const Form& f = m.form;
  const int lane = output % kStrip, each = 32 / f.bits;
  uint8_t* at = m.strip(output) + group * f.group_bytes();
  uint8_t* scales = at + f.group * f.bits * 2;
  const double scale = put(f.scale, scales + lane * f.scale_bytes());
  const double bias = put(f.scale, scales + (kStrip + lane) * f.scale_bytes());
  for (int word = 0; word < f.group / each; word++) {
    const uint32_t bits = source();
    std::memcpy(at + 4 * (word * kStrip + lane), &bits, sizeof bits);
    for (int i = 0; i < each; i++)
      m.weights[size_t(output) * m.inputs + group * f.group + word * each + i] =
          scale * (bits >> (i * f.bits) & ((1u << f.bits) - 1)) + bias;
  }
}

Matrix matrix(const Form& form, int outputs, int inputs) {
  const int strips = (outputs + kStrip - 1) / kStrip;
  Matrix m{form, outputs, inputs, std::vector<uint8_t>(strips * form.strip_bytes(inputs)),
           std::vector<double>(size_t(outputs) * inputs)};
  for (int output = 0; output < outputs; output++) {
    if (form.bits != 16) {
      for (int group = 0; group < inputs / form.group; group++) fill_group(m, output, group);
      continue;
    }
    for (int k = 0; k < inputs; k++)
      m.weights[size_t(output) * inputs + k] = put(form.scale, m.strip(output) + 2 * (k * kStrip + output % kStrip));
  }
  return m;
}

std::vector<float> product(const Matrix& m, const std::vector<float>& x, int rows) {
  std::vector<float> out(size_t(rows) * m.outputs);
  headrace::compute(Product{m.form, m.bytes.data(), nullptr, x.data(), rows, m.inputs, m.outputs, false, 1,
                            {out.data()}, {m.outputs}},
                    headrace::Threads{alone, 1});
  return out;
}

void check_products(const Matrix& m, int rows) {
  std::vector<float> x(size_t(rows) * m.inputs);
  for (float& value : x) value = float(source() % 20001) / 5000 - 2;
  const auto got = product(m, x, rows);
  for (int r = 0; r < rows; r++) {
    const float* row = x.data() + size_t(r) * m.inputs;
    if (rows < 9 || r % 7 == 0)
      if (product(m, {row, row + m.inputs}, 1) !=
          std::vector<float>(got.begin() + size_t(r) * m.outputs, got.begin() + size_t(r + 1) * m.outputs))
        wrong(m.form, "a row depends on the others", m.outputs, m.inputs, rows);
    for (int n = 0; n < m.outputs; n++) {
      double sum = 0, size = 0;  // x: 2, rounded to 16 bits of a group's largest
      for (int k = 0; k < m.inputs; k++) {
        const double weight = m.weights[size_t(n) * m.inputs + k];
        sum += weight * row[k];
        size += std::abs(weight) * 2;
      }
      if (!(std::abs(got[size_t(r) * m.outputs + n] - sum) <= 4e-5 * size))
        wrong(m.form, "a product is wrong", m.outputs, m.inputs, rows);
      compared++;
    }
  }
}

// Results in two parts and with a bias are those without; gated ones are silu(gate) · other of strips in turns.
void check_forms_of_results(const Matrix& m, int rows) {
  std::vector<float> x(size_t(rows) * m.inputs), bias(m.outputs), left(size_t(rows) * kStrip);
  for (float& value : x) value = float(source() % 20001) / 5000 - 2;
  for (float& value : bias) value = float(source() % 100);
  std::vector<float> right(size_t(rows) * (m.outputs - kStrip));
  const auto plain = product(m, x, rows);
  headrace::compute(Product{m.form, m.bytes.data(), bias.data(), x.data(), rows, m.inputs, m.outputs, false, 2,
                            {left.data(), right.data()}, {kStrip, m.outputs - kStrip}},
                    headrace::Threads{alone, 1});
  const int pairs = m.outputs / (2 * kStrip), half = pairs * kStrip - 3;  // the last strips are not full
  std::vector<float> gated(size_t(rows) * half);
  headrace::compute(Product{m.form, m.bytes.data(), nullptr, x.data(), rows, m.inputs, 2 * half, true, 1,
                            {gated.data()}, {half}},
                    headrace::Threads{alone, 1});
  for (int r = 0; r < rows; r++) {
    const float* whole = plain.data() + size_t(r) * m.outputs;
    for (int n = 0; n < m.outputs; n++, compared++) {
      const float got = n < kStrip ? left[r * kStrip + n] : right[r * (m.outputs - kStrip) + n - kStrip];
      if (got != whole[n] + bias[n]) wrong(m.form, "parts with a bias", m.outputs, m.inputs, rows);
    }
    for (int n = 0; n < half; n++, compared++) {
      const int at = n / kStrip * 2 * kStrip + n % kStrip;
      const double gate = whole[at], expected = gate / (1 + std::exp(-gate)) * whole[at + kStrip];
      if (!(std::abs(gated[size_t(r) * half + n] - expected) <= 1e-5 * std::abs(expected) + 1e-5))
        wrong(m.form, "a gated product", 2 * half, m.inputs, rows);
    }
  }
}

// The largest integers: their sums must not overflow.
void check_largest(const Form& form) {
  const int inputs = 256;
  Matrix m = matrix(form, kStrip, inputs);
  for (int group = 0; group < inputs / form.group; group++)
    std::memset(m.bytes.data() + group * form.group_bytes(), 0xff, form.group * form.bits * 2);
  for (const float sign : {1.0f, -1.0f}) {
    const auto got = product(m, std::vector<float>(inputs, 3 * sign), 1);
    std::vector<float> weights(inputs);
    for (int n = 0; n < kStrip; n++) {
      headrace::widen_output(form, m.bytes.data(), inputs, n, weights.data());
      double sum = 0, size = 0;
      for (const double weight : weights) sum += 3 * sign * weight, size += std::abs(3 * weight);
      if (!(std::abs(got[n] - sum) <= 4e-5 * size)) wrong(form, "the largest integers", kStrip, inputs, 1);
      compared++;
    }
  }
}

void check_outputs(const Matrix& m) {
  std::vector<float> weights(m.inputs);
  for (int n = 0; n < m.outputs; n++) {
    headrace::widen_output(m.form, m.bytes.data(), m.inputs, n, weights.data());
    for (int k = 0; k < m.inputs; k++, compared++) {
      const double expected = m.weights[size_t(n) * m.inputs + k];
      if (!(std::abs(weights[k] - expected) <= 1e-6 * (std::abs(expected) + 4)))
        wrong(m.form, "a single output", m.outputs, m.inputs, 1);
    }
  }
}

}  // namespace

int main() {
  std::vector<Form> forms = {{16, 1, headrace::kHalf}, {16, 1, headrace::kBfloat}};
  for (int bits : {4, 8})
    for (int group : {32, 64, 128})
      for (auto scale : {headrace::kHalf, headrace::kBfloat, headrace::kFloat}) forms.push_back({bits, group, scale});
  for (const Form& form : forms) {
    for (auto [outputs, inputs] : {std::pair(1, 128), {17, 256}, {70, 384}}) {
      const Matrix m = matrix(form, outputs, inputs);
      check_outputs(m);
      for (int rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 100}) check_products(m, rows);
    }
    const Matrix m = matrix(form, 70, 128);
    for (int rows : {1, 2, 3, 6, 7, 30}) check_forms_of_results(m, rows);
    if (form.bits != 16) check_largest(form);
  }
  std::printf("%lld results compared\n", static_cast<long long>(compared));
}
