"""Count what many ranks send at a start, a failure and a hang, and what rank 0 does for a save.

    python tests/faults/test_many_ranks.py 8 64 1024     prints the figures for these numbers of ranks

Ranks are threads. They call the functions of ddp_setup.py with a store that counts the requests and
their bytes (keys and values). For a sharded checkpoint, DCP plans each rank's part of a model of 6.7 G
parameters on the device "meta", and then rank 0's work is done. It takes two minutes for 1,024
ranks.
"""

import json
import os
import pickle
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, f"{ROOT}")

import ckpt  # noqa: E402
import ddp_setup  # noqa: E402
import gpt  # noqa: E402
from extras import sharded  # noqa: E402

TIMEOUT = timedelta(seconds=60)


class CountingStore(dist.Store):
    """One rank's connection to a store. It counts requests, and the bytes of keys and values."""

    def __init__(self, store):
        super().__init__()
        self.store, self.requests, self.bytes = store, 0, 0

    def count(self, *texts):
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key, value):
        self.count(key, value)
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        self.count(key, value)
        return value

    def queue_push(self, key, value):
        self.count(key, value)
        self.store.queue_push(key, value)

    def queue_pop(self, key):
        # A push to a HashStore wakes only one thread, which can be one that waits in get().
        while not self.store.check([key]):
            time.sleep(0.001)
        value = self.store.queue_pop(key)
        self.count(key, value)
        return value

    def add(self, key, number):
        self.count(key)
        return self.store.add(key, number)

    def check(self, keys):
        self.count(*keys)
        return self.store.check(keys)

    def wait(self, keys, timeout=TIMEOUT):
        self.count(*keys)
        self.store.wait(keys, timeout)

    def compare_set(self, key, expected, desired):
        value = self.store.compare_set(key, expected, desired)
        self.count(key, value)
        return value

    def multi_set(self, keys, values):
        self.count(*keys, *values)
        self.store.multi_set(keys, values)


def traffic(size, function):
    """Call function(env, store) in a thread per rank; return each rank's requests and bytes."""
    common = dist.HashStore()
    stores = [CountingStore(common) for _ in range(size)]
    envs = [ddp_setup.World(rank, rank, size, size) for rank in range(size)]
    calls = [ddp_setup._in_thread(lambda a=a: function(*a)) for a in zip(envs, stores)]
    for call in calls:
        assert isinstance(call.exception(), SystemExit | None), call.exception()
    return [(store.requests, store.bytes) for store in stores]


def start(env, store):
    """What a rank does at its start under torchrun, before the process group exists."""
    ddp_setup._agree_on_run_id(store, env)


def gloo(env, store):
    """What gloo does when a group starts."""
    groups.append(dist.ProcessGroupGloo(store, env.rank, env.size, TIMEOUT))


groups = []  # keeps the groups of gloo until the process ends


def failure(env, store):
    """What each rank does when a connection to another rank was lost."""
    ddp_setup._choose_reporter(RuntimeError("[/gloo/x.cc:1] Connection closed"), env, store)


def hang(env, store):
    """What each rank does while all are stuck in a collective, until it ends."""
    main = threading.main_thread().ident
    joined = threading.Event()
    joined.set()
    ddp_setup._watch_ranks(env, store, 4, main, joined, threading.Event())


def end_thread(_):
    raise SystemExit  # the ranks are threads here, so they must not call os._exit


def traffic_of_hang(size):
    """Return each rank's traffic until it ends, in 21 intervals, because it is stuck."""
    here = {threading.main_thread().ident: sys._getframe()}
    status = {"0": {"last_enqueued_collective": 1, "last_completed_collective": 0}}
    stuck = {"pg_status": status, "entries": [{"retired": False}]}
    with ExitStack() as patches:
        for module, name, value in (
            (torch._C._distributed_c10d, "_dump_fr_trace_json", lambda *_: json.dumps(stuck)),
            (sys, "_current_frames", lambda: here),
            (os, "_exit", end_thread),
        ):
            patches.enter_context(patch.object(module, name, value))
        return traffic(size, hang)


# ------------------------------------------------------------------------------ sharded checkpoints


@contextmanager
def fake_group(rank, size):
    """Make this process rank `rank` of `size` ranks, without the others."""
    with patch.object(sys, "excepthook"):  # init_process_group wraps it each time
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        yield
        dist.destroy_process_group()


def sent_parts(model, size):
    """Return what each rank sends to rank 0 under --strategy fsdp, and the sizes of the files."""
    parts, sizes = [], {}
    for rank in range(size):
        planner = dcp.DefaultSavePlanner()
        with fake_group(rank, size):
            planner.set_up_planner(local_state(model, rank, size))
            plan = planner.create_local_plan()
        file, end, results = f"__{rank}_0.distcp", 0, []
        for item in plan.items:
            length = item.tensor_storage_size()
            results.append(WriteResult(item.index, length, _StorageInfo(file, end, length)))
            end += length
        shards = sharded._list_shards(plan, results)
        parts.append(pickle.dumps(json.dumps([file, (end, "0" * 64), shards])))
        sizes[file] = end
    return parts, sizes


def local_state(model, rank, size):
    """Return what snapshot of extras/sharded.py would return on this rank, for AdamW."""
    mesh, tensors = init_device_mesh("cpu", (size,)), {}
    for i, (name, value) in enumerate(model.state_dict().items()):
        rows = -(-len(value) // size)
        rows = max(0, min(rows, len(value) - rank * rows))
        local = value.new_empty(rows, *value.shape[1:])
        whole = {"shape": value.shape, "stride": value.stride()}
        part = DTensor.from_local(local, mesh, [Shard(0)], **whole)
        key = f"optimizers.0.{name}"
        tensors |= {f"model.{name}": part, f"{key}.exp_avg": part, f"{key}.exp_avg_sq": part}
        if i % size == rank:
            tensors[f"{key}.step"] = torch.zeros(())
    return tensors


def plan_checkpoint(layers, width, size):
    """Return seconds and bytes of what rank 0 does for a save of a model of float32 with AdamW."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(32000, 2048, layers, 32, width))
    parts, sizes = sent_parts(model, size)
    figures = {"parameters": sum(p.numel() for p in model.parameters())}
    figures |= {"sent by a rank, bytes": len(parts[-1]), "received, bytes": sum(map(len, parts))}
    with TemporaryDirectory() as folder:
        path = Path(folder, "temporary")
        path.mkdir()
        for file, length in sizes.items():
            with (path / file).open("wb") as opened:
                opened.truncate(length)  # a sparse file, which takes no space
        before, begin = memory("VmHWM"), time.perf_counter()
        manifest = {"names": {name: name for name in model.state_dict()}, "optimizers": [[]]}
        texts = [pickle.loads(part) for part in parts]
        with fake_group(0, size):
            sharded._write_manifest(ckpt, path, manifest | {"state": {}}, texts)
        figures["work of rank 0, seconds"] = time.perf_counter() - begin
        figures["memory of rank 0, bytes"] = memory("VmHWM") - before
        figures["manifest, bytes"] = (path / sharded.MANIFEST).stat().st_size
        path = path.rename(f"{path}-{ckpt.sha256(path / sharded.MANIFEST)[:32]}")
        begin = time.perf_counter()
        found, _ = sharded.read_manifest(ckpt, path)
        figures["read of the manifest, seconds"] = time.perf_counter() - begin
    figures["shards"] = sum(len(shards) for _, _, shards in found["tensors"].values())
    return figures


def memory(kind):
    """Return a value of this process in bytes: VmRSS is now, VmHWM the highest."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{kind}:")[1].split()[0])


# --------------------------------------------------------------------------------------------- tests


def total(ranks):
    """Return the sums of requests and bytes."""
    return [sum(figures) for figures in zip(*ranks)]


def assert_linear(few, many):
    """The sums grow at most as the number of ranks, but for 10 %: names get longer."""
    growth = len(many) / len(few)
    for a, b in zip(total(few), total(many)):
        assert b <= 1.1 * growth * a, (total(few), total(many))


def test_at_the_start_each_rank_but_rank_0_makes_three_requests():
    few, many = traffic(8, start), traffic(128, start)
    assert {requests for requests, _ in [*few[1:], *many[1:]]} == {3}
    assert_linear(few[1:], many[1:])


def test_after_a_failure_each_rank_makes_two_requests_and_one_asks_for_all():
    few, many = traffic(8, failure), traffic(64, failure)
    assert sorted(requests for requests, _ in many) == [2] * 63 + [3 + 64]
    assert_linear(few, many)


def test_of_the_ranks_that_are_stuck_only_one_reads_where_all_are(capsys):
    few, many = traffic_of_hang(4), traffic_of_hang(32)
    for ranks in (few, many):
        requests = sorted(requests for requests, _ in ranks)
        own = 21 * 2 + 1
        assert requests == [own] * (len(ranks) - 1) + [own + len(ranks)]
    assert_linear(few, many)
    assert capsys.readouterr().err.count("no progress for 4 s: rank 0 at ") == 2


def test_gloo_asks_the_store_for_each_other_rank(monkeypatch):
    """The total is quadratic, and torch's. Connections on demand (TORCH_GLOO_LAZY_INIT) are not."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    few, many = traffic(4, gloo), traffic(16, gloo)
    assert [{requests for requests, _ in ranks} for ranks in (few, many)] == [{9}, {33}]
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert {requests for requests, _ in traffic(16, gloo)} == {1}


def test_for_a_sharded_checkpoint_rank_0_receives_and_writes_equally_much_per_rank():
    few, many = (plan_checkpoint(1, 512, size) for size in (8, 64))
    assert many["shards"] > 7 * few["shards"]
    assert many["sent by a rank, bytes"] <= 1.1 * few["sent by a rank, bytes"]
    for name in ("received, bytes", "manifest, bytes"):
        assert many[name] <= 1.1 * 8 * few[name], name
    assert many["received, bytes"] < 150 * many["shards"]  # as text, not as Python objects


def main():
    """Print the figures for the numbers of ranks of the command line."""
    for size in map(int, sys.argv[1:]):
        print(f"\n{size} ranks")
        jobs = {"start": lambda: traffic(size, start), "failure": lambda: traffic(size, failure)}
        jobs["hang"] = lambda: traffic_of_hang(size)
        if size <= 64:  # With 1,024, each rank opens 1,023 connections.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            jobs["gloo"] = lambda: traffic(size, gloo)
        for name, job in jobs.items():
            begin = time.perf_counter()
            ranks = job()
            seconds, sums = time.perf_counter() - begin, total(ranks)
            print(
                f"{name:8} rank 0 {ranks[0][0]:7,} requests {ranks[0][1]:9,} bytes; last rank "
                f"{ranks[-1][0]:5,} {ranks[-1][1]:9,}; all {sums[0]:9,} {sums[1]:13,}; "
                f"{seconds:.1f} s"
            )
    for size in map(int, sys.argv[1:]):
        print(f"\nsharded checkpoint of {size} ranks")
        for name, figure in plan_checkpoint(32, 4096, size).items():
            print(f"    {name:32} {figure:16,.{int('seconds' in name)}f}")
    sys.stdout.flush()
    os._exit(0)  # not to wait for the groups of gloo


if __name__ == "__main__":
    main()
