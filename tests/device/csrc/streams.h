// Streams of the test device: a queue and a worker thread each. Work runs later than it was enqueued, with delays drawn
// from a seed, so that a missing wait gives wrong bits instead of passing by luck.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace lag {

constexpr int kMaxDevices = 4;
constexpr int kStreams = 12; // of each device; the first is its default stream

// Set by a stream when it gets there; waited for by other streams and by the host.
class Flag {
 public:
  void set(double seconds = 0);
  void wait();
  bool is_set();
  double seconds() const { return seconds_; } // when the stream got there, by its own clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  double seconds_ = 0;
};

using FlagPtr = std::shared_ptr<Flag>;

struct Delays {
  uint64_t seed = 0;
  double probability = 0; // that a task is delayed
  double max_seconds = 0;
  double bytes_per_second = 0; // of each link and direction; 0: as fast as memory
  double kernel_seconds = 0; // added to each kernel
};

// A link carries one copy at a time, whichever stream it is on.
enum class Link { kNone, kUp, kDown };

// Something that a stream does. With a duration it ends at a time that follows from when it was launched and when what is
// before it ended, not from when its thread got a core: however busy the machine is, the device is as fast as it is said
// to be. Without a duration it takes the time that it takes.
struct Task {
  std::function<void()> run;
  double seconds = 0;
  Link link = Link::kNone;
  bool is_mark = false; // takes no time
  double launched = 0;
};

class StreamQueue {
 public:
  StreamQueue(int device, int id);
  void push(std::function<void()> run, double seconds = 0, Link link = Link::kNone);
  FlagPtr mark(); // a flag that is set when everything pushed so far has run
  void wait_for(FlagPtr flag); // what is pushed later runs after the flag is set
  bool is_idle();
  void reseed();

 private:
  void push(Task task);
  void work();
  void schedule(const Task& task, double delay);
  int device_;
  int id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  double clock_ = 0; // when the last task ended, by the stream's own clock; used by its thread only
  bool busy_ = false;
  bool started_ = false;
  std::mt19937_64 random_;
};

StreamQueue& queue(int device, int64_t id);
StreamQueue& current_queue(int device);
int64_t current_id(int device);
int64_t exchange_current_id(int device, int64_t id);
int64_t next_pooled_id(int device);

int current_device();
void set_current_device(int device);
int device_count();

Delays delays();
void set_delays(const Delays& delays);

// Counts a wait of this thread for the device.
void count_wait(int device);
std::map<unsigned long, int64_t> waits_by_thread(); // by Python's number of a thread
void reset_waits_by_thread();

// Waits of the host for the device, and errors that tasks raised: the next wait of the host raises them.
void host_wait(const FlagPtr& flag);
void synchronize_device(int device);
void keep_error(const std::string& text);
std::string take_error();

struct Counters {
  std::atomic<int64_t> uploaded{0};
  std::atomic<int64_t> downloaded{0};
  std::atomic<int64_t> copied{0}; // inside of the device
  std::atomic<int64_t> sent{0}; // to other devices, by collectives and copies
  std::atomic<int64_t> from_files{0};
  std::atomic<int64_t> unpinned{0}; // asynchronous copies that had to be made synchronous
  std::atomic<int64_t> host_waits{0};
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> not_deferred{0}; // kernels that the host had to wait for
};
Counters& counters(int device);

} // namespace lag
