"""Test run with perturbed weights of the embedded model: tests must not depend on the sampled tokens.

    python -m tools.perturbed                             # pytest with the model of seed 0
    python -m tools.perturbed --seed 3 tests/server -x    # other arguments are passed to pytest

Another processor rounds slightly differently, so sampled answers can have other tokens there. Noise on the weights has
this effect on any machine, and a larger one. The tool copies the project to a temporary folder, adds noise to the model
there, and runs pytest in the copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
POCKET = Path("src", "lockstep", "pocket", "pocket.gguf")
NOISE = 0.2
"""Noise relative to each matrix's standard deviation: sampled answers differ from their first or second token on."""
OF_THE_WEIGHTS = ("tests/test_pocket.py::test_the_evaluation_of_the_model_card_is_reproducible",)
"""Tests of figures that belong to the weights in the package; they are left out."""


def perturb(path: Path, seed: int, noise: float = NOISE) -> None:
    """Add noise to the values of a GGUF file's Q8_0 matrices, in place; the scales of their blocks do not change."""
    draw = np.random.default_rng(seed)
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.tensor_type != GGMLQuantizationType.Q8_0:
            continue
        blocks = tensor.data.reshape(-1, 34)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = blocks[:, 2:].view(np.int8)
        spread = noise * float((values * scales).std())
        steps = draw.standard_normal(values.shape, np.float32) * spread / np.maximum(scales, np.finfo(np.float32).tiny)
        values[:] = np.clip(np.rint(values + steps), -127, 127).astype(np.int8)
    del tensor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.perturbed", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="perturbed-") as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        perturb(copy / POCKET, options.seed)
        path = os.pathsep.join(filter(None, (str(copy / "src"), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", *(f"--deselect={each}" for each in OF_THE_WEIGHTS), *arguments]
        return subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
