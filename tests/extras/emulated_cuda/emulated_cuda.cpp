// The device type "cuda" and the backend "nccl" for a CPU build of torch, on a machine without a GPU.
//
// The memory of the device is host memory, and each operation runs its CPU kernel on an alias of this memory. So
// results are those of a CPU, but tensors have the device that they would have, operations on tensors of different
// devices fail, and operations for which the host would wait can be counted. Streams and events do nothing.
//
// This library must be loaded before torch is imported. sitecustomize.py does this.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::intrusive_ptr;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;
using std::vector;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr DeviceIndex GPUS = 8;
DeviceIndex selected = 0;  // by torch.cuda.set_device
thread_local DeviceIndex current = selected;

// ----------------------------------------------------------------------------------------- device

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return GPUS; }
  Device getDevice() const override { return {CUDA, current}; }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    uncheckedSetDevice(device);
    return old;
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
Guard guard;

std::mutex pinned_mutex;
std::map<void*, size_t> pinned;  // blocks of pinned memory

bool is_pinned(const void* data) {
  std::lock_guard lock(pinned_mutex);
  auto block = pinned.upper_bound(const_cast<void*>(data));
  if (block == pinned.begin()) return false;
  --block;
  return data < static_cast<char*>(block->first) + block->second;
}

void* allocate(size_t bytes) { return std::aligned_alloc(64, bytes / 64 * 64 + 64); }

void release(void* data) { std::free(data); }

void release_pinned(void* data) {
  std::lock_guard lock(pinned_mutex);
  pinned.erase(data);
  std::free(data);
}

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? ::allocate(bytes) : nullptr;
    return {data, data, &release, Device(CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory;

struct PinnedMemory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = ::allocate(bytes);
    std::lock_guard lock(pinned_mutex);
    pinned[data] = bytes + 1;
    return {data, data, &release_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedMemory pinned_memory;

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return GPUS; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

// DDP measures its own times with this.
struct NoTimer : c10d::Timer {
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

const bool registered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  c10::SetAllocator(CUDA, &memory, 100);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>();
      });
  c10d::TimerRegistry()->Register(c10::kCUDA, [](Device) -> std::unique_ptr<c10d::Timer> {
    return std::make_unique<NoTimer>();
  });
  return true;
}();

// ------------------------------------------------------------------------------------- operations

void drop_storage(void* owner) { delete static_cast<Storage*>(owner); }

// Return a storage that shares the memory of `from`, on another device.
Storage share(const Storage& from, Device device) {
  auto* owner = new Storage(from);
  c10::DataPtr data(from.mutable_data(), owner, &drop_storage, device);
  return Storage(
      Storage::use_byte_size_t{}, from.nbytes(), std::move(data),
      c10::GetAllocator(device.type()), /*resizable=*/true);
}

// Return a tensor with this storage, on its device, and the type, sizes and strides of `like`.
Tensor with_storage(const Storage& storage, const Tensor& like) {
  auto key = storage.device().is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      Storage(storage), DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  Tensor result(std::move(impl));
  if (like.is_conj()) result._set_conj(true);
  if (like.is_neg()) result._set_neg(true);
  return result;
}

StorageImpl* storage_of(const Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

struct Alias {
  Tensor cuda, cpu;
  Storage storage;  // of `cpu`, before the kernel ran
  void* data;
};

// The tensors of one call of an operation, on both devices.
struct Call {
  vector<Alias> aliases;
  Device device{CUDA, -1};
  bool host_tensor = false;  // an argument, not a scalar, is on the CPU

  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      host_tensor |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    if (!device.has_index()) device = tensor.device();
    Storage storage;
    for (auto& alias : aliases) {
      if (alias.cuda.is_same(tensor)) return alias.cpu;
      if (storage_of(alias.cuda) == storage_of(tensor)) storage = alias.storage;
    }
    if (!storage) storage = share(tensor.storage(), Device(c10::kCPU));
    Tensor cpu = with_storage(storage, tensor);
    aliases.push_back({tensor, cpu, storage, storage.mutable_data()});
    return cpu;
  }

  Tensor to_cuda(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& alias : aliases) {
      if (alias.cpu.is_same(tensor)) return alias.cuda;
    }
    for (auto& alias : aliases) {  // a view of an argument
      if (alias.storage.unsafeGetStorageImpl() == storage_of(tensor))
        return with_storage(alias.cuda.storage(), tensor);
    }
    Device target = device.has_index() ? device : guard.getDevice();
    return with_storage(share(tensor.storage(), target), tensor);
  }

  // Repeat what the kernel did to sizes, strides and memory, for example resize_.
  void update_arguments() {
    for (auto& alias : aliases) {
      if (alias.storage.mutable_data() != alias.data) {
        auto* owner = new Storage(alias.storage);
        storage_of(alias.cuda)->set_data_ptr_noswap(
            {owner->mutable_data(), owner, &drop_storage, alias.cuda.device()});
        storage_of(alias.cuda)->set_nbytes(owner->nbytes());
      }
      alias.cuda.unsafeGetTensorImpl()->set_sizes_and_strides(
          alias.cpu.sizes(), alias.cpu.strides(), alias.cpu.storage_offset());
    }
  }
};

bool warn_of_waits = false;

// With torch.cuda.set_sync_debug_mode("warn"), warn as torch does.
void check_wait(const std::string& name, const vector<IValue>& arguments) {
  const char* reason = nullptr;
  if (name == "aten::_local_scalar_dense" || name == "aten::nonzero") {
    reason = "it returns values to the host";
  } else if (name == "aten::copy_") {
    Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
    if (to.device().type() == from.device().type()) return;
    if (!arguments[2].toBool()) reason = "a copy without non_blocking";
    if (!is_pinned((to.is_cpu() ? to : from).data_ptr())) reason = "a copy of pageable memory";
  }
  if (reason) TORCH_WARN("called a synchronizing CUDA operation: ", name, ", ", reason);
}

// These operations may get tensors of both devices.
bool takes_both_devices(const std::string& name) {
  return name == "aten::copy_" || name.rfind("aten::index", 0) == 0 ||
      name.rfind("aten::_index_put", 0) == 0 || name == "aten::_foreach_copy_";
}

// Replace a tensor, or each tensor of a list, by move(tensor).
template <typename Move>
void replace_tensors(IValue& value, Move move) {
  if (value.isTensor()) {
    value = move(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (auto& tensor : value.toTensorVector()) list.push_back(move(tensor));
    value = list;
  }
}

// Run the CPU kernel of any operation.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  size_t begin = stack->size() - op.schema().arguments().size();
  if (warn_of_waits) check_wait(name, {stack->begin() + begin, stack->end()});
  Call call;
  for (size_t i = begin; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    replace_tensors(value, [&](const Tensor& tensor) { return call.to_cpu(tensor); });
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(call.to_cpu(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) call.device = value.toDevice();
      value = Device(c10::kCPU);
    }
  }
  TORCH_CHECK(
      !call.host_tensor || call.aliases.empty() || takes_both_devices(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda and "
      "cpu, in ", name);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.update_arguments();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    replace_tensors(value, [&](const Tensor& tensor) { return call.to_cuda(tensor); });
  }
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(
      size, &memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& set_storage(
    Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

// Return the tensor's memory as a tensor on the CPU.
Tensor cpu_alias(const Tensor& tensor) {
  return with_storage(share(tensor.storage(), Device(c10::kCPU)), tensor);
}

// For UntypedStorage.resize_, which FSDP2 uses. The tensor begins at the start of its storage.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  c10::DeviceGuard on(tensor.device());
  auto* storage = storage_of(tensor);
  c10::DataPtr fresh = memory.allocate(bytes);
  if (size_t kept = std::min<size_t>(bytes, storage->nbytes()))
    std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

// 0 selects scaled_dot_product_attention's implementation by other operations.
int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}
using AttentionStub = std::remove_reference_t<decltype(at::native::_fused_sdp_choice_stub)>;
at::native::RegisterCUDADispatch<AttentionStub> attention_registered(
    at::native::_fused_sdp_choice_stub, &plain_attention);

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  // torch has a kernel for all devices, which would look for its CUDA part.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// ------------------------------------------------------------------------------------------- nccl

// The work of gloo, with results on the device.
struct Work : c10d::Work {
  intrusive_ptr<c10d::Work> gloo;
  vector<Tensor> results;

  Work(intrusive_ptr<c10d::Work> gloo, vector<Tensor> results)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), gloo(gloo), results(results) {}
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo->wait(timeout); }
  void synchronize() override { gloo->wait(); }
  vector<Tensor> result() override { return results; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto results = this->results;
    auto then = [results](c10::ivalue::Future& gloo) -> IValue {
      gloo.value();  // raises its error
      return results;
    };
    return gloo->getFuture()->then(then, c10::ListType::create(c10::TensorType::get()));
  }
};

Tensor on_host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
  return cpu_alias(tensor);
}

vector<Tensor> on_host(const vector<Tensor>& tensors) {
  vector<Tensor> result;
  for (auto& tensor : tensors) result.push_back(on_host(tensor));
  return result;
}

vector<vector<Tensor>> on_host(const vector<vector<Tensor>>& lists) {
  vector<vector<Tensor>> result;
  for (auto& list : lists) result.push_back(on_host(list));
  return result;
}

// The collectives that torch and the toolkit use, done by gloo on the aliases.
struct Nccl : c10d::Backend {
  struct Options : c10d::Backend::Options {
    bool is_high_priority_stream = false;
    Options() : c10d::Backend::Options("nccl", kBackendDefaultTimeout) {}
  };

  intrusive_ptr<c10d::Backend> gloo;
  intrusive_ptr<Options> options;

  Nccl(int rank, int size, intrusive_ptr<c10d::Backend> gloo, intrusive_ptr<Options> options)
      : c10d::Backend(rank, size), gloo(gloo), options(options) {}

  static intrusive_ptr<c10d::Work> done(intrusive_ptr<c10d::Work> gloo, vector<Tensor> results) {
    return c10::make_intrusive<Work>(gloo, results);
  }

  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  intrusive_ptr<c10d::Work> allreduce(
      vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo->allreduce(host, options), tensors);
  }
  intrusive_ptr<c10d::Work> broadcast(
      vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo->broadcast(host, options), tensors);
  }
  intrusive_ptr<c10d::Work> allgather(
      vector<vector<Tensor>>& outputs, vector<Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return done(gloo->allgather(host_outputs, host_inputs, options), outputs[0]);
  }
  intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host_output = on_host(output), host_input = on_host(input);
    return done(gloo->_allgather_base(host_output, host_input, options), {output});
  }
  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      vector<Tensor>& outputs, vector<Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs), host_inputs = on_host(inputs);
    return done(
        gloo->allgather_into_tensor_coalesced(host_outputs, host_inputs, options), outputs);
  }
  intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto host_output = on_host(output), host_input = on_host(input);
    auto sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    auto work = gloo->_reduce_scatter_base(host_output, host_input, sum);
    if (options.reduceOp == c10d::ReduceOp::AVG) {  // gloo has no average
      work->wait();
      host_output.div_(getSize());
    }
    return done(work, {output});
  }
  intrusive_ptr<c10d::Work> gather(
      vector<vector<Tensor>>& outputs, vector<Tensor>& inputs,
      const c10d::GatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return done(gloo->gather(host_outputs, host_inputs, options), inputs);
  }
  intrusive_ptr<c10d::Work> scatter(
      vector<Tensor>& outputs, vector<vector<Tensor>>& inputs,
      const c10d::ScatterOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return done(gloo->scatter(host_outputs, host_inputs, options), outputs);
  }
  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions host;
    host.timeout = options.timeout;
    return gloo->barrier(host);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");
  module.def("select_device", [](DeviceIndex index) { selected = current = index; });
  module.def("warn_of_waits", [](bool on) { warn_of_waits = on; });
  module.def("resize_storage", &resize_storage);
  py::class_<Nccl, intrusive_ptr<Nccl>, c10d::Backend>(module, "Nccl")
      .def(py::init<int, int, intrusive_ptr<c10d::Backend>, intrusive_ptr<Nccl::Options>>());
  py::class_<Nccl::Options, intrusive_ptr<Nccl::Options>, c10d::Backend::Options>(
      module, "Options")
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream);
}
