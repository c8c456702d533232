// The test device as torch sees it: device guard, streams, events, generator, hooks.
#include "memory.h"
#include "random.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace lag {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device place(int index) {
  return {DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)};
}

int index_of(Device device) {
  return device.has_index() ? device.index() : current_device();
}

struct EventState {
  FlagPtr flag;
};

struct LagGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::PrivateUse1;
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return place(current_device());
  }
  void setDevice(Device device) const override {
    set_current_device(index_of(device));
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    set_current_device(index_of(device));
  }
  Stream getStream(Device device) const override {
    auto index = index_of(device);
    return Stream(Stream::UNSAFE, place(index), current_id(index));
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, place(index_of(device)), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    auto index = index_of(device);
    return Stream(Stream::UNSAFE, place(index), next_pooled_id(index));
  }
  Stream exchangeStream(Stream stream) const override {
    auto index = stream.device_index();
    return Stream(Stream::UNSAFE, place(index), exchange_current_id(index, stream.id()));
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new EventState();
    }
    static_cast<EventState*>(*event)->flag = queue(stream.device_index(), stream.id()).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      queue(stream.device_index(), stream.id()).wait_for(static_cast<EventState*>(event)->flag);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<EventState*>(event)->flag->is_set();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      count_wait(current_device());
      host_wait(static_cast<EventState*>(event)->flag);
    }
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto seconds = static_cast<EventState*>(second)->flag->seconds() - static_cast<EventState*>(first)->flag->seconds();
    return seconds * 1e3;
  }
  bool queryStream(const Stream& stream) const override {
    return queue(stream.device_index(), stream.id()).is_idle();
  }
  void synchronizeStream(const Stream& stream) const override {
    count_wait(stream.device_index());
    host_wait(queue(stream.device_index(), stream.id()).mark());
  }
  void synchronizeDevice(DeviceIndex device) const override {
    count_wait(device);
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
};

// A generator is a seed and a number of draws: each random kernel draws the seed of a CPU generator of its own when it
// is launched, so that its values do not depend on when it runs.
struct LagGenerator final : public c10::GeneratorImpl {
  explicit LagGenerator(DeviceIndex device)
      : c10::GeneratorImpl(place(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    draws_ = 0;
  }
  void set_offset(uint64_t offset) override {
    draws_ = offset;
  }
  uint64_t get_offset() const override {
    return draws_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "not a random state of the test device");
    auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    draws_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte));
    auto* values = static_cast<uint64_t*>(state.data_ptr());
    values[0] = seed_;
    values[1] = draws_;
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    std::lock_guard<std::mutex> guard(mutex_);
    auto mixed = seed_ + 0x9e3779b97f4a7c15ull * ++draws_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 31);
  }

 private:
  LagGenerator* clone_impl() const override {
    auto* copied = new LagGenerator(device_.index());
    copied->seed_ = seed_;
    copied->draws_ = draws_;
    return copied;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t draws_ = 0;
};

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < kMaxDevices; ++index) {
      made->push_back(at::make_generator<LagGenerator>(static_cast<DeviceIndex>(index)));
    }
    return made;
  }();
  return generators->at(device);
}

struct LagHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(device_count());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    set_current_device(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &host_allocator();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<LagGenerator>(device < 0 ? static_cast<DeviceIndex>(current_device()) : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto index = storage.device().index();
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator().allocate(num_bytes);
    auto keep = std::min(num_bytes, impl->nbytes());
    if (keep > 0) {
      auto* into = live(fresh.get());
      auto* from = live(impl->data());
      current_queue(index).push([into, from, keep] { std::memcpy(into, from, keep); });
    }
    impl->set_data_ptr(std::move(fresh));
    impl->set_nbytes(num_bytes);
  }
};

} // namespace

uint64_t draw_seed(const std::optional<at::Generator>& generator, int device) {
  auto used = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  auto* own = dynamic_cast<LagGenerator*>(used.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "expected a generator of the test device");
  return own->draw();
}

void register_device() {
  at::RegisterPrivateUse1HooksInterface(new LagHooks());
  c10::impl::registerDeviceGuard(DeviceType::PrivateUse1, new LagGuard());
  c10::SetAllocator(DeviceType::PrivateUse1, &device_allocator());
  at::setHostAllocator(DeviceType::PrivateUse1, &host_allocator());
}

} // namespace lag
