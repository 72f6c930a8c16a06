"""Counter-based randomness: a pure function of a seed and a position, so that there is no state to carry or to lose.

Philox4x64 with ten rounds, as published in J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
and as `numpy.random.Philox` computes it. Python integers are used because one draw per token costs less this way than
building numpy's generator object.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 64-bit words for a 256-bit counter and a 128-bit key, least significant word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = c0 * 0xD2E7470EE14C6C93
        high = c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & _MASK, (low >> 64) ^ c3 ^ k1, low & _MASK
        k0 = (k0 + 0x9E3779B97F4A7C15) & _MASK
        k1 = (k1 + 0xBB67AE8584CAA73B) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: int, position: int, attempt: int = 0) -> tuple[float, float, float, float]:
    """Four numbers of [0, 1) for the token at that position.

    They have 52 bits, so that for any positive finite `total` the product `uniform * total` stays below `total`.

    Args:
        seed: the request's seed; its low 64 bits count.
        position: index of the token in its sequence.
        attempt: further draws for the same token.
    """
    a, b, c, d = philox4x64((position, attempt, 0, 0), (seed & _MASK, 0))
    scale = 2.0**-52
    return (a >> 12) * scale, (b >> 12) * scale, (c >> 12) * scale, (d >> 12) * scale
