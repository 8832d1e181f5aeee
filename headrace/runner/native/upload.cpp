// Bytes of the host into an array of a CUDA device, in the order of MLX's stream.
//
// MLX keeps arrays that the host has made in memory that both share, and a kernel that reads one waits for it (see
// device_arrays.py). Here the bytes go through pinned memory by an asynchronous copy into an array that an operation
// of the device has made: send(to, bytes) is `to` with other contents. The array must be made for this one use.
//
// The copy is put on the stream behind all that MLX has recorded so far, which is launched for that.

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

#include "cuda_driver.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

using headrace::cuda::Outbox;

class Upload : public mx::Primitive {
 public:
  Upload(std::shared_ptr<Outbox> outbox, std::vector<char> data)
      : mx::Primitive(mx::default_stream(mx::Device::gpu)), outbox_(std::move(outbox)), data_(std::move(data)) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("uploads are for a GPU");
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].copy_shared_buffer(inputs[0]);
    auto& encoder = mx::cu::get_command_encoder(stream());
    encoder.commit();
    outbox_->send(data_, headrace::cuda::address(outputs[0]), encoder.stream());
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
