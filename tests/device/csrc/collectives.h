#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lag {
// A process group for tensors of the test device, over a gloo group of the same ranks.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);
} // namespace lag
