#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace lag {
// The seed of one random kernel, drawn when it is launched.
uint64_t draw_seed(const std::optional<at::Generator>& generator, int device);
void register_device();
} // namespace lag
