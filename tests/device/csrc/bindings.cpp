#include "collectives.h"
#include "memory.h"
#include "random.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

namespace py = pybind11;

namespace {

py::dict counts(int device) {
  auto& counted = lag::counters(device);
  py::dict result;
  result["uploaded"] = counted.uploaded.load();
  result["downloaded"] = counted.downloaded.load();
  result["copied"] = counted.copied.load();
  result["sent"] = counted.sent.load();
  result["from_files"] = counted.from_files.load();
  result["unpinned"] = counted.unpinned.load();
  result["host_waits"] = counted.host_waits.load();
  result["kernels"] = counted.kernels.load();
  result["not_deferred"] = counted.not_deferred.load();
  return result;
}

void reset_counts(int device) {
  lag::reset_waits_by_thread();
  auto& counted = lag::counters(device);
  for (auto* one : {&counted.uploaded, &counted.downloaded, &counted.copied, &counted.sent, &counted.from_files,
                    &counted.unpinned, &counted.host_waits, &counted.kernels, &counted.not_deferred}) {
    one->store(0);
  }
}

void set_delays(uint64_t seed, double probability, double max_seconds, double bytes_per_second, double kernel_seconds) {
  lag::set_delays({seed, probability, max_seconds, bytes_per_second, kernel_seconds});
}

// Reads a file into device memory without the host's, at once: as with GPUDirect Storage, no stream waits for it, and it
// waits for none.
void read_file(const at::Storage& target, int file, int64_t offset) {
  auto device = target.device().index();
  auto* into = static_cast<char*>(lag::live(target.data()));
  auto num_bytes = static_cast<int64_t>(target.nbytes());
  for (int64_t done = 0; done < num_bytes;) {
    auto got = pread(file, into + done, num_bytes - done, offset + done);
    TORCH_CHECK(got > 0, "reading a file into device memory failed");
    done += got;
  }
  lag::counters(device).from_files += num_bytes;
}

void write_file(const at::Storage& source, int file, int64_t offset) {
  auto* from = static_cast<char*>(lag::live(source.data()));
  auto wrote = pwrite(file, from, source.nbytes(), offset);
  TORCH_CHECK(wrote == static_cast<int64_t>(source.nbytes()), "writing device memory to a file failed");
}

// What is pushed to a stream runs after its gate is opened.
struct Gate {
  lag::FlagPtr flag = std::make_shared<lag::Flag>();
};

std::shared_ptr<Gate> close_gate(int device, int64_t stream) {
  auto gate = std::make_shared<Gate>();
  lag::queue(device, stream).wait_for(gate->flag);
  return gate;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  lag::register_device();
  m.def("counts", &counts);
  m.def("reset_counts", &reset_counts);
  m.def("set_delays", &set_delays, py::arg("seed") = 0, py::arg("probability") = 0.0, py::arg("max_seconds") = 0.0,
        py::arg("bytes_per_second") = 0.0, py::arg("kernel_seconds") = 0.0);
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate").def("open", [](Gate& gate) { gate.flag->set(); });
  m.def("close_gate", &close_gate, py::arg("device"), py::arg("stream"));
  m.def("host_waits_by_thread", &lag::waits_by_thread);
  m.def("set_limit", &lag::set_limit);
  m.def("host_register", [](uintptr_t address, size_t size) { lag::mark_pinned(reinterpret_cast<void*>(address), size); });
  m.def("host_unregister", [](uintptr_t address) { lag::unmark_pinned(reinterpret_cast<void*>(address)); });
  m.def("read_file", &read_file, py::call_guard<py::gil_scoped_release>());
  m.def("write_file", &write_file, py::call_guard<py::gil_scoped_release>());
  m.def("device_count", &lag::device_count);
  m.def("default_generator", [](int device) {
    return at::globalContext().getAcceleratorHooksInterface(at::kPrivateUse1).getDefaultGenerator(
        static_cast<c10::DeviceIndex>(device));
  });
  m.def("make_backend", &lag::make_backend, py::call_guard<py::gil_scoped_release>());
}
