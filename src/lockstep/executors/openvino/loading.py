"""From an artifact to a compiled paged graph: build or read the stateful graph, transform, compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.artifacts.model import Artifact
from lockstep.errors import ExecutorError, UsageError
from lockstep.executors.openvino.environment import BUILDER_VERSION, instruction_set
from lockstep.executors.openvino.graph import build_decoder
from lockstep.executors.openvino.ir_cache import IRCache
from lockstep.executors.openvino.options import OpenVINOOptions, available_cores
from lockstep.executors.openvino.paged import to_paged
from lockstep.executors.openvino.runtime import CompiledModel, Core, Model, ov

Report = Callable[[str, float], None]


def compile_artifact(artifact: Artifact, options: OpenVINOOptions, report: Report) -> CompiledModel:
    """A compiled paged model: with a cache the weights live in it (and in the page cache) and nowhere else."""
    core = ov.Core()
    device = choose_device(options.device, tuple(core.available_devices))
    model = _stateful_model(core, artifact, options, report)
    report("compile", 0.0)
    try:
        to_paged(model, artifact.config.windows)
        compiled = core.compile_model(model, device, compile_properties(options))
    except RuntimeError as error:
        raise ExecutorError(f"OpenVINO cannot compile {artifact.name}: {error}") from error
    report("compile", 1.0)
    return compiled


def _stateful_model(core: Core, artifact: Artifact, options: OpenVINOOptions, report: Report) -> Model:
    """Read from the cache (mapped), else built, stored and read back, so that the built constants can go."""
    if options.cache_dir is None:
        return _build(artifact, report)
    cache = IRCache(Path(options.cache_dir) / "ir", options.max_cache_bytes)
    key = graph_key(artifact)
    path = cache.find(key)
    if path is not None:
        report("read", 0.0)
        try:
            model = core.read_model(str(path))
        except RuntimeError:
            cache.remove(key)
        else:
            report("read", 1.0)
            return model
    model = _build(artifact, report)
    report("save", 0.0)
    try:
        path = cache.store(key, lambda file: ov.save_model(model, str(file), compress_to_fp16=False))
        stored = core.read_model(str(path))
    except (OSError, RuntimeError):
        # A full or read-only disk costs the next load a build, never this one its model.
        cache.remove(key)
        return model
    report("save", 1.0)
    return stored


def _build(artifact: Artifact, report: Report) -> Model:
    return build_decoder(artifact.config, artifact.weights, lambda fraction: report("build", fraction))


def graph_key(artifact: Artifact) -> dict[str, str]:
    """What a stateful graph depends on; threads, device and precisions come in when it is compiled."""
    return {"artifact": artifact.fingerprint, "builder": BUILDER_VERSION, "openvino": str(ov.get_version())}


def compile_properties(options: OpenVINOOptions) -> dict[str, str]:
    """OpenVINO's names for our options; one stream, because one thread steps one replica."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(num_threads(options)),
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
    """Everything that a model's bits depend on, as strings; ``environment.digest`` makes one key of it."""
    core = ov.Core()
    device = choose_device(options.device, tuple(core.available_devices))
    return {
        "executor": "openvino",
        "openvino": str(ov.get_version()),
        "device": device,
        "processor": str(core.get_property(device, "FULL_DEVICE_NAME")),
        "instruction_set": instruction_set(),
        "threads": str(num_threads(options)),
        "kv_cache_precision": options.kv_cache_precision,
        "inference_precision": options.inference_precision,
        "dynamic_quantization_group_size": str(options.dynamic_quantization_group_size),
        "artifact": artifact.fingerprint,
        "builder": BUILDER_VERSION,
    }


def num_threads(options: OpenVINOOptions) -> int:
    """Threads of one forward pass."""
    return available_cores() if options.threads is None else options.threads
