"""Program of a model: translates a model's configuration into operations of the native library (``program.hpp``).

Differences between architectures are data: fields of `ModelConfig`, and which tensors exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.artifacts.gemma4 import (
    AFTER_PER_LAYER,
    LAYER_SCALAR,
    PER_LAYER_EMBEDDING,
    PER_LAYER_GATE,
    PER_LAYER_NORM,
    PER_LAYER_OUT,
    PER_LAYER_PROJECTION,
)
from lockstep.artifacts.layout import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, LM_HEAD, POSITIONS, TOKEN_TYPE, layer_norms
from lockstep.artifacts.model import ModelConfig
from lockstep.core.groups import ONE_GROUP
from lockstep.executors.kv_layout import BLOCK_TOKENS, KVLayout, Place, kv_bytes, kv_layout
from lockstep.executors.native.assembly import Assembly, Frequencies, Vector
from lockstep.executors.native.operations import NONE, Action, AttentionPart, Program
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.recurrent import convolution, delta_net, head_gates, separate_gates
from lockstep.executors.native.weights import KINDS

HEAD_DIM_UNIT, MAX_HEAD_DIM = 8, 512
"""Head sizes that native attention supports: multiples of the first, up to the second."""
NUM_STORED_LAYERS = 2
"""Layers whose keys and values an encoder stores at a time: a stage reads one layer and writes the next."""


def build_program(
    config: ModelConfig,
    matrices: Mapping[str, Matrix],
    vector: Vector,
    has: Callable[[str], bool],
    rotations: Frequencies,
    storage: str,
) -> Program:
    """Build the forward pass of a model.

    Args:
        matrices: matrices by canonical name.
        vector: reads one of the artifact's vectors.
        has: tests whether the artifact has a tensor.
        rotations: frequencies of rotations.
        storage: precision of keys and values: ``f32``, ``f16`` or ``int8``.

    Raises:
        CorruptArtifactError: a vector is missing, has the wrong size or is not finite.
    """
    layout = _encoder_layout(config, storage) if config.bidirectional else kv_layout(config, storage)
    return _build(Assembly(config, matrices, vector, has, rotations, layout, _num_kept(config)))


def _encoder_layout(config: ModelConfig, storage: str) -> KVLayout:
    """The layout of an encoder: layers by turns in a few places, and then what a token keeps."""
    size = kv_bytes(config.num_kv_heads, config.head_dim, storage)
    places = [Place(0, 0, layer % NUM_STORED_LAYERS * size) for layer in range(config.num_layers)]
    kept_bytes = 4 * BLOCK_TOKENS * _num_kept(config)
    return KVLayout(NUM_STORED_LAYERS * size + kept_bytes, ONE_GROUP, tuple(places), ((),) * config.num_layers)


def _num_kept(config: ModelConfig) -> int:
    return config.hidden_size + config.num_heads * config.head_dim if config.bidirectional else 0


def _build(assembly: Assembly) -> Program:
    config, program = assembly.config, assembly.program
    is_staged = config.bidirectional
    assembly.state = program.state = assembly.buffer("state", config.hidden_size, is_of_step=not is_staged)
    _embed(assembly)
    for layer in range(config.num_layers):
        _mixer(assembly, layer)
        if is_staged and layer == config.num_layers - 1:
            program.state = assembly.buffer("result", config.hidden_size, is_of_step=True)
        _mlp(assembly, layer)
        _end_layer(assembly, layer)
    if is_staged:
        _end_encoder(assembly)
    else:
        _end_decoder(assembly)
    return program


def _embed(assembly: Assembly) -> None:
    config, vector = assembly.config, NONE
    tables = [EMBEDDING, POSITIONS] if config.num_positions else [EMBEDDING]
    if config.num_token_types:
        vector = assembly.add_vector(assembly.vector(TOKEN_TYPE, config.num_token_types * config.hidden_size))
    assembly.add(
        Action.EMBED, assembly.state, factor=config.embedding_scale, vector=vector, offset=config.position_offset,
        columns=config.num_token_types,
        **assembly.weights(tables),
    )  # fmt: skip
    if config.embedding_norm:
        assembly.norm(assembly.state, assembly.state, EMBEDDING_NORM, config.hidden_size)
    if config.per_layer_size:
        _embed_layers(assembly)


def _embed_layers(assembly: Assembly) -> None:
    """A token's embedding for each layer, side by side: (row of a table * sqrt(size) + norm(product of the
    token's own embedding / sqrt(its size))) / sqrt(2), with factors multiplied into the first and the norm."""
    config, size = assembly.config, assembly.config.per_layer_size
    columns, share = size * config.num_layers, 0.5**0.5
    embedded = assembly.buffer("embeddings of layers", columns, is_of_step=True)
    projected = assembly.buffer("projected embeddings of layers", columns)
    assembly.add(Action.EMBED, embedded, factor=size**0.5 * share, **assembly.weights([PER_LAYER_EMBEDDING]))
    assembly.product(assembly.state, [PER_LAYER_PROJECTION], projected, divisor=config.hidden_size**0.5)
    weights = assembly.norm_weights(PER_LAYER_NORM, size) * np.float32(share)
    assembly.add(
        Action.NORM, projected, in_=projected, columns=size, heads=config.num_layers, stride=size,
        vector=assembly.add_vector(weights), epsilon=config.rms_norm_eps,
    )  # fmt: skip
    assembly.add(Action.ADD, embedded, in_=projected, columns=columns)


def _end_layer(assembly: Assembly, layer: int) -> None:
    """Add what the layer makes of the token's embedding for it, and scale the state."""
    config, prefix, size = assembly.config, f"model.layers.{layer}.", assembly.config.per_layer_size
    if size:
        embedded, gates = (
            assembly.buffer("embeddings of layers", size * config.num_layers, is_of_step=True),
            assembly.buffer("gates of a layer", size),
        )
        inputs = assembly.buffer("inputs of a layer", size)
        assembly.product(assembly.state, [prefix + PER_LAYER_GATE], gates)
        assembly.add(Action.COPY, inputs, in_=embedded, in_at=layer * size, columns=size)
        assembly.multiply(gates, inputs, size, function=config.activation)
        assembly.to_state(inputs, prefix + PER_LAYER_OUT, prefix, AFTER_PER_LAYER)
    if config.layer_scalars and assembly.has(prefix + LAYER_SCALAR):
        [factor] = assembly.vector(prefix + LAYER_SCALAR, 1).tolist()
        assembly.add(Action.SCALE, assembly.state, in_=assembly.state, columns=config.hidden_size, factor=factor)


def _end_decoder(assembly: Assembly) -> None:
    config, program = assembly.config, assembly.program
    program.final_begin = len(program.ops)
    program.gathered = assembly.buffer("gathered", config.hidden_size)
    program.hidden = assembly.buffer("hidden", config.hidden_size)
    assembly.norm(program.gathered, program.hidden, FINAL_NORM, config.hidden_size)
    program.head_begin = len(program.ops)
    program.logits = assembly.buffer("logits", config.vocab_size)
    head = EMBEDDING if config.tied_embeddings else LM_HEAD
    assembly.product(program.hidden, [head], program.logits, divisor=config.logits_divisor)
    if config.logits_cap:
        cap = {"columns": config.vocab_size, "factor": config.logits_cap}
        assembly.add(Action.CAP, program.logits, in_=program.logits, **cap)


def _end_encoder(assembly: Assembly) -> None:
    """The last stage ends with the hidden states. The head is applied to vectors that were pooled from them."""
    config, program = assembly.config, assembly.program
    if config.final_norm:
        assembly.norm(assembly.state, program.state, FINAL_NORM, config.hidden_size)
    program.final_begin = program.head_begin = len(program.ops)
    program.gathered = program.hidden = x = assembly.buffer("hidden", config.hidden_size)
    for index, layer in enumerate(config.head):
        name, is_last = f"head.{index}", index == len(config.head) - 1
        out = assembly.buffer("logits" if is_last else f"output of {name}", layer.size)
        if layer.activation:
            assembly.gate(x, [f"{name}.weight"], out, layer.activation)
        else:
            assembly.product(x, [f"{name}.weight"], out)
        if layer.norm:
            assembly.norm(out, out, f"{name}.norm", layer.size)
        x = out
    program.logits = x if config.head else NONE


def _mixer(assembly: Assembly, layer: int) -> None:
    """The part of a layer in which a token depends on those before it."""
    kind, prefix, norms = assembly.config.mixer_of(layer), f"model.layers.{layer}.", layer_norms(assembly.config)
    if kind == "attention":
        return _attention(assembly, layer)
    add, last = (delta_net, "linear_attn") if kind == "delta_net" else (convolution, "conv")
    out = add(assembly, layer, assembly.normed(prefix, norms.before_attention))
    return assembly.to_state(out, f"{prefix}{last}.out_proj.weight", prefix, norms.after_attention)


def _attention(assembly: Assembly, layer: int) -> None:
    config, prefix, norms = assembly.config, f"model.layers.{layer}.", layer_norms(assembly.config)
    head_dim, kv_heads = config.head_dim_of(layer), config.kv_heads_of(layer)
    queries, keys = config.num_heads * head_dim, kv_heads * head_dim
    own, parts = f"{prefix}self_attn.", "qkv" if config.owns_kv(layer) else "q"
    columns = queries + (2 * keys if config.owns_kv(layer) else 0)
    together = assembly.buffer(f"attention {columns}", columns, is_of_step=not config.bidirectional)
    mixed = assembly.buffer(f"attended {queries}", queries, is_of_step=True)
    before = norms.before_attention if layer or config.first_norm else None
    projected = together
    if config.attention_gate:
        projected = assembly.buffer("queries, gates, keys and values", 2 * (queries + keys), is_of_step=True)
    normed = assembly.normed(prefix, before)
    assembly.product(normed, [f"{own}{each}_proj.weight" for each in parts], projected)
    if config.attention_gate:
        separate_gates(assembly, projected, together, 2 * keys)
    gates = head_gates(assembly, normed, f"{own}g_proj.weight") if config.head_gates else NONE
    of_heads: dict[str, int] = {}
    if config.qk_norm_whole:
        assembly.norm(together, together, f"{own}q_norm", queries)
        assembly.norm(together, together, f"{own}k_norm", keys, at=queries)
    elif config.qk_norm:
        each_head = [assembly.norm_weights(f"{own}{each}_norm", head_dim) for each in parts if each != "v"]
        if config.value_norm and config.owns_kv(layer):
            each_head.append(np.ones(head_dim, np.float32))
        of_heads = {"vector": assembly.add_vector(np.concatenate(each_head)), "num_norms": len(each_head)}
    scale = 1.0 / math.sqrt(head_dim) if config.attention_scale is None else config.attention_scale
    window = config.window_of(layer)
    fields: dict[str, float] = {
        "place": _place(assembly, layer), "window": window, "rotary": _rotary(assembly, layer), "scale": scale,
        "columns": head_dim, "kv_heads": kv_heads, "epsilon": config.rms_norm_eps, **of_heads,
    }  # fmt: skip
    if config.sinks:
        fields["sinks"] = assembly.add_vector(assembly.vector(f"{own}sinks", config.num_heads))
    if config.query_scaling is not None:
        fields |= {"query_period": config.query_scaling.period, "query_beta": config.query_scaling.beta}
    if config.bidirectional:
        size = config.hidden_size
        assembly.add(Action.ATTENTION, NONE, in_=together, part=AttentionPart.STORE, **fields)
        assembly.add(Action.SAVE, NONE, in_=assembly.state, columns=size)
        assembly.add(Action.SAVE, NONE, in_=together, out_at=size, columns=queries)
        assembly.add(Action.ATTENTION, mixed, in_at=size, part=AttentionPart.ATTEND, **fields)
        assembly.add(Action.LOAD, assembly.state, columns=size)
    else:
        part = AttentionPart.WHOLE if config.owns_kv(layer) else AttentionPart.READ
        assembly.add(Action.ATTENTION, mixed, in_=together, part=part, **fields)
    if config.attention_gate:
        size = config.head_dim
        assembly.multiply(projected, mixed, size, at=size, function="sigmoid", heads=config.num_heads, stride=2 * size)
    if config.head_gates:
        assembly.add(Action.SCALE_PARTS, mixed, in_=gates, columns=head_dim, heads=config.num_heads, stride=1)
    assembly.to_state(mixed, f"{own}o_proj.weight", prefix, norms.after_attention)


def _place(assembly: Assembly, layer: int) -> int:
    """Index of the place of the keys and values that a layer reads."""
    place = assembly.program.layout.layers[assembly.config.kv_owners[layer] if assembly.config.kv_owners else layer]
    assert place is not None, "an owner stores keys and values"
    assembly.program.places.append(place)
    return len(assembly.program.places) - 1


def _mlp(assembly: Assembly, layer: int) -> None:
    config, prefix, norms = assembly.config, f"model.layers.{layer}.", layer_norms(assembly.config)
    gate, up, down = (f"{prefix}mlp.{each}_proj.weight" for each in ("gate", "up", "down"))
    is_packed = assembly.matrices[down].encoding in KINDS
    size = config.intermediate_size_of(layer)
    gated = assembly.buffer(f"{size} gated{' groups' * is_packed}", size, is_groups=is_packed)
    normed = assembly.normed(prefix, norms.before_mlp)
    assembly.gate(normed, [gate, up] if config.gated else [up], gated, config.activation)
    assembly.to_state(gated, down, prefix, norms.after_mlp)


def _rotary(assembly: Assembly, layer: int) -> int:
    config = assembly.config
    if layer in config.unrotated_layers:
        return NONE
    return int(config.local_rope_theta is not None and config.window_of(layer) > 0)
