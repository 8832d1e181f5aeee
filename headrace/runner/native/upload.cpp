// Bytes of the host into an array of a CUDA device, in the order of MLX's stream.
//
// MLX keeps arrays that the host has made in memory that both share, and a kernel that reads one waits for it (see
// device_arrays.py). Here the bytes go through pinned memory by an asynchronous copy into an array that an operation
// of the device has made: send(to, bytes) is `to` with other contents. The array must be made for this one use.
//
// The copy is put on the stream behind all that MLX has recorded so far, which is launched for that.

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "mlx/array.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

struct CUevent_st;
constexpr unsigned kNoTiming = 2;  // of an event

struct Driver {
  int (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream_st*);
  int (*pinned)(void**, size_t, unsigned);
  int (*unpin)(void*);
  int (*make_event)(CUevent_st**, unsigned);
  int (*record_event)(CUevent_st*, CUstream_st*);
  int (*wait_event)(CUevent_st*);
  int (*destroy_event)(CUevent_st*);

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
    find(copy, "cuMemcpyAsync");
    find(pinned, "cuMemHostAlloc");
    find(unpin, "cuMemFreeHost");
    find(make_event, "cuEventCreate");
    find(record_event, "cuEventRecord");
    find(wait_event, "cuEventSynchronize");
    find(destroy_event, "cuEventDestroy_v2");
  }
};

void check(int result, const char* what) {
  if (result) throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(result));
}

// Pinned memory in parts; a part is written again when the copy out of it is over.
class Outbox {
 public:
  explicit Outbox(size_t bytes) : bytes_(bytes) {
    auto& driver = Driver::get();
    check(driver.pinned(&memory_, bytes * kParts, 0), "allocating pinned memory");
    for (auto& event : events_) check(driver.make_event(&event, kNoTiming), "making an event");
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

  void send(const std::vector<char>& data, mx::array& to, mx::Stream of) {
    auto& driver = Driver::get();
    auto& encoder = mx::cu::get_command_encoder(of);
    encoder.commit();
    CUstream_st* stream = encoder.stream();
    check(driver.wait_event(events_[next_]), "waiting for an earlier upload");
    char* part = static_cast<char*>(memory_) + next_ * bytes_;
    std::memcpy(part, data.data(), data.size());
    auto address = reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(to));
    check(driver.copy(address, reinterpret_cast<CUdeviceptr>(part), data.size(), stream), "uploading");
    check(driver.record_event(events_[next_], stream), "uploading");
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

class Upload : public mx::Primitive {
 public:
  Upload(std::shared_ptr<Outbox> outbox, std::vector<char> data)
      : mx::Primitive(mx::default_stream(mx::Device::gpu)), outbox_(std::move(outbox)), data_(std::move(data)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("uploads are for a GPU");
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].copy_shared_buffer(inputs[0]);
    outbox_->send(data_, outputs[0], stream());
  }
  const char* name() const override { return "Upload"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  std::shared_ptr<Outbox> outbox_;
  std::vector<char> data_;
};

mx::array send(std::shared_ptr<Outbox> outbox, const mx::array& to, nb::bytes data) {
  if (data.size() != to.nbytes() || data.size() > outbox->bytes()) {
    throw std::invalid_argument("the bytes are not as many as the array's, or more than the outbox holds");
  }
  auto* first = static_cast<const char*>(data.data());
  auto operation = std::make_shared<Upload>(std::move(outbox), std::vector<char>(first, first + data.size()));
  return mx::array(to.shape(), to.dtype(), std::move(operation), {to});
}

}  // namespace

NB_MODULE(headrace_upload, m) {
  nb::class_<Outbox>(m, "Outbox").def(nb::new_([](size_t bytes) { return std::make_shared<Outbox>(bytes); }));
  m.def("send", &send);
}
