"""Writes tests/golden/dequantised.npz: random bytes of each encoding, and the float32 values that ggml reads from them.

python -m tools.golden.dequantised      (golden extra: llama-cpp-python, for its libggml-base; made with 0.3.36)
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "dequantised.npz"
ROWS = 6
# Encoding: ggml's function, values of a row (two blocks), bytes of a row, offsets of float16 numbers in a block.
FUNCTIONS: dict[str, tuple[str, int, int, tuple[int, ...]]] = {
    "F16": ("ggml_fp16_to_fp32_row", 64, 128, ()),
    "BF16": ("ggml_bf16_to_fp32_row", 64, 128, ()),
    "Q8_0": ("dequantize_row_q8_0", 64, 2 * 34, (0,)),
    "Q4_0": ("dequantize_row_q4_0", 64, 2 * 18, (0,)),
    "Q4_1": ("dequantize_row_q4_1", 64, 2 * 20, (0, 2)),
    "Q5_0": ("dequantize_row_q5_0", 64, 2 * 22, (0,)),
    "Q5_1": ("dequantize_row_q5_1", 64, 2 * 24, (0, 2)),
    "Q4_K": ("dequantize_row_q4_K", 512, 2 * 144, (0, 2)),
    "Q5_K": ("dequantize_row_q5_K", 512, 2 * 176, (0, 2)),
    "Q6_K": ("dequantize_row_q6_K", 512, 2 * 210, (208,)),
    "Q3_K": ("dequantize_row_q3_K", 512, 2 * 110, (108,)),
    "IQ4_NL": ("dequantize_row_iq4_nl", 64, 2 * 18, (0,)),
    "IQ4_XS": ("dequantize_row_iq4_xs", 512, 2 * 136, (0,)),
}
# Special float16 scales: zeros, the smallest and largest numbers, a subnormal, a negative one.
SCALES = np.array([0x0000, 0x8000, 0x0001, 0x03FF, 0x7BFF, 0xB5A1], "<u2")


def stored(encoding: str, row_bytes: int, halves: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random finite numbers, with a special scale in the first block of each row."""
    raw = rng.integers(0, 256, (ROWS, row_bytes), np.uint8)
    if halves:
        for index, at in enumerate(halves):
            raw[:, at : at + 2] = np.roll(SCALES, index)[:, None].view(np.uint8)
            other = row_bytes // 2 + at
            raw[:, other : other + 2] = rng.uniform(-2, 2, (ROWS, 1)).astype("<f2").view(np.uint8)
        return raw
    words = raw.view("<u2")
    exponents = 0x7C00 if encoding == "F16" else 0x7F80
    words[(words & exponents) == exponents] = 0x3C00
    words[:, 0] = SCALES
    return raw


def main() -> None:
    (library,) = sorted((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so"))
    ggml = ctypes.CDLL(str(library))
    arrays: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(3)
    for encoding, (function, columns, row_bytes, halves) in FUNCTIONS.items():
        raw = stored(encoding, row_bytes, halves, rng)
        values = np.empty((ROWS, columns), np.float32)
        getattr(ggml, function)(
            ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(values.size)
        )
        arrays |= {f"{encoding} stored": raw, f"{encoding} values": values}
    np.savez_compressed(OUT, allow_pickle=False, **arrays)
    print(f"{OUT.name}: {', '.join(FUNCTIONS)}, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
