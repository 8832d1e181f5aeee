// One decode step recorded as a CUDA graph, and launched again with other inputs.
//
// MLX builds a CUDA graph out of the operations it evaluates, node by node, and launches it: for a step of some
// hundred kernels that is a millisecond and more of host time, every step, while the graph is the same but for what
// its inputs hold. Here the graph that MLX has built for one step is instantiated once more and kept, with every
// buffer it touches. A replay copies the new inputs into the recorded ones and launches it: some ten microseconds.
//
// Recording: begin() has everything earlier launched and lifts the limits at which MLX cuts its graphs; the step is
// evaluated together with mark(results), whose evaluation comes last and finds the whole step in the encoder's
// graph; end() puts the limits back. A replay is an operation like others: it may be lazy, and what takes its
// results as inputs comes after it.
//
// Inputs that the host makes go through pinned memory into one array, of which the recorded step's inputs are parts:
// one copy, and no kernel reads memory that the host shares (see device_arrays.py).
//
// The encoder's members are MLX's own affair, so this file belongs to one MLX version (pyproject.toml pins it), and
// the recorded step is compared with a normal one before it is used (forwards/step_graphs.py).

#include <algorithm>
#include <cassert>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/utils.h"

#define private public  // the encoder's graph, its pending dependencies and what it keeps alive
#include "mlx/backend/cuda/device.h"
#undef private

#include "cuda_driver.h"
#include "graph_nodes.h"
#include "graph_overlap.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

using headrace::cuda::address;
using headrace::cuda::check;
using headrace::cuda::Driver;
using headrace::cuda::Outbox;

// Nodes of a graph and the graphs in it. Throws where a node would not do the same again: a copy from the host's
// memory, say, which is gone by then.
size_t count_nodes(CUgraph_st* graph) {
  size_t total = 0;
  for (auto node : headrace::cuda::nodes_of(graph)) {
    int type = headrace::cuda::type_of(node);
    if (type == headrace::cuda::kGraph) {
      total += count_nodes(headrace::cuda::child_of(node));
    } else if (type == headrace::cuda::kKernel || type == headrace::cuda::kMemset ||
               type == headrace::cuda::kEmpty) {
      total++;
    } else {
      throw std::runtime_error("the step has an operation that cannot be replayed (node type " +
                               std::to_string(type) + ")");
    }
  }
  return total;
}

// -- a recorded step ------------------------------------------------------------------------------------------

class StepGraph : public std::enable_shared_from_this<StepGraph> {
 public:
  // `tag`: what the names of kernels have in them that may begin early (graph_overlap.h); empty: none may.
  explicit StepGraph(std::string tag) : stream_(mx::default_stream(mx::Device::gpu)), tag_(std::move(tag)) {}

  ~StepGraph() {
    if (exec_) Driver::get().destroy(exec_);
  }

  void begin() {
    auto& encoder = this->encoder();
    encoder.commit();
    max_ops_ = std::exchange(encoder.max_ops_per_graph_, 1 << 30);
    max_mb_ = std::exchange(encoder.max_mb_per_graph_, 1 << 30);
    sentinel_ = std::make_shared<mx::array::Data>(mx::allocator::Buffer(nullptr), [](mx::allocator::Buffer) {});
    encoder.temporaries_.push_back(sentinel_);
  }

  // Called while `mark` is evaluated. Errors are kept: one thrown here would leave MLX's evaluation half done.
  void record() {
    try {
      auto& encoder = this->encoder();
      if (encoder.temporaries_.empty() || encoder.temporaries_.front() != sentinel_) {
        throw std::runtime_error("MLX launched a part of the step on its own");
      }
      CUgraph_st* graph = encoder.graph_;
      auto &from = encoder.from_nodes_, &to = encoder.to_nodes_;
      if (!from.empty()) {
        check(Driver::get().add_dependencies(graph, from.data(), to.data(), from.size()), "ordering the step");
        from.clear();
        to.clear();
      }
      nodes_ = count_nodes(graph);
      instantiate(graph);
      kept_ = encoder.temporaries_;
    } catch (const std::exception& error) {
      error_ = error.what();
    }
  }

  void end() {
    auto& encoder = this->encoder();
    encoder.max_ops_per_graph_ = max_ops_;
    encoder.max_mb_per_graph_ = max_mb_;
    sentinel_.reset();
    if (!exec_ && error_.empty()) error_ = "the step was not evaluated";
  }

  // What the recorded step read and wrote, evaluated: an input of the device, of which a replay may bring fewer
  // elements; inputs of the host, one behind the other in `packed`; and results. `zero` is an array to hand out as
  // the replay's mark.
  void bind(const mx::array& input, const mx::array& packed, const std::vector<mx::array>& parts,
            const std::vector<mx::array>& results, const mx::array& zero) {
    CUdeviceptr at = address(packed);
    for (auto& part : parts) {
      if (address(part) != at || !part.flags().row_contiguous) {
        throw std::runtime_error("the recorded inputs are not parts of one array");
      }
      at += part.nbytes();
    }
    if (!input.flags().row_contiguous) throw std::runtime_error("a recorded input is not contiguous");
    arrays_ = {input, packed};
    sent_bytes_ = at - address(packed);
    results_ = results;
    results_.push_back(zero);
    outbox_ = std::make_unique<Outbox>(packed.nbytes());
    check(Driver::get().upload(exec_, encoder().stream()), "uploading the step");
  }

  void launch(const mx::array& input, const std::vector<char>& sent, std::vector<mx::array>& results) {
    auto& encoder = this->encoder();
    encoder.commit();
    CUstream_st* stream = encoder.stream();
    check(Driver::get().copy(address(arrays_[0]), address(input), input.nbytes(), stream), "copying a step's input");
    outbox_->send(sent, address(arrays_[1]), stream);
    check(Driver::get().launch(exec_, stream), "launching a step");
    for (size_t i = 0; i < results.size(); i++) results[i].copy_shared_buffer(results_[i]);
  }

  // Seconds that the device takes for one of `times` launches, one behind the other.
  double seconds(int times) {
    auto& driver = Driver::get();
    auto& encoder = this->encoder();
    encoder.commit();
    CUstream_st* stream = encoder.stream();
    CUevent_st* events[2] = {};
    for (auto*& event : events) check(driver.make_event(&event, 0), "making an event");
    check(driver.launch(exec_, stream), "launching a step");
    check(driver.record_event(events[0], stream), "timing a step");
    for (int i = 0; i < times; i++) check(driver.launch(exec_, stream), "launching a step");
    check(driver.record_event(events[1], stream), "timing a step");
    check(driver.wait_event(events[1]), "timing a step");
    float milliseconds = 0;
    check(driver.elapsed(&milliseconds, events[0], events[1]), "timing a step");
    for (auto* event : events) driver.destroy_event(event);
    return milliseconds * 1e-3 / times;
  }

  size_t sent_bytes() const { return sent_bytes_; }
  const mx::array& input() const { return arrays_[0]; }
  const std::vector<mx::array>& results() const { return results_; }
  mx::Stream stream() const { return stream_; }
  size_t nodes() const { return nodes_; }
  size_t early() const { return early_; }
  const std::string& error() const { return error_; }
  const std::string& refusal() const { return refusal_; }

 private:
  mx::cu::CommandEncoder& encoder() { return mx::cu::get_command_encoder(stream_); }

  // With kernels that begin early where the driver takes that, as MLX has ordered them elsewhere.
  void instantiate(CUgraph_st* graph) {
    if (!tag_.empty()) instantiate_early(graph);
    if (!exec_) check(Driver::get().instantiate(&exec_, graph, 0), "instantiating the step");
  }

  // MLX launches its graph for this one step, so another is changed. Leaves exec_ null where nothing begins early or
  // the driver says no.
  void instantiate_early(CUgraph_st* graph) {
    auto& driver = Driver::get();
    CUgraph_st* own = nullptr;
    if (driver.clone(&own, graph) != 0) return;
    try {
      early_ = headrace::cuda::overlap(own, tag_);
      if (early_ > 0) check(driver.instantiate(&exec_, own, 0), "instantiating the step");
    } catch (const std::exception& error) {
      refusal_ = error.what();
      early_ = 0;
      exec_ = nullptr;
    }
    driver.destroy_graph(own);
  }

  mx::Stream stream_;
  std::string tag_, refusal_;
  size_t early_ = 0;
  CUgraphExec_st* exec_ = nullptr;
  size_t nodes_ = 0;
  std::string error_;
  int max_ops_ = 0, max_mb_ = 0;
  std::shared_ptr<mx::array::Data> sentinel_;
  std::vector<std::shared_ptr<mx::array::Data>> kept_;
  std::vector<mx::array> arrays_, results_;
  size_t sent_bytes_ = 0;
  std::unique_ptr<Outbox> outbox_;
};

// -- reading results ------------------------------------------------------------------------------------------

// Copies what small arrays hold to the host. MLX would move an array that the host looks at into memory that both
// share, where it stays when the buffer is used again.
class Reader {
 public:
  Reader() {
    check(Driver::get().make_stream(&stream_, headrace::cuda::kNonBlocking), "making a stream");
    check(Driver::get().pinned(&memory_, kBytes, 0), "allocating pinned memory");
  }
  Reader(const Reader&) = delete;
  ~Reader() {
    Driver::get().unpin(memory_);
    Driver::get().destroy_stream(stream_);
  }

  // The arrays' bytes, one behind the other; None when they are too large or not contiguous. They must have been
  // evaluated and waited for.
  nb::object read(const std::vector<mx::array>& arrays) {
    auto& driver = Driver::get();
    size_t total = 0;
    for (auto& array : arrays) {
      total += array.nbytes();
      if (!array.flags().row_contiguous || total > kBytes) return nb::none();
    }
    auto at = reinterpret_cast<CUdeviceptr>(memory_);
    for (auto& array : arrays) {
      if (array.nbytes() == 0) continue;
      check(driver.copy(at, address(array), array.nbytes(), stream_), "reading results");
      at += array.nbytes();
    }
    check(driver.wait_stream(stream_), "reading results");
    return nb::bytes(static_cast<const char*>(memory_), total);
  }

 private:
  static constexpr size_t kBytes = 1 << 20;
  CUstream_st* stream_ = nullptr;
  void* memory_ = nullptr;
};

// -- operations -----------------------------------------------------------------------------------------------

class OnGpu : public mx::Primitive {
 public:
  explicit OnGpu(std::shared_ptr<StepGraph> graph) : mx::Primitive(graph->stream()), graph_(std::move(graph)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("recorded steps are of a GPU");
  }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 protected:
  std::shared_ptr<StepGraph> graph_;
};

class Mark : public OnGpu {
 public:
  using OnGpu::OnGpu;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    graph_->record();
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  }
  const char* name() const override { return "StepGraphMark"; }
};

class Replay : public OnGpu {
 public:
  Replay(std::shared_ptr<StepGraph> graph, std::vector<char> sent) : OnGpu(std::move(graph)), sent_(std::move(sent)) {}
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    graph_->launch(inputs[0], sent_, outputs);
  }
  const char* name() const override { return "StepGraphReplay"; }

 private:
  std::vector<char> sent_;
};

// An array as it is; MLX's graph that the operations around it go into is instantiated by itself. Otherwise MLX
// changes the parameters of a graph with as many kernels that it has launched before, which goes wrong where a kernel
// is a cluster of blocks and was none there.
class Anew : public mx::Primitive {
 public:
  Anew() : mx::Primitive(mx::default_stream(mx::Device::gpu)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("graphs are of a GPU");
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    if (encoder.node_count_ + kRoom > encoder.max_ops_per_graph_) encoder.commit();
    encoder.is_graph_updatable_ = false;
    outputs[0].copy_shared_buffer(inputs[0]);
  }
  const char* name() const override { return "GraphAnew"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  static constexpr int kRoom = 8;  // so that MLX does not end the graph between this and the cluster
};

mx::array anew(const mx::array& array) {
  return mx::array(array.shape(), array.dtype(), std::make_shared<Anew>(), {array});
}

mx::array mark(std::shared_ptr<StepGraph> graph, const std::vector<mx::array>& results) {
  return mx::array({1}, mx::int32, std::make_shared<Mark>(std::move(graph)), results);
}

std::vector<mx::array> replay(std::shared_ptr<StepGraph> graph, const mx::array& input,
                              const nb::bytes& message, const std::vector<mx::array>& after) {
  if (input.nbytes() > graph->input().nbytes() || input.dtype() != graph->input().dtype()) {
    throw std::invalid_argument("a step's input is longer than the recorded one, or of another type");
  }
  if (message.size() != graph->sent_bytes()) throw std::invalid_argument("a step sends more than the recorded one");
  std::vector<char> sent(message.c_str(), message.c_str() + message.size());
  std::vector<mx::array> inputs{mx::contiguous(input, false, graph->stream())};
  inputs.insert(inputs.end(), after.begin(), after.end());
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> types;
  for (auto& result : graph->results()) {
    shapes.push_back(result.shape());
    types.push_back(result.dtype());
  }
  auto operation = std::make_shared<Replay>(std::move(graph), std::move(sent));
  return mx::array::make_arrays(std::move(shapes), types, std::move(operation), inputs);
}

}  // namespace

NB_MODULE(headrace_step_graph, m) {
  nb::class_<StepGraph>(m, "StepGraph")
      .def(nb::new_([](std::string tag) { return std::make_shared<StepGraph>(std::move(tag)); }))
      .def("begin", &StepGraph::begin)
      .def("end", &StepGraph::end)
      .def("bind", &StepGraph::bind)
      .def("seconds", &StepGraph::seconds)
      .def_prop_ro("nodes", &StepGraph::nodes)
      .def_prop_ro("early", &StepGraph::early)
      .def_prop_ro("refusal", &StepGraph::refusal)
      .def_prop_ro("error", &StepGraph::error);
  nb::class_<Reader>(m, "Reader")
      .def(nb::init<>())
      .def("read", &Reader::read);
  m.def("anew", &anew);
  m.def("mark", &mark);
  m.def("replay", &replay);
}
