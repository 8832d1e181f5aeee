// What the extensions ask of CUDA's driver, which MLX has loaded already: functions looked up by name, and pinned
// memory that small messages to the device go through. Needs none of CUDA's own headers (see cuda_names/).
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cuda/utils.h"

struct CUevent_st;

namespace headrace::cuda {

constexpr unsigned kNoTiming = 2;     // of an event
constexpr unsigned kNonBlocking = 1;  // of a stream

// CUgraphEdgeData: all zero for an edge that waits for the whole of the node before.
struct EdgeData {
  unsigned char from_port = 0, to_port = 0, type = 0;
  unsigned char reserved[5] = {};
};

// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParams {
  CUfunction function;
  unsigned grid[3], block[3], shared_bytes;
  void **parameters, **extra;
  void *kernel, *context;
};

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
  int (*pinned)(void**, size_t, unsigned);
  int (*unpin)(void*);
  int (*make_event)(CUevent_st**, unsigned);
  int (*record_event)(CUevent_st*, CUstream_st*);
  int (*wait_event)(CUevent_st*);
  int (*destroy_event)(CUevent_st*);
  int (*elapsed)(float*, CUevent_st*, CUevent_st*);
  int (*make_stream)(CUstream_st**, unsigned);
  int (*wait_stream)(CUstream_st*);
  int (*destroy_stream)(CUstream_st*);
  int (*error_string)(int, const char**);
  int (*clone)(CUgraph_st**, CUgraph_st*);
  int (*destroy_graph)(CUgraph_st*);
  // Null where the driver is older than CUDA 12.3.
  int (*get_edges)(CUgraph_st*, CUgraphNode*, CUgraphNode*, EdgeData*, size_t*);
  int (*add_edges)(CUgraph_st*, CUgraphNode const*, CUgraphNode const*, EdgeData const*, size_t);
  int (*remove_dependencies)(CUgraph_st*, CUgraphNode const*, CUgraphNode const*, EdgeData const*, size_t);
  int (*kernel_parameters)(CUgraphNode, KernelNodeParams*);
  int (*function_name)(const char**, CUfunction);

  bool can_overlap() const {
    return get_edges && add_edges && remove_dependencies && kernel_parameters && function_name;
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("CUDA's driver is not there");
    auto look_for = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    auto find = [&](auto& function, const char* name) {
      look_for(function, name);
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
    find(pinned, "cuMemHostAlloc");
    find(unpin, "cuMemFreeHost");
    find(make_event, "cuEventCreate");
    find(record_event, "cuEventRecord");
    find(wait_event, "cuEventSynchronize");
    find(destroy_event, "cuEventDestroy_v2");
    find(elapsed, "cuEventElapsedTime");
    find(make_stream, "cuStreamCreate");
    find(wait_stream, "cuStreamSynchronize");
    find(destroy_stream, "cuStreamDestroy_v2");
    find(error_string, "cuGetErrorString");
    find(clone, "cuGraphClone");
    find(destroy_graph, "cuGraphDestroy");
    look_for(get_edges, "cuGraphGetEdges_v2");
    look_for(add_edges, "cuGraphAddDependencies_v2");
    look_for(remove_dependencies, "cuGraphRemoveDependencies_v2");
    look_for(kernel_parameters, "cuGraphKernelNodeGetParams_v2");
    look_for(function_name, "cuFuncGetName");
  }
};

inline void check(int result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  Driver::get().error_string(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown error"));
}

inline CUdeviceptr address(const mlx::core::array& array) {
  return reinterpret_cast<CUdeviceptr>(mlx::core::gpu_ptr<void>(array));
}

// Pinned memory for what the host sends along, several messages' worth: a part is written again when the copy out of
// it is over.
class Outbox {
 public:
  explicit Outbox(size_t bytes) : bytes_(bytes) {
    auto& driver = Driver::get();
    check(driver.pinned(&memory_, std::max<size_t>(1, bytes * kParts), 0), "allocating pinned memory");
    for (auto*& event : events_) check(driver.make_event(&event, kNoTiming), "making an event");
  }
  Outbox(const Outbox&) = delete;

  ~Outbox() {
    auto& driver = Driver::get();
    for (auto* event : events_) {
      if (!event) continue;
      driver.wait_event(event);
      driver.destroy_event(event);
    }
    if (memory_) driver.unpin(memory_);
  }

  void send(const std::vector<char>& data, CUdeviceptr to, CUstream_st* stream) {
    auto& driver = Driver::get();
    char* part = static_cast<char*>(memory_) + next_ * bytes_;
    check(driver.wait_event(events_[next_]), "waiting for an earlier message to be sent");
    std::memcpy(part, data.data(), data.size());
    check(driver.copy(to, reinterpret_cast<CUdeviceptr>(part), data.size(), stream), "sending to the device");
    check(driver.record_event(events_[next_], stream), "sending to the device");
    next_ = (next_ + 1) % kParts;
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr int kParts = 8;
  size_t bytes_;
  void* memory_ = nullptr;
  int next_ = 0;
  CUevent_st* events_[kParts] = {};
};

}  // namespace headrace::cuda
