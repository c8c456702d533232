// Memory of the test device. Each device is one memory file that is mapped twice: tensors hold addresses of a mapping
// that nobody may touch (the host gets SIGSEGV), kernels use the other one. Freed memory is poisoned on its stream and
// reused at once, as far as `record_stream` allows.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace lag {

// The address that kernels use for a device address.
void* live(const void* address);
bool is_device_address(const void* address);

void set_limit(int device, size_t num_bytes); // what allocations may take together; more is out of memory
void mark_pinned(const void* address, size_t num_bytes);
void unmark_pinned(const void* address);
bool is_pinned(const void* address);
bool is_range_pinned(const void* address, size_t num_bytes);
// The pinned memory is used on this stream: if it is freed, it is reused only after that.
void use_pinned(const void* address, int device, int64_t stream);

c10::DeviceAllocator& device_allocator();
at::HostAllocator& host_allocator();

} // namespace lag
