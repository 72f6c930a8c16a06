"""Random blocks of every ggml encoding: draws the bits directly, and chooses scales that give usable weights.

Layouts: ggml's `ggml-common.h`. The scales are chosen so that the weights have zero mean and the given deviation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating]

BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q3_K": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Values and bytes of one block."""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_SPREADS = {
    "Q8_0": 73.9, "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q4_K": 4.6, "Q5_K": 9.2, "Q6_K": 18.5,
    "Q3_K": 2.3, "IQ4_NL": 71.0, "IQ4_XS": 71.0,
}  # fmt: skip
"""Standard deviation of the integers."""


def random_blocks(rng: np.random.Generator, size: tuple[int, ...], encoding: str, deviation: float) -> Bytes:
    """Matrix ``[rows, row bytes]`` in an encoding."""
    num_values, num_bytes = BLOCKS[encoding]
    assert size[1] % num_values == 0, f"{encoding} has blocks of {num_values} values; {size[1]} is not a multiple"
    count = (size[0], size[1] // num_values)
    blocks = np.empty((*count, num_bytes), np.uint8)
    scales = rng.uniform(0.5, 1.5, count) * (deviation / _SPREADS[encoding])
    if encoding in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL"):
        blocks[..., :2] = _half(scales)
        start = 2
    elif encoding in ("Q4_1", "Q5_1"):
        blocks[..., :2] = _half(scales)
        blocks[..., 2:4] = _half(-scales * _middle(encoding) * rng.uniform(0.9, 1.1, count))
        start = 4
    elif encoding in ("Q4_K", "Q5_K"):
        start = _write_k_scales(blocks, scales, rng, _middle(encoding))
    elif encoding == "Q3_K":
        blocks[..., 108:] = _half(scales / 18.5)
        blocks[..., :108] = _bits(rng, count, 108)
        return blocks.reshape(size[0], -1)
    elif encoding == "IQ4_XS":
        blocks[..., :2] = _half(scales / 18.5)
        start = 2
    else:
        blocks[..., 208:] = _half(scales / 85)
        signs = rng.choice(np.array([-1, 1], np.int8), (*count, 16))
        blocks[..., 192:208] = (rng.integers(43, 128, (*count, 16), np.int8) * signs).view(np.uint8)
        blocks[..., :192] = _bits(rng, count, 192)
        return blocks.reshape(size[0], -1)
    blocks[..., start:] = _bits(rng, count, num_bytes - start)
    return blocks.reshape(size[0], -1)


def has_long_blocks(encoding: str) -> bool:
    """True if rows of the encoding, or of a mix like ``Q4_K_M``, are whole blocks of 256 values."""
    return "_K" in encoding or BLOCKS.get(encoding, (1, 0))[0] == 256


def encoding_in_mix(recipe: str, name: str, size: tuple[int, ...], num_layers: int, tied: bool) -> str:
    """Encoding that llama.cpp's quantiser chooses for a matrix in ``Q4_K_M`` or ``Q5_K_M``, for plain models.

    The head is Q6_K, and so are the values and the feed-forward down projections in the first and last eighth of the
    layers and in every third layer between. Rows that are not whole blocks of 256 get a format with blocks of 32.
    """
    chosen = recipe.removesuffix("_M")
    if name.startswith("lm_head") or (tied and name.startswith("model.embed_tokens")):
        chosen = "Q6_K"
    elif name.startswith("model.layers.") and name.split(".")[-2] in ("v_proj", "down_proj"):
        layer, eighth = int(name.split(".")[2]), num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            chosen = "Q6_K"
    return chosen if size[1] % 256 == 0 else _FALLBACKS[chosen]


def _write_k_scales(blocks: Bytes, scales: Floats, rng: np.random.Generator, middle: float) -> int:
    """Write scales of 6 bits, and minima near the middle of the integers' range; returns the offset of the integers."""
    small = rng.integers(20, 64, (*scales.shape, 8), np.uint8)
    minima = np.rint(small * rng.uniform(0.6, 0.74, small.shape)).astype(np.uint8)
    blocks[..., :2] = _half(scales / 41.5)
    blocks[..., 2:4] = _half(scales / 41.5 * middle / 0.67)
    low, high = slice(0, 4), slice(4, 8)
    blocks[..., 4:8] = small[..., low] | (small[..., high] >> 4 << 6)
    blocks[..., 8:12] = minima[..., low] | (minima[..., high] >> 4 << 6)
    blocks[..., 12:16] = (small[..., high] & 15) | ((minima[..., high] & 15) << 4)
    return 16


def _middle(encoding: str) -> float:
    return 7.5 if encoding.startswith("Q4") else 15.5


def _half(values: Floats) -> Bytes:
    return values.astype("<f2")[..., None].view(np.uint8)


def _bits(rng: np.random.Generator, count: tuple[int, int], num_bytes: int) -> Bytes:
    drawn = np.frombuffer(rng.bytes(count[0] * count[1] * num_bytes), np.uint8)
    return drawn.reshape(*count, num_bytes)
