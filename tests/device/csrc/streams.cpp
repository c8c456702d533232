#include "streams.h"

#include <c10/util/Exception.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>

namespace lag {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::mutex settings_mutex;
Delays settings;
std::mutex waits_mutex;
std::map<unsigned long, int64_t> waits;
std::mutex error_mutex;
std::string first_error;

struct Registry {
  std::array<std::array<std::unique_ptr<StreamQueue>, kStreams>, kMaxDevices> queues;
  std::array<std::atomic<int64_t>, kMaxDevices> next_pooled{};
  std::array<Counters, kMaxDevices> counters;
  std::mutex links_mutex;
  std::array<std::array<double, 3>, kMaxDevices> link_free_at{}; // by device and `Link`
  Registry() {
    for (int device = 0; device < kMaxDevices; ++device) {
      for (int id = 0; id < kStreams; ++id) {
        queues[device][id] = std::make_unique<StreamQueue>(device, id);
      }
    }
  }
};

// Never destroyed: its threads may run until the process ends.
Registry& registry() {
  static Registry* made = new Registry();
  return *made;
}

thread_local int this_device = 0;
thread_local std::array<int64_t, kMaxDevices> current_ids{};

} // namespace

void Flag::set(double seconds) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    set_ = true;
    seconds_ = seconds;
  }
  changed_.notify_all();
}

void Flag::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Flag::is_set() {
  std::lock_guard<std::mutex> guard(mutex_);
  return set_;
}

StreamQueue::StreamQueue(int device, int id) : device_(device), id_(id) {
  reseed();
}

void StreamQueue::reseed() {
  std::lock_guard<std::mutex> guard(mutex_);
  random_.seed(delays().seed * 1000003 + device_ * 101 + id_);
}

void StreamQueue::push(std::function<void()> run, double seconds, Link link) {
  push(Task{std::move(run), seconds, link});
}

void StreamQueue::push(Task task) {
  task.launched = now();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    tasks_.push_back(std::move(task));
    if (!started_) {
      started_ = true;
      std::thread(&StreamQueue::work, this).detach();
    }
  }
  changed_.notify_all();
}

FlagPtr StreamQueue::mark() {
  auto flag = std::make_shared<Flag>();
  push(Task{[this, flag] { flag->set(clock_); }, 0, Link::kNone, true});
  return flag;
}

void StreamQueue::wait_for(FlagPtr flag) {
  if (!flag->is_set()) {
    auto wait = [this, flag] {
      flag->wait();
      clock_ = std::max(clock_, flag->seconds());
    };
    push(Task{wait, 0, Link::kNone, true});
  }
}

// Lets the time of a task pass.
void StreamQueue::schedule(const Task& task, double delay) {
  clock_ = std::max(clock_, task.launched);
  if (task.seconds > 0) {
    auto& all = registry();
    std::lock_guard<std::mutex> guard(all.links_mutex);
    auto& free_at = all.link_free_at.at(device_).at(static_cast<size_t>(task.link));
    if (task.link != Link::kNone) {
      clock_ = std::max(clock_, free_at);
    }
    clock_ += task.seconds;
    free_at = clock_;
  }
  clock_ += delay;
  auto left = clock_ - now();
  if (left > 0 && (task.seconds > 0 || delay > 0)) {
    std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }
}

bool StreamQueue::is_idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return tasks_.empty() && !busy_;
}

void StreamQueue::work() {
  omp_set_num_threads(1); // the bits of a reduction depend on the number of threads
  this_device = device_;
  while (true) {
    Task task;
    double delay = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      busy_ = true;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      auto chosen = delays();
      if (chosen.probability > 0 && std::uniform_real_distribution<>(0, 1)(random_) < chosen.probability) {
        delay = std::uniform_real_distribution<>(0, chosen.max_seconds)(random_);
      }
    }
    schedule(task, delay);
    try {
      task.run();
    } catch (const std::exception& error) {
      keep_error(error.what());
    }
    if (task.seconds == 0 && !task.is_mark) {
      clock_ = std::max(clock_, now());
    }
  }
}

StreamQueue& queue(int device, int64_t id) {
  TORCH_CHECK(device >= 0 && device < device_count() && id >= 0 && id < kStreams, "no such stream");
  return *registry().queues[device][id];
}

StreamQueue& current_queue(int device) {
  return queue(device, current_id(device));
}

int64_t current_id(int device) {
  return current_ids.at(device);
}

int64_t exchange_current_id(int device, int64_t id) {
  return std::exchange(current_ids.at(device), id);
}

int64_t next_pooled_id(int device) {
  return 1 + registry().next_pooled.at(device)++ % (kStreams - 1);
}

int current_device() {
  return this_device;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device index ", device, " of ", device_count());
  this_device = device;
}

int device_count() {
  return kMaxDevices;
}

Delays delays() {
  std::lock_guard<std::mutex> guard(settings_mutex);
  return settings;
}

void set_delays(const Delays& chosen) {
  {
    std::lock_guard<std::mutex> guard(settings_mutex);
    settings = chosen;
  }
  for (auto& queues : registry().queues) {
    for (auto& one : queues) {
      one->reseed();
    }
  }
}

void count_wait(int device) {
  ++counters(device).host_waits;
  std::lock_guard<std::mutex> guard(waits_mutex);
  ++waits[pthread_self()];
}

std::map<unsigned long, int64_t> waits_by_thread() {
  std::lock_guard<std::mutex> guard(waits_mutex);
  return waits;
}

void reset_waits_by_thread() {
  std::lock_guard<std::mutex> guard(waits_mutex);
  waits.clear();
}

void host_wait(const FlagPtr& flag) {
  flag->wait();
  auto error = take_error();
  TORCH_CHECK(error.empty(), "a kernel of the test device failed: ", error);
}

void synchronize_device(int device) {
  std::vector<FlagPtr> flags;
  for (int id = 0; id < kStreams; ++id) {
    if (!queue(device, id).is_idle()) {
      flags.push_back(queue(device, id).mark());
    }
  }
  for (auto& flag : flags) {
    host_wait(flag);
  }
  auto error = take_error();
  TORCH_CHECK(error.empty(), "a kernel of the test device failed: ", error);
}

void keep_error(const std::string& text) {
  std::lock_guard<std::mutex> guard(error_mutex);
  if (first_error.empty()) {
    first_error = text;
  }
}

std::string take_error() {
  std::lock_guard<std::mutex> guard(error_mutex);
  return std::exchange(first_error, "");
}

Counters& counters(int device) {
  return registry().counters.at(device);
}

} // namespace lag
