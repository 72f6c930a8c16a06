"""The environment key follows what kernels are really chosen by: the processor, less what the environment withholds."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.executors.base import environment_digest
from lockstep.executors.machine import ONEDNN_CAP, OPENVINO_CAP, InstructionSet, instruction_set, unsupported_reason
from tests.waiting import HANG_S

SERVER = (
    "fpu avx2 f16c fma avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_fp16 smep"
)
AVX2 = ("avx2", "f16c", "fma")
AVX512 = (*AVX2[:1], "avx512bw", "avx512f", *AVX2[1:])
CAPS = [
    {},
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "avx2", "OV_CPU_MAX_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "SSE42", "OV_CPU_MAX_ISA": "nonsense"},
]
ON_X86_LINUX = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nflags\t\t: {SERVER}\nprocessor : 1\nflags : other\n")
    return path


def in_another_process(caps: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """With exactly these caps; libraries read them once."""
    kept = {name: value for name, value in os.environ.items() if name not in (*ONEDNN_CAP, *OPENVINO_CAP)}
    return subprocess.run(
        [sys.executable, *command], env=kept | caps, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_the_instruction_set_names_what_kernels_are_chosen_by(cpuinfo: Path) -> None:
    assert str(instruction_set(cpuinfo, {}, "x86_64")).split()[:4] == ["x86_64", "amx_fp16", "amx_int8", "amx_tile"]
    assert "fpu" not in instruction_set(cpuinfo, {}, "x86_64").products
    cpuinfo.write_text("Features : asimd crc32 i8mm\n")
    assert str(instruction_set(cpuinfo, {}, "aarch64")) == "aarch64 asimd i8mm"


@pytest.mark.parametrize(
    ("caps", "products", "others"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX2"}, AVX2, AVX2),
        ({"ONEDNN_MAX_CPU_ISA": "avx2_vnni", "OV_CPU_MAX_ISA": "SSE42"}, ("avx2", "avx_vnni", "f16c", "fma"), ()),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OV_CPU_MAX_ISA": "AVX"}, AVX512, ()),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE", "OV_CPU_MAX_ISA": "AVX2"}, AVX512, AVX2),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX", "OV_CPU_MAX_ISA": "AVX2"}, AVX2, AVX2),
    ],
)
def test_each_half_has_what_its_own_variable_leaves(
    cpuinfo: Path, caps: dict[str, str], products: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert instruction_set(cpuinfo, caps, "x86_64") == InstructionSet("x86_64", products, others)


def test_a_cap_that_is_above_the_processor_or_unknown_changes_nothing(cpuinfo: Path) -> None:
    cpuinfo.write_text("flags : avx2 f16c fma\n")
    plain = instruction_set(cpuinfo, {}, "x86_64")
    for value in ("AVX512_CORE", "AVX2", "ALL", "default", "nonsense", ""):
        assert instruction_set(cpuinfo, {"ONEDNN_MAX_CPU_ISA": value, "OV_CPU_MAX_ISA": value}, "x86_64") == plain


def test_where_a_machine_does_not_tell_its_flags_its_caps_are_part_of_the_key(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for machine in ("arm64", "x86_64"):
        plain = instruction_set(absent, {}, machine)
        assert str(plain).startswith(machine)
        assert instruction_set(absent, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, machine) != plain
        assert unsupported_reason(absent, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, machine) == ""


@pytest.mark.parametrize(
    ("machine", "products", "expected"),
    [
        ("x86_64", "avx2 f16c fma", True),
        ("x86_64", "avx2 avx_vnni f16c fma", True),
        ("AMD64", "Intel64 Family 6", True),
        ("x86_64", "amx_int8 avx2 avx512_vnni avx512f fma", False),
        ("aarch64", "asimd bf16", False),
    ],
)
def test_processors_are_told_apart_by_their_vector_extensions(machine: str, products: str, expected: bool) -> None:
    assert InstructionSet(machine, tuple(products.split()), ()).has_row_dependent_kernels == expected


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "set OV_CPU_MAX_ISA=AVX2 as well"),
        ({"DNNL_MAX_CPU_ISA": "avx2", "OV_CPU_MAX_ISA": "AVX512_CORE_VNNI"}, "DNNL_MAX_CPU_ISA=avx2 withholds"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX", "OV_CPU_MAX_ISA": "AVX"}, "ONEDNN_MAX_CPU_ISA=AVX withholds AVX2"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX512_CORE"}, ""),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ""),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, ""),
        ({"OV_CPU_MAX_ISA": "AVX"}, ""),
    ],
)
def test_caps_that_nothing_can_be_computed_under_are_refused(cpuinfo: Path, caps: dict[str, str], said: str) -> None:
    assert said in unsupported_reason(cpuinfo, caps, "x86_64")
    assert bool(said) == bool(unsupported_reason(cpuinfo, caps, "x86_64"))


def test_a_processor_without_avx2_is_refused(cpuinfo: Path) -> None:
    cpuinfo.write_text("flags : sse4_2 avx f16c\n")
    assert "this processor has no AVX2" in unsupported_reason(cpuinfo, {}, "x86_64")


def test_the_digest_ignores_order_and_keeps_borders() -> None:
    assert environment_digest({"a": "1", "b": "2"}) == environment_digest({"b": "2", "a": "1"})
    assert environment_digest({"a": "1b2"}) != environment_digest({"a": "1", "b": "2"})
    assert environment_digest({"ab": "c"}) != environment_digest({"a": "bc"})
    assert environment_digest({}) == "cae66941d9efbd404e4d88758ea67670"


SEEN = """
import ctypes, json, pathlib
from dataclasses import replace
from lockstep.executors.base import environment_digest
from lockstep.executors.machine import instruction_set
from lockstep.executors.openvino.executor import OpenVINOExecutor
from lockstep.executors.openvino.loading import compile_artifact, graph_key
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.openvino.runtime import ov
from lockstep.executors.probe import quick_probe
from tests.executors.openvino.support import TINY_LLAMA, random_artifact

[library] = pathlib.Path(ov.__file__).parent.glob("libs/libopenvino.so*")
getters = ctypes.CDLL(str(library))
shape = replace(TINY_LLAMA, num_layers=1, hidden_size=544, intermediate_size=1056)
artifact, options, found = random_artifact(shape, "Q8_0"), ExecutorOptions(), instruction_set()
compiled = compile_artifact(artifact, options, lambda stage, fraction: None)
executor = OpenVINOExecutor(artifact, compiled)
executor.allocate(120, 0)
deterministic = quick_probe(executor, 120).deterministic
print(json.dumps({
    "products": found.products,
    "others": found.others,
    "asked": {name: getattr(getters, f"_ZN2ov{len(name)}{name}Ev")() & 1 for name in (
        "with_cpu_x86_avx2", "with_cpu_x86_avx512_core", "with_cpu_x86_avx512_core_vnni", "with_cpu_x86_bfloat16")},
    "kernels": sorted({node.get_rt_info()["primitiveType"].astype(str) for node in
        compiled.model.get_runtime_model().get_ops() if "primitiveType" in node.get_rt_info()}),
    "limit": compiled.max_pass_tokens,
    "deterministic": deterministic,
    "graph": environment_digest(graph_key(artifact, options)),
    "key": environment_digest(compiled.environment),
}))
"""
"""What we derive, beside what OpenVINO answers when it is asked and the kernels that it took."""


def seen_under(caps: dict[str, str]) -> dict[str, Any]:
    done = in_another_process(caps, "-c", SEEN)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not ON_X86_LINUX, reason="the caps are for x86-64; the library is asked by its name on Linux")
def test_what_is_derived_is_what_the_libraries_really_use() -> None:
    seen = [seen_under(caps) for caps in CAPS]
    for each in seen:
        for name, flag in (("avx2", "avx2"), ("avx512_core", "avx512bw"), ("avx512_core_vnni", "avx512_vnni")):
            assert each["asked"][f"with_cpu_x86_{name}"] == (flag in each["others"])
        assert each["asked"]["with_cpu_x86_bfloat16"] == ("avx512_bf16" in each["others"])
        assert each["deterministic"]
        products = [kernel for kernel in each["kernels"] if "brgemm" in kernel]
        expected = "avx512" if "avx512bw" in each["products"] else "avx2"
        assert products, each["kernels"]
        assert all(expected in kernel for kernel in products), (each["kernels"], expected)
        assert (each["limit"] is not None) == (expected == "avx2")
    keys = {(tuple(each["products"]), tuple(each["others"])): each["key"] for each in seen}
    assert len(set(keys.values())) == len(keys), "another instruction set is another key"
    assert seen[0]["key"] == seen[-1]["key"], "and the same one the same key"
    assert all((each["graph"] == seen[1]["graph"]) == (each["limit"] is not None) for each in seen)


@pytest.mark.skipif(not ON_X86_LINUX, reason="the caps are for x86-64")
@pytest.mark.parametrize(
    ("caps", "code"),
    [pytest.param(CAPS[1], 0, marks=pytest.mark.slow), ({"ONEDNN_MAX_CPU_ISA": "AVX"}, 2)],
    ids=["AVX2", "AVX"],
)
def test_the_embedded_model_keeps_the_promise_under_a_cap_or_is_refused(caps: dict[str, str], code: int) -> None:
    done = in_another_process(caps, "-m", "lockstep", "models", "verify", "pocket://")
    assert done.returncode == code, done.stderr
    assert ("deterministic: true" in done.stdout) == (code == 0)
    assert ("ONEDNN_MAX_CPU_ISA=AVX withholds AVX2" in done.stderr) == (code == 2)
