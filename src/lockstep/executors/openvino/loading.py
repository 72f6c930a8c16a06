"""From an artifact to a compiled paged graph: build or read the stateful graph, transform, compile."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.artifacts.model import Artifact
from lockstep.errors import ExecutorError, UsageError
from lockstep.executors.openvino.environment import BUILDER_VERSION, instruction_set
from lockstep.executors.openvino.graph import build_decoder
from lockstep.executors.openvino.options import OpenVINOOptions, available_cores
from lockstep.executors.openvino.paged import to_paged
from lockstep.executors.openvino.runtime import CompiledModel, ov


def compile_artifact(
    artifact: Artifact, options: OpenVINOOptions, report: Callable[[str, float], None]
) -> CompiledModel:
    """A compiled paged model; the weights live in it and nowhere else."""
    core = ov.Core()
    device = choose_device(options.device, tuple(core.available_devices))
    model = build_decoder(artifact.config, artifact.weights, lambda fraction: report("build", fraction))
    report("compile", 0.0)
    try:
        to_paged(model)
        compiled = core.compile_model(model, device, compile_properties(options))
    except RuntimeError as error:
        raise ExecutorError(f"OpenVINO cannot compile {artifact.name}: {error}") from error
    report("compile", 1.0)
    return compiled


def compile_properties(options: OpenVINOOptions) -> dict[str, str]:
    """OpenVINO's names for our options; one stream, because one thread steps one replica."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(_threads(options)),
        "INFERENCE_PRECISION_HINT": options.inference_precision,
        "KV_CACHE_PRECISION": options.kv_cache_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.dynamic_quantization_group_size),
    }


def choose_device(wanted: str, available: tuple[str, ...]) -> str:
    """OpenVINO's name of the device; an explicit one that is missing is an error, never a silent CPU."""
    name = "CPU" if wanted == "auto" else wanted.upper()
    if not any(device == name or device.startswith(f"{name}.") for device in available):
        there = ", ".join(device.lower() for device in available) or "none"
        raise UsageError(f"device {wanted!r} is not there; available devices: {there}")
    return name


def environment_of(artifact: Artifact, options: OpenVINOOptions) -> dict[str, str]:
    """Everything that a model's bits depend on, as strings."""
    return {
        "executor": "openvino",
        "openvino": str(ov.get_version()),
        "instruction_set": instruction_set(),
        "device": choose_device(options.device, tuple(ov.Core().available_devices)),
        "threads": str(_threads(options)),
        "kv_cache_precision": options.kv_cache_precision,
        "inference_precision": options.inference_precision,
        "dynamic_quantization_group_size": str(options.dynamic_quantization_group_size),
        "artifact": artifact.fingerprint,
        "builder": BUILDER_VERSION,
    }


def _threads(options: OpenVINOOptions) -> int:
    return available_cores() if options.threads is None else options.threads
