"""Options, devices, the environment key, and an import that talks to nobody."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.executors.base import environment_digest
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.loading import choose_device, compile_properties, expected_environment
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.support import random_artifact
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ExecutorOptions(device="npu"),
        lambda: ExecutorOptions(threads=0),
        lambda: ExecutorOptions(kv_cache_precision="f64"),
        lambda: ExecutorOptions(inference_precision="bf16"),
        lambda: ExecutorOptions(dynamic_quantization_group_size=64),
        lambda: ExecutorOptions(max_cache_bytes=-1),
        lambda: ExecutorOptions(quantize="int2"),
    ],
)
def test_an_option_with_a_wrong_value_says_what_would_be_right(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError, match="must"):
        wrong()


def test_an_explicit_device_that_is_missing_lists_what_is_there() -> None:
    with pytest.raises(UsageError, match="device 'gpu' is not there; available devices: cpu"):
        choose_device("gpu", ("CPU",))
    assert choose_device("gpu", ("CPU", "GPU.0")) == "GPU"
    assert choose_device("auto", ("CPU", "GPU")) == "CPU"
    assert choose_device("cpu", ("CPU",)) == "CPU"


def test_float32_is_asked_for_explicitly() -> None:
    """OpenVINO's default on a processor with bf16 units is bf16, and its results depend on the batch."""
    properties = compile_properties(ExecutorOptions())
    assert properties["INFERENCE_PRECISION_HINT"] == "f32"
    assert properties["KV_CACHE_PRECISION"] == "f16"


def test_the_environment_changes_with_whatever_the_bits_depend_on() -> None:
    artifact, options = random_artifact(), ExecutorOptions(threads=2)
    base = expected_environment(artifact, options)
    assert base == expected_environment(artifact, options)
    others = [
        expected_environment(replace(artifact, fingerprint="another"), options),
        expected_environment(artifact, replace(options, threads=1)),
        expected_environment(artifact, replace(options, kv_cache_precision="f32")),
        expected_environment(artifact, replace(options, dynamic_quantization_group_size=0)),
        expected_environment(artifact, replace(options, quantize="int8")),
    ]
    assert len({environment_digest(environment) for environment in (base, *others)}) == 6
    moved = expected_environment(artifact, replace(options, cache_dir=Path("elsewhere"), max_cache_bytes=0))
    assert environment_digest(moved) == environment_digest(base)
    assert {"openvino", "instruction_set", "threads", "device", "artifact", "builder"} <= base.keys()


SILENT = """
import socket, sys
class Refused(socket.socket):
    def connect(self, *args): raise SystemExit("a network connection was tried")
socket.socket = Refused
from lockstep.executors import options
assert "openvino" not in sys.modules, "options must stay cheap"
from lockstep.executors.openvino import executor
assert "openvino_telemetry" not in sys.modules
import openvino_telemetry  # stays importable for others
"""


def test_importing_openvino_talks_to_nobody_and_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("openvino_telemetry")
    environment = {"HOME": str(tmp_path), "PATH": "", "USERPROFILE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SILENT], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_from_building_to_compiled() -> None:
    seen: list[tuple[str, float]] = []
    load_executor(random_artifact(), progress=lambda stage, fraction: seen.append((stage, fraction))).close()
    assert seen == [("build", 0.5), ("build", 1.0), ("compile", 0.0), ("compile", 1.0)]


MEMORY = """
import gc, pathlib, sys
import numpy as np
from lockstep.executors.openvino.executor import load_executor
from tests.executors.openvino.support import random_artifact
from tools.random_models import Shape
def anonymous_mb():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) // 1024
artifact = random_artifact(Shape(num_layers=4, hidden_size=1024, intermediate_size=3072), "Q8_0")
base = []
for turn in range(4):
    executor = load_executor(artifact)
    executor.allocate(2000, 0)
    content = np.ones((2000, executor.geometry.bytes_per_block), np.uint8)
    executor.write_blocks(range(1, 2001), content)  # the pool takes memory where it is written
    del content
    loaded = anonymous_mb()
    executor.close()
    del executor
    gc.collect()
    base.append(anonymous_mb())
    assert loaded - base[-1] > 100, (loaded, base)
assert base[-1] - base[0] < 15, base
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_closing_gives_the_memory_back() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import gc, signal, threading
from lockstep.executors.openvino.executor import load_executor
from tests.executors.openvino.support import random_artifact
held = [load_executor(random_artifact())]
def free():
    held.pop().close()
    gc.collect()
thread = threading.Thread(target=free)
thread.start()
thread.join()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_finds_the_stack_for_its_signal_after_another_thread_freed_a_model() -> None:
    """Where OpenVINO gave the first thread one: on processors with large registers."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
