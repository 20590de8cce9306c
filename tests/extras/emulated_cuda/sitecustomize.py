"""Give every Python process with this folder in PYTHONPATH the emulated device of emulated_cuda.cpp.

Python imports a module of this name when it starts. The library must be loaded before torch, and torch.cuda must be
changed after it, so this replaces the import of torch. EMULATED_CUDA is the path of the library.
"""

import ctypes
import importlib.util
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

LIBRARY = os.environ["EMULATED_CUDA"]
GPUS = 8


class TorchFinder:
    """Find torch, load the library before it, and change it after its import."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(TorchFinder)
        spec = importlib.util.find_spec("torch")
        libraries = Path(spec.origin).parent / "lib"
        execute = spec.loader.exec_module

        def exec_module(torch):
            for file in ("libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
                ctypes.CDLL(libraries / file, ctypes.RTLD_GLOBAL)
            ctypes.CDLL(LIBRARY)
            execute(torch)
            change(torch)

        spec.loader.exec_module = exec_module
        return spec


class Event:
    """Records the time, because the device has always finished its work."""

    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        self.seconds = time.perf_counter()

    def elapsed_time(self, later):
        return 1000 * (later.seconds - self.seconds)

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass


class Stream:
    """Does nothing, because the device works while the host waits."""

    def __init__(self, device=None, priority=0):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def nothing(self, *_):
        pass

    wait_stream = wait_event = synchronize = nothing


def make_graphed_callables(model, examples):
    """Compute anew in each replay, but keep inputs, outputs and gradients in the same memory, as CUDA graphs do."""
    import torch

    eager, parameters = model.forward, list(model.parameters())
    output = eager(*examples).detach()
    gradients = [torch.zeros_like(p) for p in parameters]

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for example, given in zip(examples, inputs):
                example.copy_(given)
            with torch.enable_grad():
                ctx.result = eager(*examples)
            return output.copy_(ctx.result.detach()).detach()

        @staticmethod
        def backward(ctx, grad):
            for static, new in zip(gradients, torch.autograd.grad(ctx.result, parameters, grad)):
                static.copy_(new)
            return (*[None] * len(examples), *(static.detach() for static in gradients))

    def forward(*inputs):
        return Replay.apply(*inputs, *parameters) if model.training else eager(*inputs)

    model.forward = forward


def change(torch):
    """Let torch.cuda find the emulated devices, and torch.distributed the backend "nccl"."""
    spec = importlib.util.spec_from_file_location("emulated_cuda", LIBRARY)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    cuda, selected = torch.cuda, [0]

    def index_of(device=None):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return selected[0] if index is None else index

    def set_device(device):
        selected[0] = index_of(device)
        native.select_device(selected[0])

    @contextmanager
    def in_device(device):
        before = selected[0]
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    @contextmanager
    def in_stream(stream):
        yield stream

    def resize_(storage, size, host=torch.UntypedStorage.resize_):
        if storage.device.type != "cuda":
            return host(storage, size)
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        native.resize_storage(tensor.set_(storage), size)
        return storage

    properties = SimpleNamespace(
        name="NVIDIA H100 (emulated)",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
    )
    changes = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: GPUS,
        "current_device": lambda: selected[0],
        "set_device": set_device,
        "device": in_device,
        "synchronize": lambda device=None: None,
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": in_stream,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": lambda mode: native.warn_of_waits(mode not in (0, "default")),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        # The generator of the CPU makes the numbers. torch saves and seeds it too.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
        "make_graphed_callables": make_graphed_callables,
    }
    for name, value in changes.items():
        setattr(cuda, name, value)
    cuda.nccl.version = lambda: (2, 28, 3)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.UntypedStorage.resize_ = resize_
    # There is no compiler for the device.
    torch.compile = lambda function, **_: function

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    class ProcessGroupNCCL(native.Nccl):
        Options = native.Options

        def __init__(self, store, rank, size, options):
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            super().__init__(rank, size, gloo, options)

        def eager_connect_single_device(self, device):
            pass

    dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    # The flight recorder of gloo records the collectives of both backends.
    c10d = torch._C._distributed_c10d
    c10d._dump_nccl_trace_json = c10d._dump_fr_trace_json


sys.meta_path.insert(0, TorchFinder)
