// Operators of the test device. Views and allocation happen at once. Everything else is a kernel: its outputs are sized
// when it is launched (by torch's meta kernels) and its values are computed later, on its stream, by the CPU's kernel
// over the same memory.
#include "memory.h"
#include "random.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

namespace lag {
namespace {

using at::Tensor;
using c10::IValue;

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// What a kernel needs of a device tensor. It does not keep the memory alive: that is the allocator's business.
struct View {
  void* start = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false;

  explicit View(const Tensor& tensor)
      : start(tensor.numel() == 0 ? nullptr : live(tensor.const_data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        conj(tensor.is_conj()),
        neg(tensor.is_neg()) {}

  Tensor on_cpu() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (start == nullptr) {
      return at::empty_strided(sizes, strides, options);
    }
    auto tensor = at::from_blob(start, sizes, strides, options);
    tensor._set_conj(conj);
    tensor._set_neg(neg);
    return tensor;
  }
};

Tensor snapshot(const Tensor& tensor) {
  auto copied = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copied.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copied;
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0)) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// Applies `each` to every tensor of an argument and returns the argument with the results.
template <typename Each>
IValue mapped(const IValue& value, Each each) {
  if (value.isTensor()) {
    return each(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const Tensor& tensor : value.toTensorVector()) {
      result.push_back(each(tensor));
    }
    return result;
  }
  if (value.isList() && value.toListRef().size() > 0) {
    auto list = value.toList();
    if (list.elementType()->kind() == c10::TypeKind::OptionalType) {
      auto inner = list.elementType()->cast<c10::OptionalType>()->getElementType();
      if (inner->kind() == c10::TypeKind::TensorType) {
        c10::List<std::optional<Tensor>> result;
        for (const IValue& item : value.toListRef()) {
          result.push_back(item.isNone() ? std::nullopt : std::optional<Tensor>(each(item.toTensor())));
        }
        return result;
      }
    }
  }
  return value;
}

// One argument, ready to be used on a stream.
struct Argument {
  IValue value; // with undefined tensors in the places of views
  std::vector<std::optional<View>> views;

  explicit Argument(const IValue& given) {
    value = mapped(given, [this](const Tensor& tensor) {
      if (is_ours(tensor)) {
        views.emplace_back(View(tensor));
        return Tensor();
      }
      views.emplace_back(std::nullopt);
      return tensor.defined() ? snapshot(tensor) : tensor;
    });
  }

  IValue on_cpu() const {
    size_t at = 0;
    return mapped(value, [&](const Tensor& tensor) {
      const auto& view = views[at++];
      return view.has_value() ? view->on_cpu() : tensor;
    });
  }
};

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> given;
  int device = 0;

  Call(const c10::OperatorHandle& handle, torch::jit::Stack* stack) : op(handle) {
    auto count = handle.schema().arguments().size();
    given.assign(stack->end() - static_cast<int64_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    device = find_device();
  }

  int find_device() const {
    // As on other devices: only indices and numbers may be on the CPU.
    auto takes_cpu = op.schema().name().find("index") != std::string::npos || op.schema().name() == "aten::histc";
    int found = -1;
    for (const auto& value : given) {
      mapped(value, [&](const Tensor& tensor) {
        TORCH_CHECK(
            takes_cpu || !tensor.defined() || is_ours(tensor) || tensor.dim() == 0 || tensor.numel() == 0,
            "expected all tensors to be on one device, but ", op.schema().name(), " got one on the CPU");
        if (is_ours(tensor)) {
          auto index = tensor.device().index();
          TORCH_CHECK(
              found == -1 || found == index || tensor.dim() == 0,
              "expected all tensors to be on one device, but ", op.schema().name(), " got lag:", found, " and lag:", index);
          found = found == -1 ? index : found;
        }
        return tensor;
      });
      if (found == -1 && value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
        found = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      }
    }
    return found == -1 ? current_device() : found;
  }

  bool returns_tensors_only() const {
    for (const auto& result : op.schema().returns()) {
      auto kind = result.type()->kind();
      auto list = result.type()->cast<c10::ListType>();
      if (kind != c10::TypeKind::TensorType &&
          !(list && list->getElementType()->kind() == c10::TypeKind::TensorType)) {
        return false;
      }
    }
    return true;
  }

  bool writes(size_t argument) const {
    const auto* alias = op.schema().arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }
};

using Outputs = std::vector<std::vector<View>>; // of each returned value

std::vector<IValue> run_on_cpu(const Call& call, std::vector<IValue> arguments) {
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack(std::move(arguments));
  call.op.callBoxed(stack);
  return stack;
}

IValue for_cpu(const IValue& value, uint64_t seed) {
  if (value.isDevice()) {
    return at::Device(at::kCPU);
  }
  if (value.isGenerator()) {
    return at::detail::createCPUGenerator(seed);
  }
  return value;
}

// Finds the argument that takes a generator, and draws the kernel's seed if there is one.
std::optional<size_t> generator_argument(const Call& call) {
  const auto& arguments = call.op.schema().arguments();
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto type = arguments[at].type();
    auto optional = type->cast<c10::OptionalType>();
    if ((optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType) {
      return at;
    }
  }
  return std::nullopt;
}

std::vector<IValue> cpu_arguments(const Call& call) {
  uint64_t seed = 0;
  std::vector<IValue> values = call.given;
  if (auto at = generator_argument(call)) {
    auto given = values[*at].isGenerator() ? std::optional(values[*at].toGenerator()) : std::nullopt;
    seed = draw_seed(given, call.device);
    values[*at] = at::detail::createCPUGenerator(seed);
  }
  for (auto& value : values) {
    if (value.isDevice()) {
      value = at::Device(at::kCPU);
    }
  }
  return values;
}

Tensor like(const Tensor& tensor, int device) {
  auto place = at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(place).pinned_memory(false));
}

std::mutex unsized_mutex;
std::unordered_set<std::string>& unsized() { // operators whose output sizes depend on values
  static auto* names = new std::unordered_set<std::string>();
  return *names;
}

std::string full_name(const Call& call) {
  return call.op.schema().name() + "." + call.op.schema().overload_name();
}

bool is_unsized(const Call& call) {
  std::lock_guard<std::mutex> guard(unsized_mutex);
  return unsized().count(full_name(call)) > 0;
}

std::optional<std::vector<IValue>> sized(const Call& call) {
  if (!call.returns_tensors_only() || is_unsized(call)) {
    return std::nullopt;
  }
  std::vector<IValue> arguments;
  for (const auto& value : call.given) {
    if (value.isDevice()) {
      arguments.emplace_back(at::Device(at::kMeta));
    } else if (value.isGenerator()) {
      arguments.emplace_back();
    } else {
      arguments.push_back(mapped(value, as_meta));
    }
  }
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    torch::jit::Stack stack(std::move(arguments));
    call.op.callBoxed(stack);
    return stack;
  } catch (const c10::NotImplementedError&) {
  } catch (const std::exception& error) {
    std::string text = error.what();
    if (text.find("NotImplementedError") == std::string::npos && text.find("DynamicOutput") == std::string::npos &&
        text.find("DataDependent") == std::string::npos) {
      throw;
    }
  }
  std::lock_guard<std::mutex> guard(unsized_mutex);
  unsized().insert(full_name(call));
  return std::nullopt;
}

void copy_into(const std::vector<IValue>& results, const Outputs& outputs) {
  at::AutoDispatchBelowADInplaceOrView guard;
  for (size_t at = 0; at < results.size(); ++at) {
    size_t inner = 0;
    mapped(results[at], [&](const Tensor& tensor) {
      if (inner < outputs[at].size() && tensor.defined()) {
        const auto& output = outputs[at][inner++];
        if (tensor.numel() > 0) { // some CPU kernels leave out what their meta kernels promise
          output.on_cpu().copy_(tensor);
        }
      }
      return tensor;
    });
  }
}

void enqueue(const Call& call, Outputs outputs) {
  auto arguments = std::make_shared<std::vector<Argument>>();
  for (const auto& value : cpu_arguments(call)) {
    arguments->emplace_back(value);
  }
  ++counters(call.device).kernels;
  auto op = call;
  op.given.clear();
  auto seconds = delays().kernel_seconds;
  current_queue(call.device).push([op, arguments, outputs = std::move(outputs)] {
    at::NoGradGuard no_grad;
    std::vector<IValue> values;
    for (const auto& argument : *arguments) {
      values.push_back(argument.on_cpu());
    }
    auto results = run_on_cpu(op, std::move(values));
    copy_into(results, outputs);
  }, seconds);
}

// Returns what an operator returns that writes into its arguments.
void push_written(const Call& call, torch::jit::Stack* stack) {
  const auto& schema = call.op.schema();
  for (const auto& result : schema.returns()) {
    for (size_t at = 0; at < call.given.size(); ++at) {
      const auto* alias = schema.arguments()[at].alias_info();
      if (alias != nullptr && result.alias_info() != nullptr && *alias == *result.alias_info()) {
        torch::jit::push(*stack, call.given[at]);
        break;
      }
    }
  }
}

void resize_outs(const Call& call, const std::vector<IValue>& sizes) {
  size_t result = 0;
  for (size_t at = 0; at < call.given.size(); ++at) {
    if (call.op.schema().arguments()[at].is_out() && call.given[at].isTensor() && result < sizes.size()) {
      auto out = call.given[at].toTensor();
      auto wanted = sizes[result++].toTensor();
      if (out.sizes() != wanted.sizes()) {
        out.resize_(wanted.sizes());
      }
    }
  }
}

void run_at_once(const Call& call, torch::jit::Stack* stack) {
  count_wait(call.device);
  ++counters(call.device).not_deferred;
  host_wait(current_queue(call.device).mark());
  std::vector<IValue> values;
  for (const auto& value : cpu_arguments(call)) {
    values.push_back(Argument(value).on_cpu());
  }
  for (auto& result : run_on_cpu(call, std::move(values))) {
    torch::jit::push(*stack, mapped(result, [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      auto made = like(tensor, call.device);
      if (tensor.numel() > 0) { // on the stream, behind what is still under way in the memory that `made` reuses
        current_queue(call.device).push([tensor, view = View(made)] {
          at::NoGradGuard no_grad;
          at::AutoDispatchBelowADInplaceOrView guard;
          view.on_cpu().copy_(tensor);
        });
      }
      return made;
    }));
  }
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard device(at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(call.device)));
  at::AutoDispatchBelowADInplaceOrView guard;
  bool written = false;
  bool has_outs = false;
  for (size_t at = 0; at < call.given.size(); ++at) {
    written = written || call.writes(at);
    has_outs = has_outs || op.schema().arguments()[at].is_out();
  }
  if (written) {
    if (has_outs) {
      if (auto sizes = sized(call)) {
        resize_outs(call, *sizes);
      }
    }
    enqueue(call, Outputs(op.schema().returns().size()));
    push_written(call, stack);
    return;
  }
  auto sizes = sized(call);
  if (!sizes.has_value()) {
    run_at_once(call, stack);
    return;
  }
  Outputs outputs;
  std::vector<IValue> returned;
  for (const auto& value : *sizes) {
    outputs.emplace_back();
    returned.push_back(mapped(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      auto made = tensor.device().is_cpu() ? tensor : like(tensor, call.device);
      if (is_ours(made)) {
        outputs.back().emplace_back(made);
      }
      return made;
    }));
  }
  enqueue(call, std::move(outputs));
  for (auto& value : returned) {
    torch::jit::push(*stack, std::move(value));
  }
}

// ------------------------------------------------------------------ allocation, views, copies

Tensor empty_memory_format(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "device memory cannot be pinned");
  auto place = device.value_or(at::Device(at::kPrivateUse1));
  c10::DeviceGuard guard(place);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  (void)layout;
  return at::detail::empty_generic(sizes, &device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "device memory cannot be pinned");
  auto place = device.value_or(at::Device(at::kPrivateUse1));
  c10::DeviceGuard guard(place);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  (void)layout;
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  at::native::resize_impl_cpu_(impl, sizes, std::nullopt, /*resize_storage=*/false);
  auto needed = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  if (format.has_value()) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_source_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_source_storage_offset(self, std::move(source), 0, {count}, {});
}

size_t spanned_bytes(const Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
}

// A copy between the host and a device, on the device's current stream.
void copy_over_link(const Tensor& source, const Tensor& target, bool is_upload, bool non_blocking) {
  const auto& there = is_upload ? target : source;
  const auto& here = is_upload ? source : target;
  auto device = there.device().index();
  auto& counted = counters(device);
  auto num_bytes = static_cast<int64_t>(there.numel() * there.element_size());
  (is_upload ? counted.uploaded : counted.downloaded) += num_bytes;
  auto pinned = is_range_pinned(here.const_data_ptr(), spanned_bytes(here));
  if (non_blocking && !pinned) {
    ++counted.unpinned;
  }
  auto later = non_blocking && pinned;
  View far(there);
  auto rate = delays().bytes_per_second;
  auto seconds = rate > 0 ? static_cast<double>(num_bytes) / rate : 0.0;
  // `near` does not keep the host's memory alive, as a real copy engine does not.
  auto near = std::make_shared<Tensor>(at::from_blob(
      const_cast<void*>(here.const_data_ptr()), here.sizes(), here.strides(), here.options().pinned_memory(false)));
  near->_set_conj(here.is_conj());
  near->_set_neg(here.is_neg());
  if (later && !is_upload && here.is_non_overlapping_and_dense()) {
    std::memset(near->mutable_data_ptr(), 0xff, static_cast<size_t>(num_bytes / there.element_size() * here.element_size()));
  }
  current_queue(device).push([near, far, is_upload] {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView guard;
    if (is_upload) {
      far.on_cpu().copy_(*near);
    } else {
      near->copy_(far.on_cpu());
    }
  }, seconds, is_upload ? Link::kUp : Link::kDown);
  if (later) {
    use_pinned(here.const_data_ptr(), device, current_id(device));
  } else {
    count_wait(device);
    host_wait(current_queue(device).mark());
  }
}

void copy_between_devices(const Tensor& source, const Tensor& target) {
  auto from = source.device().index();
  auto to = target.device().index();
  View read(source);
  View written(target);
  auto num_bytes = static_cast<int64_t>(source.numel() * source.element_size());
  if (from == to) {
    counters(from).copied += num_bytes;
  } else {
    counters(from).sent += num_bytes;
    current_queue(from).wait_for(current_queue(to).mark());
  }
  current_queue(from).push([read, written] {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView guard;
    written.on_cpu().copy_(read.on_cpu());
  });
  if (from != to) {
    current_queue(to).wait_for(current_queue(from).mark());
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  auto expanded = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (is_ours(source) && is_ours(target)) {
    copy_between_devices(expanded, target);
  } else {
    copy_over_link(expanded, target, is_ours(target), non_blocking);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto device = self.device().index();
  count_wait(device);
  host_wait(current_queue(device).mark());
  return View(self).on_cpu().item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// The CPU's kernel has no generator argument, so it is made of those that have.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || probability == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - probability);
  auto scale = probability == 1 ? 0.0 : 1.0 / (1.0 - probability);
  return {input.mul(mask).mul(scale), mask};
}

// The CPU has no histogram of integers, which transformers uses on every other device.
void histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& self = (*stack)[stack->size() - 4];
  auto dtype = self.toTensor().scalar_type();
  self = self.toTensor().to(at::kFloat);
  kernel(op, stack);
  torch::jit::push(*stack, torch::jit::pop(*stack).toTensor().to(dtype));
}

// The CPU's mean and rstd have the type of the weight, those of the meta kernel are float32: cast them back, exactly.
void layer_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto at = stack->size() - 8;
  const auto& weight = (*stack)[at + 5];
  auto dtype = (weight.isTensor() && weight.toTensor().defined() ? weight : (*stack)[at + 1]).toTensor().scalar_type();
  for (auto statistic : {at + 3, at + 4}) {
    (*stack)[statistic] = (*stack)[statistic].toTensor().to(dtype);
  }
  kernel(op, stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  kernel(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto gradient = (*stack)[stack->size() - 10].toTensor();
  auto needs_bias = stack->back().toBoolList()[2];
  IValue bias_sizes = needs_bias ? IValue(std::vector<int64_t>{gradient.size(1)}) : IValue();
  stack->insert(stack->end() - 7, bias_sizes);
  kernel(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_source_storage_offset));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// A copy reads and writes conjugated and negated views as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace
} // namespace lag
