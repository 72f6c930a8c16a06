"""From an artifact to a compiled paged graph: build or read the stateful graph, transform, compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.openvino_ir import FORMAT as EXPORTED
from lockstep.artifacts.openvino_ir import GRAPH
from lockstep.errors import CorruptArtifactError, ExecutorError, UnsupportedArtifactError, UsageError
from lockstep.executors.build_cache import BuildCache
from lockstep.executors.machine import available_cores, instruction_set, unsupported_reason
from lockstep.executors.openvino.graph import BUILDER_VERSION, build_decoder
from lockstep.executors.openvino.ops import OwnAttention, own_attention
from lockstep.executors.openvino.paged import LOGITS, to_paged, use_own_attention
from lockstep.executors.openvino.precision import has_floats, precision_summary
from lockstep.executors.openvino.products import MAX_PASS_TOKENS, needs_short_passes, split_products
from lockstep.executors.openvino.runtime import CompiledModel, Core, Model, ov, the_core
from lockstep.executors.options import ExecutorOptions

log = logging.getLogger(__name__)
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled paged graph, and what to know for running it."""

    model: CompiledModel
    attention: OwnAttention | None
    """None: OpenVINO's operator."""
    max_pass_tokens: int | None
    """Tokens that a forward pass may have; None: any number."""
    environment: Mapping[str, str]
    """See ``environment_of``."""


def compile_artifact(artifact: Artifact, options: ExecutorOptions, report: Report) -> Compiled:
    """A compiled paged model: with a cache the weights live in it (and in the page cache) and nowhere else."""
    core = the_core()
    device = choose_device(options.device, tuple(core.available_devices))
    _check_quantize(artifact, options)
    if device == "CPU" and (reason := unsupported_reason()):
        raise UsageError(reason)
    model = _stateful_model(core, artifact, options, report)
    report("compile", 0.0)
    try:
        to_paged(model, artifact.config.windows)
        own = choose_attention(artifact, options, device)
        if own is not None:
            try:
                use_own_attention(model, own, artifact.config)
            except UnsupportedArtifactError as error:
                _do_without(artifact, options, str(error))
                own = None
        is_limited = instruction_set().has_row_dependent_kernels and needs_short_passes(model)
        compiled = core.compile_model(model, device, compile_properties(options))
    except RuntimeError as error:
        raise ExecutorError(f"OpenVINO cannot compile {artifact.name}: {error}") from error
    report("compile", 1.0)
    environment = environment_of(artifact, options, own)
    return Compiled(compiled, own, MAX_PASS_TOKENS if is_limited else None, environment)


def choose_attention(artifact: Artifact, options: ExecutorOptions, device: str) -> OwnAttention | None:
    """Our attention operator where it is wanted and can be had; None: OpenVINO's.

    Raises:
        UsageError: it was asked for, or a KV precision that only it has, and it cannot be had.
    """
    if options.attention == "openvino" or options.kv_cache_precision == "u8":
        return None
    if device != "CPU":
        found: OwnAttention | str = f"it runs on the CPU only, not on {device}"
    else:
        found = own_attention(artifact.config, options.kv_cache_precision, instruction_set())
    if isinstance(found, OwnAttention):
        return found
    _do_without(artifact, options, found)
    return None


def _do_without(artifact: Artifact, options: ExecutorOptions, reason: str) -> None:
    """Say why our operator cannot be had; UsageError where it is needed."""
    if options.attention == "lockstep" or options.kv_cache_precision == "int8":
        wanted = "attention=lockstep" if options.attention == "lockstep" else "kv_cache_precision=int8"
        raise UsageError(f"{wanted} needs Lockstep's attention operator, which cannot be had here: {reason}")
    log.warning("%s: OpenVINO's attention operator is used, not Lockstep's: %s", artifact.name, reason)


def _stateful_model(core: Core, artifact: Artifact, options: ExecutorOptions, report: Report) -> Model:
    """Read from the cache (mapped), else built, stored and read back, so that the built constants can go.

    An exported model is its own cache: its graph is read where it lies.
    """
    if artifact.format == EXPORTED:
        return _exported(core, artifact, report)
    if options.cache_dir is None:
        return _build(artifact, options, report)
    # What is kept is the stateful graph: the paged one loses the runtime information of its attention when it is saved.
    cache = BuildCache(Path(options.cache_dir) / "ir", options.max_cache_bytes, ("model.xml", "model.bin"))
    key = graph_key(artifact, options)
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
    model = _build(artifact, options, report)
    report("save", 0.0)
    try:
        path = cache.store(key, lambda file: ov.save_model(model, str(file), compress_to_fp16=False))
        stored = core.read_model(str(path))
    except (OSError, RuntimeError) as error:
        # A full or read-only disk costs the next load a build, never this one its model.
        reason = " ".join(str(error).split())
        log.warning("%s: its graph is not kept, so the next load builds it again: %s", artifact.name, reason)
        cache.remove(key)
        return model
    report("save", 1.0)
    return stored


def _exported(core: Core, artifact: Artifact, report: Report) -> Model:
    report("read", 0.0)
    try:
        model = core.read_model(str(artifact.path / GRAPH))
    except RuntimeError as error:
        raise CorruptArtifactError(f"OpenVINO cannot read it: {_last_line(error)}", path=artifact.path) from error
    if not any(LOGITS in port.get_names() for port in model.outputs):
        raise UnsupportedArtifactError(f"the exported graph has no output {LOGITS!r}", path=artifact.path)
    size = model.output(LOGITS).get_partial_shape()[-1]
    if size.is_static and size.get_length() != artifact.config.vocab_size:
        raise CorruptArtifactError(
            f"the graph has {size.get_length()} logits and config.json a vocabulary of {artifact.config.vocab_size}",
            path=artifact.path,
        )
    _split_where_needed(model, artifact)
    report("read", 1.0)
    return model


def _last_line(error: RuntimeError) -> str:
    """The line of one of OpenVINO's messages that says something; the ones before name its source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _build(artifact: Artifact, options: ExecutorOptions, report: Report) -> Model:
    for change, count in precision_summary(artifact.weights, options.quantize).items():
        log.info("%s: %d matrices %s", artifact.name, count, change)
    model = build_decoder(
        artifact.config, artifact.weights, lambda fraction: report("build", fraction), options.quantize
    )
    _split_where_needed(model, artifact)
    return model


def _split_where_needed(model: Model, artifact: Artifact) -> None:
    if instruction_set().has_row_dependent_kernels:
        num_split = split_products(model)
        log.debug("%s: %d products split for this processor's kernels", artifact.name, num_split)


def _check_quantize(artifact: Artifact, options: ExecutorOptions) -> None:
    if options.quantize is not None and not has_floats(artifact.weights):
        raise UsageError(
            f"quantize is {options.quantize!r} and {artifact.name} has no float weights to quantise; leave it out"
        )


def graph_key(artifact: Artifact, options: ExecutorOptions) -> dict[str, str]:
    """Everything that a stateful graph depends on; threads, device and other precisions come in when it is compiled."""
    return {
        "artifact": artifact.fingerprint,
        "builder": BUILDER_VERSION,
        "openvino": str(ov.get_version()),
        "quantize": options.quantize or "none",
        "products": "split" if instruction_set().has_row_dependent_kernels else "whole",
    }


def compile_properties(options: ExecutorOptions) -> dict[str, str]:
    """OpenVINO's names for our options; one stream, because one thread steps one replica."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(num_threads(options)),
        "INFERENCE_PRECISION_HINT": options.inference_precision,
        # Of OpenVINO's own operator; it knows no int8.
        "KV_CACHE_PRECISION": "f16" if options.kv_cache_precision == "int8" else options.kv_cache_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.dynamic_quantization_group_size),
    }


def choose_device(device: str, available: tuple[str, ...]) -> str:
    """OpenVINO's name of the device; an explicit one that is missing is an error, never a silent CPU."""
    name = "CPU" if device == "auto" else device.upper()
    if not any(each == name or each.startswith(f"{name}.") for each in available):
        there = ", ".join(each.lower() for each in available) or "none"
        raise UsageError(f"device {device!r} is not there; available devices: {there}")
    return name


def check_device(device: str) -> None:
    """UsageError where this machine has no such device."""
    choose_device(device, tuple(the_core().available_devices))


def expected_environment(artifact: Artifact, options: ExecutorOptions) -> dict[str, str]:
    """The environment before loading; an exported graph may then turn out to need OpenVINO's attention."""
    device = choose_device(options.device, tuple(the_core().available_devices))
    return environment_of(artifact, options, choose_attention(artifact, options, device))


def environment_of(artifact: Artifact, options: ExecutorOptions, own: OwnAttention | None) -> dict[str, str]:
    """Everything that a model's bits depend on, as strings; ``environment.digest`` makes one key of it."""
    device = choose_device(options.device, tuple(the_core().available_devices))
    return {
        "executor": "openvino",
        "openvino": str(ov.get_version()),
        "device": device,
        "processor": str(the_core().get_property(device, "FULL_DEVICE_NAME")),
        "instruction_set": str(instruction_set()),
        "attention": "openvino" if own is None else f"lockstep {own.version}",
        "threads": str(num_threads(options)),
        "kv_cache_precision": options.kv_cache_precision,
        "inference_precision": options.inference_precision,
        "dynamic_quantization_group_size": str(options.dynamic_quantization_group_size),
        "quantize": options.quantize or "none",
        "artifact": artifact.fingerprint,
        "builder": BUILDER_VERSION,
    }


def num_threads(options: ExecutorOptions) -> int:
    """Threads of one forward pass."""
    return available_cores() if options.threads is None else options.threads
