#include "memory.h"

#include "streams.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <vector>

namespace lag {
namespace {

constexpr size_t kCapacity = size_t{64} << 30; // of addresses, not of memory
constexpr size_t kGrain = 512;
constexpr size_t kPage = 4096;
constexpr int kPoison = 0xff; // NaN in every float type, -1 in every signed integer

struct Piece {
  size_t offset = 0;
  size_t size = 0;
  int device = 0;
  int64_t stream = 0; // it was allocated on
  std::set<int64_t> others; // streams it was recorded on
  std::vector<FlagPtr> pending; // it may be reused after these
};

void poison(const Piece& piece);

class Arena {
 public:
  explicit Arena(int device) : device_(device) {
    int file = memfd_create("lag-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kCapacity) == 0, "cannot make the memory of the test device");
    guarded = static_cast<char*>(mmap(nullptr, kCapacity, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    usable = static_cast<char*>(mmap(nullptr, kCapacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(guarded != MAP_FAILED && usable != MAP_FAILED, "cannot map the memory of the test device");
    close(file);
    extents_[0] = kCapacity;
  }

  Piece* take(size_t num_bytes) {
    auto size = std::max(kGrain, (num_bytes + kGrain - 1) / kGrain * kGrain);
    auto stream = current_id(device_);
    std::unique_lock<std::mutex> lock(mutex_);
    reuse_finished();
    auto* piece = take_cached(size, stream);
    if (piece == nullptr && reserved_ + size > limit_) {
      ++retries_;
      lock.unlock();
      release_cached();
      lock.lock();
    }
    if (piece == nullptr) {
      failures_ += reserved_ + size > limit_;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          reserved_ + size <= limit_,
          "lag out of memory: device ", device_, " has ", limit_, " bytes, ", reserved_, " are in use, tried to allocate ", size);
      piece = carve(size, stream);
      poison(*piece);
    }
    allocated_ += piece->size;
    peak_ = std::max(peak_, allocated_);
    return piece;
  }

  void give(Piece* piece) {
    std::lock_guard<std::mutex> guard(mutex_);
    allocated_ -= piece->size;
    for (auto stream : piece->others) {
      piece->pending.push_back(queue(device_, stream).mark());
    }
    piece->others.clear();
    if (piece->pending.empty()) {
      poison(*piece);
      cached_.push_front(piece);
    } else {
      waiting_.push_back(piece);
    }
  }

  void release_cached() {
    synchronize_device(device_);
    std::lock_guard<std::mutex> guard(mutex_);
    reuse_finished();
    for (auto* piece : cached_) {
      auto flag = queue(device_, piece->stream).mark(); // its poison has to be written first
      flag->wait();
      auto first = (piece->offset + kPage - 1) / kPage * kPage;
      auto end = (piece->offset + piece->size) / kPage * kPage;
      if (first < end) { // a page that other pieces lie in stays
        madvise(usable + first, end - first, MADV_REMOVE);
      }
      reserved_ -= piece->size;
      join(piece->offset, piece->size);
      delete piece;
    }
    cached_.clear();
  }

  void record(Piece* piece, int64_t stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stream != piece->stream) {
      piece->others.insert(stream);
    }
  }

  void set_limit(size_t num_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = num_bytes;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_ = allocated_;
  }

  c10::CachingDeviceAllocator::DeviceStats stats() {
    std::lock_guard<std::mutex> guard(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(allocated_);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(peak_);
    stats.reserved_bytes[0].current = static_cast<int64_t>(reserved_);
    stats.num_alloc_retries = retries_;
    stats.num_ooms = failures_;
    return stats;
  }

  std::pair<size_t, size_t> memory_info() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {limit_ - reserved_, limit_};
  }

  char* guarded;
  char* usable;

 private:
  void reuse_finished() {
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      auto* piece = *at;
      auto done = std::all_of(piece->pending.begin(), piece->pending.end(), [](auto& flag) { return flag->is_set(); });
      if (!done) {
        ++at;
        continue;
      }
      piece->pending.clear();
      poison(*piece);
      cached_.push_front(piece);
      at = waiting_.erase(at);
    }
  }

  Piece* take_cached(size_t size, int64_t stream) {
    for (auto at = cached_.begin(); at != cached_.end(); ++at) {
      if ((*at)->size == size && (*at)->stream == stream) {
        auto* piece = *at;
        cached_.erase(at);
        return piece;
      }
    }
    return nullptr;
  }

  Piece* carve(size_t size, int64_t stream) {
    for (auto& [offset, length] : extents_) {
      if (length >= size) {
        auto* piece = new Piece{offset, size, device_, stream, {}, {}};
        auto rest = length - size;
        extents_.erase(offset);
        if (rest > 0) {
          extents_[piece->offset + size] = rest;
        }
        reserved_ += size;
        return piece;
      }
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "lag out of addresses");
  }

  void join(size_t offset, size_t size) {
    auto [at, _] = extents_.emplace(offset, size);
    if (auto next = std::next(at); next != extents_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      extents_.erase(next);
    }
    if (at != extents_.begin()) {
      auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        extents_.erase(at);
      }
    }
  }

  int device_;
  std::mutex mutex_;
  std::map<size_t, size_t> extents_; // never used, or given back
  std::list<Piece*> cached_; // the last freed first: it is reused first
  std::list<Piece*> waiting_; // freed, but other streams still use it
  size_t limit_ = size_t{4} << 30;
  size_t reserved_ = 0;
  size_t allocated_ = 0;
  size_t peak_ = 0;
  int64_t retries_ = 0; // allocations for which the cache was given up
  int64_t failures_ = 0; // out of memory
};

Arena& arena(int device) {
  static auto* arenas = new std::array<std::unique_ptr<Arena>, kMaxDevices>();
  static std::once_flag once;
  std::call_once(once, [] {
    for (int each = 0; each < kMaxDevices; ++each) {
      (*arenas)[each] = std::make_unique<Arena>(each);
    }
  });
  return *arenas->at(device);
}

void poison(const Piece& piece) {
  auto* start = arena(piece.device).usable + piece.offset;
  auto size = piece.size;
  queue(piece.device, piece.stream).push([start, size] { std::memset(start, kPoison, size); });
}

int device_of(const void* address) {
  for (int device = 0; device < kMaxDevices; ++device) {
    auto offset = static_cast<const char*>(address) - arena(device).guarded;
    if (offset >= 0 && static_cast<size_t>(offset) < kCapacity) {
      return device;
    }
  }
  return -1;
}

void free_device(void* context) {
  auto* piece = static_cast<Piece*>(context);
  arena(piece->device).give(piece);
}

class LagDeviceAllocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t num_bytes) override {
    auto device = current_device();
    c10::Device place(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (num_bytes == 0) {
      return {nullptr, nullptr, &free_nothing, place};
    }
    auto* piece = arena(device).take(num_bytes);
    return {arena(device).guarded + piece->offset, piece, &free_device, place};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return nullptr; // addresses alone do not say which piece they are
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "copy_data is not for the test device");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kMaxDevices; ++device) {
      arena(device).release_cached();
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* piece = static_cast<Piece*>(pointer.get_context());
    if (piece != nullptr) {
      arena(piece->device).record(piece, stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return arena(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    arena(device).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return arena(device).memory_info();
  }

 private:
  static void free_nothing(void*) {}
};

// ------------------------------------------------------------------ pinned host memory

struct PinnedBlock {
  size_t size;
  std::vector<FlagPtr> pending;
};

std::mutex pinned_mutex;

std::map<const char*, size_t>& registered() {
  static auto* ranges = new std::map<const char*, size_t>();
  return *ranges;
}

std::map<char*, PinnedBlock>& pinned_blocks() {
  static auto* blocks = new std::map<char*, PinnedBlock>();
  return *blocks;
}

size_t pinned_bytes = 0;

void free_pinned(void* context) {
  auto* start = static_cast<char*>(context);
  std::vector<FlagPtr> pending;
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    auto at = pinned_blocks().find(start);
    pending = at->second.pending;
    pinned_bytes -= at->second.size;
    pinned_blocks().erase(at);
    registered().erase(start);
  }
  // As torch's allocators of pinned memory do, it is given back only after the copies that were started with it.
  std::thread([start, pending] {
    for (auto& flag : pending) {
      flag->wait();
    }
    std::free(start);
  }).detach();
}

class LagHostAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) {
      return {nullptr, nullptr, [](void*) {}, at::Device(at::kCPU)};
    }
    auto size = (num_bytes + 4095) / 4096 * 4096;
    auto* start = static_cast<char*>(std::aligned_alloc(4096, size));
    TORCH_CHECK_WITH(OutOfMemoryError, start != nullptr, "no memory to pin");
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned_blocks()[start] = {size, {}};
    registered()[start] = size;
    pinned_bytes += size;
    return {start, start, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* into, const void* from, std::size_t count) const override {
    std::memcpy(into, from, count);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    use_pinned(pointer, stream.device_index(), stream.id());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    at::HostStats stats;
    stats.allocated_bytes.current = static_cast<int64_t>(pinned_bytes);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

} // namespace

void* live(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  auto device = device_of(address);
  TORCH_CHECK(device >= 0, "not an address of the test device");
  return arena(device).usable + (static_cast<const char*>(address) - arena(device).guarded);
}

bool is_device_address(const void* address) {
  return device_of(address) >= 0;
}

void set_limit(int device, size_t num_bytes) {
  arena(device).set_limit(num_bytes);
}

void mark_pinned(const void* address, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  registered()[static_cast<const char*>(address)] = num_bytes;
}

void unmark_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  TORCH_CHECK(registered().erase(static_cast<const char*>(address)) == 1, "this host memory was not registered");
}

bool is_range_pinned(const void* address, size_t num_bytes) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto* at = static_cast<const char*>(address);
  auto* end = at + num_bytes;
  while (at < end) { // registrations may be neighbours
    auto after = registered().upper_bound(at);
    if (after == registered().begin()) {
      return false;
    }
    auto found = std::prev(after);
    if (found->first + found->second <= at) {
      return false;
    }
    at = found->first + found->second;
  }
  return true;
}

bool is_pinned(const void* address) {
  return is_range_pinned(address, 1);
}

void use_pinned(const void* address, int device, int64_t stream) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto* at = const_cast<char*>(static_cast<const char*>(address));
  auto after = pinned_blocks().upper_bound(at);
  if (after == pinned_blocks().begin()) {
    return;
  }
  auto found = std::prev(after);
  if (at < found->first + found->second.size) {
    auto& pending = found->second.pending;
    pending.erase(
        std::remove_if(pending.begin(), pending.end(), [](auto& flag) { return flag->is_set(); }), pending.end());
    pending.push_back(queue(device, stream).mark());
  }
}

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new LagDeviceAllocator();
  return *allocator;
}

at::HostAllocator& host_allocator() {
  static auto* allocator = new LagHostAllocator();
  return *allocator;
}

} // namespace lag
