"""Tests of extras/doctor.py and of the command doctor."""

import configparser
import os
import platform
import shutil
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON, ROOT, run

import ddp_setup
from extras import doctor

SECRET = "doNotSayThis"
LEFT_OUT = {"commit", "GPU driver"}  # where the folder is no git repository, and without a driver


def parse(text: str) -> dict[str, str]:
    return {line[:15].strip(): line[16:] for line in text.splitlines()}


@pytest.fixture
def only(monkeypatch):
    """Return a function: name of a fact -> its line in a report that has only this fact."""

    def line(name: str, seconds: float = 30) -> str:
        monkeypatch.setattr(doctor, "FACTS", {name: doctor.FACTS[name]})
        return parse(doctor.report(seconds)).get(name, "")

    return line


def test_the_command_prints_every_fact_and_no_secret():
    env = {
        "DDPKIT_OUT": f"s3://key:{SECRET}@bucket",
        "NCCL_MADE_UP": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "WORLD_SIZE": "1",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
        "CXX": "no-such-compiler",
    }
    ran = run("doctor", env=env, launcher=[sys.executable, "run.py"])
    assert ran.code == 0 and ran.err == "", ran
    assert SECRET not in ran.out
    lines = ran.out.splitlines()
    assert len(lines) < 40
    facts = parse(ran.out)
    assert {*doctor.FACTS} - LEFT_OUT <= facts.keys() <= {*doctor.FACTS}
    assert [name for name, text in facts.items() if "not available" in text] == ["GPUs"]
    assert facts["Python"].startswith(platform.python_version())
    assert facts["torch"].startswith(f"{torch.__version__}, CUDA {torch.version.cuda}")
    assert "USE_GLOO=" in facts["torch build"]
    for package in ("click", "numpy"):
        assert f"{package} {metadata.version(package)}" in facts["packages"]
    assert platform.release() in facts["system"]
    assert facts["CPUs"].startswith(f"{os.cpu_count()} in the machine, ")
    assert "open files " in facts["limits"] and " GiB" in facts["memory"]
    assert facts["interfaces"].startswith("lo 127.0.0.1")
    assert "two ranks connected" in facts["gloo"]
    assert "no-such-compiler not found" in facts["torch.compile"]
    assert facts["launcher"] == "WORLD_SIZE=1"
    assert "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=WARN" in facts["variables"]
    assert "DDPKIT_OUT NCCL_MADE_UP" in facts["variables"]


def test_without_the_file_there_is_one_line(tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "extras").mkdir()
    for name in ("commands", "flags"):
        shutil.copy(ROOT / "extras" / f"{name}.py", tmp_path / "extras")
    ran = run("doctor", root=tmp_path, launcher=PYTHON)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1, ran
    assert "extras/doctor.py" in ran.err


def test_alone_with_a_torch_that_cannot_be_imported_it_says_why(tmp_path):
    shutil.copy(ROOT / "extras" / "doctor.py", tmp_path)
    (tmp_path / "torch.py").write_text("raise OSError('libmade_up.so: cannot open')")
    ran = subprocess.run(
        [sys.executable, "doctor.py"],
        cwd=tmp_path,
        env={key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0 and ran.stderr == "", ran
    facts = parse(ran.stdout)
    assert facts["torch"] == "not available: libmade_up.so: cannot open"
    needs_torch = {"torch build", "distribution", "CPU", "GPUs", "GPU driver", "gloo"}
    assert {name for name, text in facts.items() if text == "not available"} == needs_torch
    assert facts["Python"].startswith(platform.python_version())
    assert "commit" not in facts  # this folder is no git repository


def test_a_fact_that_fails_hangs_or_exits_is_one_line_and_the_others_are_printed(monkeypatch):
    released = threading.Event()

    def fail() -> str:
        raise RuntimeError("first line\nsecond line")

    def hang() -> str:
        released.wait(60)
        return "late"

    facts = {"a": fail, "b": hang, "c": lambda: sys.exit(), "d": lambda: "x\ny", "e": lambda: ""}
    monkeypatch.setattr(doctor, "FACTS", facts)
    found = parse(doctor.report(seconds=1))
    released.set()
    expected = {"a": "not available: first line", "b": "no answer within 1 s"}
    assert found == {**expected, "c": "not available: SystemExit()", "d": "x"}


def test_where_the_system_lacks_modules_and_functions_the_rest_is_printed(monkeypatch):
    """Windows has no fcntl, resource, sysconf and sched_getaffinity."""
    for owner, name in (
        (doctor, "fcntl"),
        (doctor, "resource"),
        (os, "sysconf"),
        (os, "sched_getaffinity"),
    ):
        monkeypatch.delattr(owner, name)
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    monkeypatch.setattr(doctor, "CGROUP", "/no/such/folder")
    found = parse(doctor.report(30))
    assert found["limits"] == "not available"
    assert found["memory"].startswith("not available: ")
    assert found["CPUs"] == f"{os.cpu_count()} in the machine"
    assert "lo" in found["interfaces"].split(", ")
    assert {*doctor.FACTS} - LEFT_OUT <= found.keys()


def test_gpus_that_are_equal_are_counted(monkeypatch, only):
    def gpu(name: str, gib: int, major: int, minor: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, total_memory=gib * 2**30, major=major, minor=minor)

    there = [gpu("NVIDIA A", 80, 9, 0), gpu("NVIDIA B", 16, 7, 5), gpu("NVIDIA A", 80, 9, 0)]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: there[number])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert only("GPUs") == (
        "2 x NVIDIA A, 80.0 GiB, compute capability 9.0, fast bfloat16: yes; "
        "1 x NVIDIA B, 16.0 GiB, compute capability 7.5, fast bfloat16: yes"
    )


def test_the_driver_is_read_from_nvidia_smi(monkeypatch, only, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '| NVIDIA-SMI 570.1  Driver Version: 570.1  CUDA: 12.8 |'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert only("GPU driver") == "570.1"


CGROUPS = {
    "none": {},
    "version 2": {"cpu.max": "150000 100000", "memory.max": f"{3 * 2**30}"},
    "version 2, no limit": {"cpu.max": "max 100000", "memory.max": "max"},
    "version 1": {
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": f"{3 * 2**30}",
    },
    "version 1, no limit": {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    },
}


@pytest.mark.parametrize("name", CGROUPS)
def test_limits_of_the_container(monkeypatch, tmp_path, name):
    for file, text in CGROUPS[name].items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(doctor, "CGROUP", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(7)})
    limited = name in ("version 1", "version 2")
    cpus = f"{os.cpu_count()} in the machine, affinity mask 7"
    assert doctor.usable_cpus() == cpus + ", quota of the container 1.5" * limited
    _, limit, amount = doctor.memory().partition(", limit of the container ")
    assert (limit != "", amount) == (limited, "3.0 GiB" * limited)
    # The core reads the file of version 2: it uses as many CPUs as these numbers allow.
    assert ddp_setup.available_cpus(str(tmp_path)) == (1 if name == "version 2" else 7)


def test_interfaces_with_an_address_come_first_and_the_list_is_short(monkeypatch, only):
    names = [(number, f"made-up-{number}") for number in range(20)]
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [*names, (20, "lo")])
    listed = ", ".join(name for _, name in names[:11])
    assert only("interfaces") == f"lo 127.0.0.1, {listed} and 9 more"


def test_gloo_says_why_it_does_not_connect(monkeypatch, only):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    text = only("gloo")
    assert text.startswith("not available: ") and "eth77" in text


def test_extras_are_those_of_setup_cfg_and_say_what_is_missing(monkeypatch, only):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = {
        extra: [line.split(">")[0] for line in lines.split()]
        for extra, lines in config["options.extras_require"].items()
        if extra not in ("test", "dev", "bench")
    }
    assert doctor.EXTRAS == packages
    missing = {"tokenizers", "s3fs"}
    monkeypatch.setattr(doctor, "version", lambda name: "missing" if name in missing else "1")
    assert only("extras") == (
        "plot yes; tensorboard yes; hf no, tokenizers missing; s3 no, s3fs missing"
    )


def test_a_package_that_is_not_installed_is_missing():
    assert doctor.version("click") == metadata.version("click")
    assert doctor.version("no-such-package-at-all") == "missing"


def test_the_commit_is_that_of_the_folder_of_the_file(monkeypatch, tmp_path):
    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *author, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    copy = Path(shutil.copy(doctor.__file__, tmp_path))
    monkeypatch.setattr(doctor, "__file__", str(copy))
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert doctor.commit() == git("rev-parse", "--short", "HEAD")
    copy.write_text("changed")
    assert doctor.commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
