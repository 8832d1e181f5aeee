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
// The encoder's members are MLX's own affair, so this file belongs to one MLX version (pyproject.toml pins it), and
// the recorded step is compared with a normal one before it is used (step_graphs.py).

#include <dlfcn.h>

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

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

// -- CUDA's driver, which MLX has loaded already --------------------------------------------------------------

enum NodeType : int { kKernel = 0, kMemset = 2, kGraph = 4, kEmpty = 5 };

struct Driver {
  int (*add_dependencies)(CUgraph_st*, CUgraphNode const*, CUgraphNode const*, size_t);
  int (*get_nodes)(CUgraph_st*, CUgraphNode*, size_t*);
  int (*node_type)(CUgraphNode, int*);
  int (*child_graph)(CUgraphNode, CUgraph_st**);
  int (*instantiate)(CUgraphExec_st**, CUgraph_st*, unsigned long long);
  int (*upload)(CUgraphExec_st*, CUstream_st*);
  int (*launch)(CUgraphExec_st*, CUstream_st*);
  int (*destroy)(CUgraphExec_st*);
  int (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream_st*);
  int (*error_string)(int, const char**);

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("CUDA's driver is not there");
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("CUDA's driver lacks ") + name);
    };
    find(add_dependencies, "cuGraphAddDependencies");
    find(get_nodes, "cuGraphGetNodes");
    find(node_type, "cuGraphNodeGetType");
    find(child_graph, "cuGraphChildGraphNodeGetGraph");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(upload, "cuGraphUpload");
    find(launch, "cuGraphLaunch");
    find(destroy, "cuGraphExecDestroy");
    find(copy, "cuMemcpyAsync");
    find(error_string, "cuGetErrorString");
  }
};

void check(int result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  Driver::get().error_string(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown error"));
}

CUdeviceptr address(const mx::array& array) {
  return reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(array));
}

// Nodes of a graph and the graphs in it. Throws where a node would not do the same again: a copy from the host's
// memory, say, which is gone by then.
size_t count_nodes(CUgraph_st* graph) {
  auto& driver = Driver::get();
  size_t count = 0;
  check(driver.get_nodes(graph, nullptr, &count), "reading the step's graph");
  std::vector<CUgraphNode> nodes(count);
  check(driver.get_nodes(graph, nodes.data(), &count), "reading the step's graph");
  size_t total = 0;
  for (auto node : nodes) {
    int type = -1;
    check(driver.node_type(node, &type), "reading the step's graph");
    if (type == kGraph) {
      CUgraph_st* child = nullptr;
      check(driver.child_graph(node, &child), "reading the step's graph");
      total += count_nodes(child);
    } else if (type == kKernel || type == kMemset || type == kEmpty) {
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
  explicit StepGraph() : stream_(mx::default_stream(mx::Device::gpu)) {}

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
      check(Driver::get().instantiate(&exec_, graph, 0), "instantiating the step");
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

  // What the recorded step read and wrote, evaluated; `zero` is an array to hand out as the replay's mark.
  void bind(const std::vector<mx::array>& inputs, const std::vector<mx::array>& results, const mx::array& zero) {
    for (auto& input : inputs) {
      if (!input.flags().row_contiguous) throw std::invalid_argument("a recorded input is not contiguous");
    }
    inputs_ = inputs;
    results_ = results;
    results_.push_back(zero);
    check(Driver::get().upload(exec_, encoder().stream()), "uploading the step");
  }

  void launch(const std::vector<mx::array>& inputs, std::vector<mx::array>& results) {
    auto& encoder = this->encoder();
    encoder.commit();
    CUstream_st* stream = encoder.stream();
    for (size_t i = 0; i < inputs_.size(); i++) {
      if (inputs_[i].nbytes() == 0) continue;
      check(Driver::get().copy(address(inputs_[i]), address(inputs[i]), inputs_[i].nbytes(), stream),
            "copying a step's input");
    }
    check(Driver::get().launch(exec_, stream), "launching a step");
    for (size_t i = 0; i < results.size(); i++) results[i].copy_shared_buffer(results_[i]);
  }

  const std::vector<mx::array>& inputs() const { return inputs_; }
  const std::vector<mx::array>& results() const { return results_; }
  mx::Stream stream() const { return stream_; }
  size_t nodes() const { return nodes_; }
  const std::string& error() const { return error_; }

 private:
  mx::cu::CommandEncoder& encoder() { return mx::cu::get_command_encoder(stream_); }

  mx::Stream stream_;
  CUgraphExec_st* exec_ = nullptr;
  size_t nodes_ = 0;
  std::string error_;
  int max_ops_ = 0, max_mb_ = 0;
  std::shared_ptr<mx::array::Data> sentinel_;
  std::vector<std::shared_ptr<mx::array::Data>> kept_;
  std::vector<mx::array> inputs_, results_;
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
  using OnGpu::OnGpu;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    graph_->launch(inputs, outputs);
  }
  const char* name() const override { return "StepGraphReplay"; }
};

mx::array mark(std::shared_ptr<StepGraph> graph, const std::vector<mx::array>& results) {
  return mx::array({1}, mx::int32, std::make_shared<Mark>(std::move(graph)), results);
}

std::vector<mx::array> replay(std::shared_ptr<StepGraph> graph, const std::vector<mx::array>& inputs,
                              const std::vector<mx::array>& after) {
  auto& recorded = graph->inputs();
  if (inputs.size() != recorded.size()) throw std::invalid_argument("a step takes other inputs than the recorded one");
  std::vector<mx::array> all;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs[i].shape() != recorded[i].shape() || inputs[i].dtype() != recorded[i].dtype()) {
      throw std::invalid_argument("a step's input has another shape than the recorded one");
    }
    all.push_back(mx::contiguous(inputs[i], false, graph->stream()));
  }
  all.insert(all.end(), after.begin(), after.end());
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> types;
  for (auto& result : graph->results()) {
    shapes.push_back(result.shape());
    types.push_back(result.dtype());
  }
  return mx::array::make_arrays(std::move(shapes), types, std::make_shared<Replay>(std::move(graph)), all);
}

}  // namespace

NB_MODULE(headrace_step_graph, m) {
  nb::class_<StepGraph>(m, "StepGraph")
      .def(nb::new_([] { return std::make_shared<StepGraph>(); }))
      .def("begin", &StepGraph::begin)
      .def("end", &StepGraph::end)
      .def("bind", &StepGraph::bind)
      .def_prop_ro("nodes", &StepGraph::nodes)
      .def_prop_ro("error", &StepGraph::error);
  m.def("mark", &mark);
  m.def("replay", &replay);
}
