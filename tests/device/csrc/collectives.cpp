// Collectives between test devices: they run on a stream of their own, and move bytes through a gloo group that is given.
// Sums are made in rank order, so that the same values give the same bits whatever the sizes of buffers are.
#include "collectives.h"

#include "memory.h"
#include "streams.h"

#include <ATen/ATen.h>

namespace lag {
namespace {

using at::Tensor;
using c10d::Work;

class LagWork final : public Work {
 public:
  LagWork(int device, FlagPtr flag, std::shared_ptr<std::string> error, std::vector<Tensor> results)
      : device_(device), flag_(std::move(flag)), error_(std::move(error)), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  bool isCompleted() override {
    return flag_->is_set();
  }
  bool isSuccess() const override {
    return error_->empty();
  }
  // As with NCCL the stream waits, not the host.
  bool wait(std::chrono::milliseconds) override {
    current_queue(device_).wait_for(flag_);
    return true;
  }
  void synchronize() override {
    wait(std::chrono::milliseconds(0));
  }
  std::vector<Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    future_->markCompleted(results_);
    return future_;
  }

 private:
  int device_;
  FlagPtr flag_;
  std::shared_ptr<std::string> error_;
  std::vector<Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensor on_cpu(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "collectives of the test device need contiguous tensors");
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty(tensor.sizes(), options);
  }
  return at::from_blob(live(tensor.const_data_ptr()), tensor.sizes(), options);
}

void reduce_into(const Tensor& target, const std::vector<Tensor>& parts, const c10d::ReduceOp& op) {
  auto sum = parts[0].clone();
  for (size_t at = 1; at < parts.size(); ++at) {
    switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        sum.add_(parts[at]);
        break;
      case c10d::ReduceOp::MAX:
        sum.copy_(at::maximum(sum, parts[at]));
        break;
      case c10d::ReduceOp::MIN:
        sum.copy_(at::minimum(sum, parts[at]));
        break;
      default:
        TORCH_CHECK(false, "the test device does not know this reduction");
    }
  }
  if (op == c10d::ReduceOp::AVG) {
    sum.div_(static_cast<int64_t>(parts.size()));
  }
  target.copy_(sum.view(target.sizes()));
}

class LagBackend final : public c10d::Backend {
 public:
  LagBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "lag";
  }

  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto tensor = on_cpu(tensors.at(0));
    auto sent = options.rootRank == rank_ ? tensor.nbytes() * (size_ - 1) : 0;
    return run(tensors.at(0), sent, tensors, [this, tensor, options] {
      std::vector<Tensor> one{tensor};
      gloo_->broadcast(one, options)->wait();
    });
  }

  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto tensor = on_cpu(tensors.at(0));
    auto op = options.reduceOp;
    auto sent = tensor.nbytes() * 2 * (size_ - 1) / size_; // what a ring would send
    return run(tensors.at(0), sent, tensors, [this, tensor, op] {
      reduce_into(tensor, gathered(tensor), op);
    });
  }

  c10::intrusive_ptr<Work> allgather(
      std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions&) override {
    auto input = on_cpu(inputs.at(0));
    std::vector<Tensor> targets;
    for (const auto& output : outputs.at(0)) {
      targets.push_back(on_cpu(output));
    }
    return run(inputs.at(0), input.nbytes() * (size_ - 1), outputs.at(0), [this, input, targets] {
      auto all = gathered(input);
      for (size_t at = 0; at < all.size(); ++at) {
        targets[at].copy_(all[at].view(targets[at].sizes()));
      }
    });
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    auto from = on_cpu(input);
    auto into = on_cpu(output);
    return run(input, from.nbytes() * (size_ - 1), {output}, [this, from, into] {
      auto all = gathered(from);
      into.view({size_, -1}).copy_(at::stack(all).view({size_, -1}));
    });
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto from = on_cpu(input);
    auto into = on_cpu(output);
    auto op = options.reduceOp;
    return run(input, from.nbytes() / size_ * (size_ - 1), {output}, [this, from, into, op] {
      auto parts = from.view({size_, -1}).unbind(0);
      reduce_into(into, exchanged(parts, from), op);
    });
  }

  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& into_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto from = on_cpu(input);
    auto into = on_cpu(output);
    return run(input, from.nbytes() / size_ * (size_ - 1), {output}, [=, this] {
      auto target = into;
      auto source = from;
      auto into_split = into_sizes;
      auto from_split = from_sizes;
      gloo_->alltoall_base(target, source, into_split, from_split, options)->wait();
    });
  }

  c10::intrusive_ptr<Work> alltoall(
      std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllToAllOptions&) override {
    std::vector<Tensor> from, into;
    size_t sent = 0;
    for (int64_t at = 0; at < size_; ++at) {
      from.push_back(on_cpu(inputs.at(at)));
      into.push_back(on_cpu(outputs.at(at)));
      sent += at == rank_ ? 0 : from.back().nbytes();
    }
    return run(inputs.at(0), sent, outputs, [this, from, into] {
      exchange(from, into);
    });
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

  void abort() override {
    gloo_->abort();
  }

 private:
  template <typename Exchange>
  c10::intrusive_ptr<Work> run(const Tensor& first, size_t sent, std::vector<Tensor> results, Exchange exchange) {
    auto device = first.device().index();
    counters(device).sent += static_cast<int64_t>(sent);
    auto& stream = queue(device, kStreams - 1); // all collectives of a device are in one order
    stream.wait_for(current_queue(device).mark());
    auto error = std::make_shared<std::string>();
    stream.push([exchange, error] {
      at::NoGradGuard no_grad;
      try {
        exchange();
      } catch (const std::exception& caught) {
        *error = caught.what();
        keep_error(caught.what());
      }
    });
    return c10::make_intrusive<LagWork>(device, stream.mark(), error, std::move(results));
  }

  std::vector<Tensor> gathered(const Tensor& tensor) {
    std::vector<Tensor> all;
    for (int64_t at = 0; at < size_; ++at) {
      all.push_back(at::empty_like(tensor));
    }
    std::vector<std::vector<Tensor>> outputs{all};
    std::vector<Tensor> inputs{tensor};
    gloo_->allgather(outputs, inputs)->wait();
    return all;
  }

  std::vector<Tensor> exchanged(const std::vector<Tensor>& parts, const Tensor& whole) {
    std::vector<Tensor> received;
    for (int64_t at = 0; at < size_; ++at) {
      received.push_back(at::empty(parts[rank_].sizes(), whole.options()));
    }
    exchange(parts, received);
    return received;
  }

  void exchange(const std::vector<Tensor>& from, const std::vector<Tensor>& into) {
    std::vector<c10::intrusive_ptr<Work>> works;
    for (int64_t at = 0; at < size_; ++at) {
      if (at == rank_) {
        into[at].copy_(from[at].view(into[at].sizes()));
        continue;
      }
      std::vector<Tensor> sent{from[at]};
      std::vector<Tensor> received{into[at]};
      if (from[at].numel() > 0) {
        works.push_back(gloo_->send(sent, static_cast<int>(at), 0));
      }
      if (into[at].numel() > 0) {
        works.push_back(gloo_->recv(received, static_cast<int>(at), 0));
      }
    }
    for (auto& work : works) {
      work->wait();
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
  return c10::make_intrusive<LagBackend>(std::move(gloo), rank, size);
}

} // namespace lag
