"""Embedded model in plain torch: a small Llama in the rotate-half convention of Hugging Face.

The module does not depend on data or files. Norms and the residual stream stay in float32 under autocast; every matrix
is bias-free and the head is tied to the embedding, so an artifact has one matrix fewer. torch is not installed where
types are checked, hence the ignores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; each matrix dimension is a multiple of 32, the block of Q8_0."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 768
    max_context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Norm(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, tokens, head_dim], with halves paired as in Hugging Face."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Pre-norm attention with grouped queries, then a SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm = Norm(shape.hidden, shape.norm_eps)
        self.q = nn.Linear(shape.hidden, queries, bias=False)
        self.k = nn.Linear(shape.hidden, keys, bias=False)
        self.v = nn.Linear(shape.hidden, keys, bias=False)
        self.o = nn.Linear(queries, shape.hidden, bias=False)
        self.ffn_norm = Norm(shape.hidden, shape.norm_eps)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.shape.head_dim)
        h = self.attn_norm(x)
        q = rotate(self.q(h).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(heads).transpose(1, 2), cos, sin)
        v = self.v(h).view(heads).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.ffn_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Pocket(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Network from token ids [batch, tokens] to hidden states or logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_context, dtype=torch.float32), shape.rope_theta**-steps)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Scaled normal initialisation; projections back into the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = (2 * self.shape.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.04 * shrink)

    def hidden(self, ids: Tensor, shown: Tensor | None = None) -> Tensor:
        """Final normed states, [batch, tokens, hidden]; ids that are not `shown` are embedded as zeros."""
        cos, sin = self.get_buffer("cos")[: ids.shape[1]], self.get_buffer("sin")[: ids.shape[1]]
        x = self.embed(ids) if shown is None else self.embed(ids) * shown[..., None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Vocabulary logits of selected states; the caller selects the positions."""
        return functional.linear(states, self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))
