// Native operations of the CPU as operations of MLX: evaluated in its order, on its CPU stream, among its own.
//
//     attend   paged attention (cpu_attention.cpp)
//     store    rows of vectors into pools, in place
//     norm, rotate, gate   the small ones (cpu_elementwise.cpp)
//
// A write into an input exchanges no array, so MLX does not know of it: store returns a mark [1], and whatever has to
// come after the write takes that as an input (kv/store.py).

#include <mlx/allocator.h>
#include <mlx/array.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu_attention.h"
#include "cpu_elementwise.h"
#include "cpu_functions.h"
#include "cpu_vectors.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

class Operation : public mx::Primitive {
 public:
  explicit Operation(const char* name) : mx::Primitive(mx::default_stream(mx::Device::cpu)), name_(name) {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("an operation of the CPU");
  }
  const char* name() const override { return name_; }

 protected:
  template <class Task>
  void dispatch(Task&& task) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<Task>(task));
  }

 private:
  const char* name_;
};

// -- attention -----------------------------------------------------------------------------------------------

struct Packing {
  int bits, key_dim, value_dim, key_group, value_group;  // bits 0: not packed
};

headrace::Cache cache_of(const std::vector<mx::array>& inputs, size_t first, int bits, int dim, int group) {
  const mx::array& data = inputs[first];
  headrace::Cache cache{};
  cache.data = data.data<void>();
  cache.slots = data.shape(1);
  cache.dim = dim;
  cache.group_size = group;
  if (bits == 0) {
    cache.width = dim;
    cache.element = data.dtype() == mx::float32   ? headrace::Element::float32
                    : data.dtype() == mx::float16 ? headrace::Element::float16
                                                  : headrace::Element::bfloat16;
    return cache;
  }
  cache.width = data.shape(2) * 32 / bits;
  cache.groups = cache.width / group;
  cache.element = bits == 8 ? headrace::Element::packed8 : headrace::Element::packed4;
  cache.scales = static_cast<const uint16_t*>(inputs[first + 1].data<void>());
  cache.biases = static_cast<const uint16_t*>(inputs[first + 2].data<void>());
  cache.bfloat16_scales = inputs[first + 1].dtype() == mx::bfloat16;
  return cache;
}

// Inputs: queries, tables, bases, offsets, ends, mark, sinks, then keys and values, each with scales and biases
// where packed. Without sinks that input has no elements.
class Attend : public Operation {
 public:
  Attend(int block_size, float scale, int window, float softcap, Packing packing)
      : Operation("headrace_attend"),
        block_size_(block_size),
        scale_(scale),
        window_(window),
        softcap_(softcap),
        packing_(packing) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& queries = inputs[0];
    mx::array& out = outputs[0];
    int batch = queries.shape(0), heads = queries.shape(1), length = queries.shape(2), dim = packing_.value_dim;
    // In memory [batch, length, heads, dim]: the model takes heads together next.
    mx::Strides strides{int64_t(length) * heads * dim, dim, int64_t(heads) * dim, 1};
    bool rows = length == 1 || heads == 1;
    out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, rows, out.size() <= 1});
    int parts = packing_.bits == 0 ? 1 : 3;
    headrace::Attention call{};
    call.batch = batch, call.length = length, call.heads = heads, call.kv_heads = inputs[7].shape(0);
    call.block_size = block_size_, call.table_width = inputs[1].shape(1);
    call.window = window_, call.scale = scale_, call.softcap = softcap_;
    call.keys = cache_of(inputs, 7, packing_.bits, packing_.key_dim, packing_.key_group);
    call.values = cache_of(inputs, 7 + parts, packing_.bits, packing_.value_dim, packing_.value_group);
    call.queries = queries.data<float>();
    for (int i = 0; i < 4; i++) call.query_strides[i] = queries.strides(i);
    call.tables = inputs[1].data<int32_t>(), call.bases = inputs[2].data<int32_t>();
    call.offsets = inputs[3].data<int32_t>(), call.ends = inputs[4].data<int32_t>();
    call.sinks = inputs[6].size() > 0 ? inputs[6].data<float>() : nullptr;
    call.out = out.data<float>();
    dispatch([call] { headrace::attend(call); });
  }

 private:
  int block_size_;
  float scale_;
  int window_;
  float softcap_;
  Packing packing_;
};

mx::array attend(const mx::array& queries, const mx::array& tables, const mx::array& bases, const mx::array& offsets,
                 const mx::array& ends, const mx::array& mark, const mx::array& sinks,
                 const std::vector<mx::array>& pools, int block_size, float scale, int window, float softcap, int bits,
                 int key_dim, int value_dim, int key_group, int value_group) {
  std::vector<mx::array> inputs{queries, tables, bases, offsets, ends, mark, sinks};
  inputs.insert(inputs.end(), pools.begin(), pools.end());
  Packing packing{bits, key_dim, value_dim, key_group, value_group};
  return mx::array({queries.shape(0), queries.shape(1), queries.shape(2), value_dim}, mx::float32,
                   std::make_shared<Attend>(block_size, scale, window, softcap, packing), std::move(inputs));
}

// -- writing -------------------------------------------------------------------------------------------------

// Rows [batch, heads, length, width] of one pool [heads, slots, width].
struct Rows {
  char* pool;
  const char* rows;
  int64_t slots, strides[4];
  int batch, heads, length, width;
  size_t item;

  void store(const int32_t* targets) const {
    for (int b = 0; b < batch; b++)
      for (int h = 0; h < heads; h++)
        for (int l = 0; l < length; l++) {
          const char* from = rows + (b * strides[0] + h * strides[1] + l * strides[2]) * int64_t(item);
          char* to = pool + (h * slots + targets[b * length + l]) * width * int64_t(item);
          if (strides[3] == 1)
            std::memcpy(to, from, width * item);
          else
            for (int i = 0; i < width; i++) std::memcpy(to + i * item, from + i * strides[3] * int64_t(item), item);
        }
  }
};

// Inputs: slots, mark, pools, then as many arrays of rows. Output: the mark.
class Store : public Operation {
 public:
  Store() : Operation("headrace_store") {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    size_t count = (inputs.size() - 2) / 2;
    std::vector<Rows> writes;
    for (size_t i = 0; i < count; i++) {
      const mx::array &pool = inputs[2 + i], &rows = inputs[2 + count + i];
      Rows write{const_cast<char*>(static_cast<const char*>(pool.data<void>())),
                 static_cast<const char*>(rows.data<void>()), pool.shape(1)};
      for (int d = 0; d < 4; d++) write.strides[d] = rows.strides(d);
      write.batch = rows.shape(0), write.heads = rows.shape(1), write.length = rows.shape(2);
      write.width = rows.shape(3), write.item = rows.itemsize();
      writes.push_back(write);
    }
    dispatch([writes = std::move(writes), slots = inputs[0].data<int32_t>(), mark = outputs[0].data<int32_t>()] {
      for (const Rows& write : writes) write.store(slots);
      *mark = 0;
    });
  }
};

mx::array store(const std::vector<mx::array>& pools, const std::vector<mx::array>& rows, const mx::array& slots,
                const mx::array& mark) {
  std::vector<mx::array> inputs{slots, mark};
  inputs.insert(inputs.end(), pools.begin(), pools.end());
  inputs.insert(inputs.end(), rows.begin(), rows.end());
  return mx::array({1}, mx::int32, std::make_shared<Store>(), std::move(inputs));
}

// -- small operations ----------------------------------------------------------------------------------------

float* allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<float>();
}

// Inputs: x and weight, contiguous.
class Norm : public Operation {
 public:
  explicit Norm(float eps) : Operation("headrace_norm"), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    int width = inputs[0].shape(-1);
    dispatch([x = inputs[0].data<float>(), weight = inputs[1].data<float>(), eps = eps_,
              rows = int64_t(inputs[0].size()) / width, width,
              out = allocate(outputs[0])] { headrace::rms_norm(x, weight, eps, rows, width, out); });
  }

 private:
  float eps_;
};

mx::array norm(const mx::array& x, const mx::array& weight, float eps) {
  return mx::array(x.shape(), mx::float32, std::make_shared<Norm>(eps), {mx::contiguous(x), mx::contiguous(weight)});
}

// Inputs: x of any strides, cosines and sines, contiguous.
class Rotate : public Operation {
 public:
  Rotate() : Operation("headrace_rotate") {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& x = inputs[0];
    headrace::Rotation call{x.data<float>()};
    for (int i = 0; i < 4; i++) call.strides[i] = x.strides(i);
    call.cosine = inputs[1].data<float>(), call.sine = inputs[2].data<float>();
    call.batch = x.shape(0), call.heads = x.shape(1), call.length = x.shape(2), call.half = x.shape(3) / 2;
    call.out = allocate(outputs[0]);
    dispatch([call] { headrace::rotate(call); });
  }
};

mx::array rotate(const mx::array& x, const mx::array& cosine, const mx::array& sine) {
  return mx::array(x.shape(), mx::float32, std::make_shared<Rotate>(),
                   {x, mx::contiguous(cosine), mx::contiguous(sine)});
}

// Inputs: gate and up, contiguous.
class Gate : public Operation {
 public:
  explicit Gate(bool gelu) : Operation("headrace_gate"), gelu_(gelu) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([gate = inputs[0].data<float>(), up = inputs[1].data<float>(), gelu = gelu_,
              size = int64_t(inputs[0].size()),
              out = allocate(outputs[0])] { headrace::gate(gate, up, gelu, size, out); });
  }

 private:
  bool gelu_;
};

mx::array gate(const mx::array& gates, const mx::array& up, bool gelu) {
  return mx::array(gates.shape(), mx::float32, std::make_shared<Gate>(gelu),
                   {mx::contiguous(gates), mx::contiguous(up)});
}

}  // namespace

NB_MODULE(cpu_operations, module) {
  module.def("attend", attend);
  module.def("store", store);
  module.def("norm", norm);
  module.def("rotate", rotate);
  module.def("gate", gate, nb::arg("gate"), nb::arg("up"), nb::arg("gelu"));
  module.def("functions", [] {
    static const headrace::Functions functions{headrace::rms_norm, headrace::rotate, headrace::attend};
    return reinterpret_cast<uintptr_t>(&functions);
  });
  module.def("threads", [] { return headrace::threads(); });
}
