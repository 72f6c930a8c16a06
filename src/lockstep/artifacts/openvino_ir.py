"""An exported OpenVINO model as an artifact: openvino_model.xml and .bin beside config.json and tokenizer.json.

The layout is optimum-intel's for stateful language models. Of the graph only the list of operators is read here, to
refuse what is no such model; OpenVINO reads the rest. Its weights are not looked at, so `Artifact.weights` is empty.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from lockstep.artifacts.fingerprint import files_fingerprint
from lockstep.artifacts.generation_config import from_generation_config
from lockstep.artifacts.huggingface import SMALL_FILES, read_tokenizer
from lockstep.artifacts.layout import MappedWeights, check_config
from lockstep.artifacts.metadata import Metadata, read_json, read_optional_json
from lockstep.artifacts.model import Artifact, ModelConfig
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError

GRAPH, DATA = "openvino_model.xml", "openvino_model.bin"
FORMAT = "openvino"
_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})
_HOW_TO_EXPORT = (
    "export a stateful text-generation model (optimum-cli export openvino --task text-generation-with-past)"
)


def open_openvino(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a directory that holds an exported model.

    Raises:
        ArtifactNotFoundError: a file of it is missing.
        UnsupportedArtifactError: not a stateful language model; says how to export one.
        CorruptArtifactError: naming the file at fault.
    """
    for name in (DATA, "config.json"):
        if not (path / name).is_file():
            raise ArtifactNotFoundError(f"holds {GRAPH} but no {name}; copy the whole export", path=path)
    declared = read_json(path / "config.json")
    generation = read_optional_json(path / "generation_config.json")
    config = _read_config(declared, _num_layers(path / GRAPH))
    check_config(config, declared.path)
    small = [name for name in SMALL_FILES if (path / name).is_file()]
    return Artifact(
        source=source,
        name=path.absolute().name,
        path=path,
        format=FORMAT,
        fingerprint=files_fingerprint(path, [*small, GRAPH, DATA], cache_dir),
        num_bytes=(path / DATA).stat().st_size,
        config=config,
        weights=MappedWeights(path, {}),
        load_tokenizer=functools.partial(read_tokenizer, path, config.vocab_size, (declared, generation)),
        sampling_defaults=from_generation_config(generation.values, generation.path),
    )


def _read_config(declared: Metadata, num_layers: int) -> ModelConfig:
    """Read what the executor and the user want to know; the graph says the rest, so any architecture will do."""
    num_heads = declared.integer("num_attention_heads")
    hidden_size = declared.integer("hidden_size")
    return ModelConfig(
        architecture=declared.text("model_type", "unknown"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=declared.integer("intermediate_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=declared.integer("num_key_value_heads", num_heads),
        head_dim=declared.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=declared.integer("vocab_size"),
        max_model_len=declared.integer("max_position_embeddings"),
        rms_norm_eps=declared.real("rms_norm_eps", 1e-6),
        rope_theta=declared.real("rope_theta", 10000.0),
        tied_embeddings=declared.flag("tie_word_embeddings", False),
    )


def _num_layers(graph: Path) -> int:
    """Layers with a KV state; refuses a graph that is not a stateful decoder around one attention per layer."""
    inputs, operators = _scan(graph)
    problem = None
    cached = sorted(name for name in inputs if name.startswith("past_key_values"))
    if cached:
        problem = f"takes its KV cache as inputs ({cached[0]}, …)"
    elif inputs != _INPUTS:
        wrong = [f"lacks input {name!r}" for name in sorted(_INPUTS - inputs)]
        wrong += [f"has input {name!r}" for name in sorted(inputs - _INPUTS)]
        problem = "; ".join(wrong)
    elif not operators["ReadValue"]:
        problem = "has no state"
    elif operators["ReadValue"] != 2 * operators["ScaledDotProductAttention"]:
        problem = (
            f"has {operators['ReadValue']} states and {operators['ScaledDotProductAttention']} "
            "ScaledDotProductAttention operators, where each layer should have two and one"
        )
    if problem is not None:
        raise UnsupportedArtifactError(f"{problem}; {_HOW_TO_EXPORT}", path=graph)
    return operators["ScaledDotProductAttention"]


def _scan(graph: Path) -> tuple[set[str], Counter[str]]:
    """Names of the inputs, and how often each type of operator occurs."""
    inputs: set[str] = set()
    operators: Counter[str] = Counter()
    try:
        for _, element in ElementTree.iterparse(graph):
            if element.tag == "layer":
                operators[element.get("type", "")] += 1
                if element.get("type") == "Parameter":
                    port = element.find("output/port")
                    names = "" if port is None else port.get("names", "")
                    inputs.add(names.split(",")[0] or element.get("name", ""))
                element.clear()
    except ElementTree.ParseError as error:
        raise CorruptArtifactError(f"is not an OpenVINO graph ({error})", path=graph) from error
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=graph) from error
    return inputs, operators
