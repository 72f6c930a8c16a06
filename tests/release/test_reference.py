"""docs/gate.md says what the code says."""

from __future__ import annotations

from lockstep.release.outputs import fingerprints_of
from tools.gate_reference import PAGE, with_tables


def test_its_tables_are_those_of_the_code() -> None:
    """Mended by `python -m tools.gate_reference`."""
    text = PAGE.read_text()
    assert with_tables(text) == text


def test_its_fingerprint_is_ours() -> None:
    assert f"The tokens 1, 2, 3 have `{fingerprints_of([([1, 2, 3], None)])[0]}`" in PAGE.read_text()
