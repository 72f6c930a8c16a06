"""What this machine has never run is tried in a process that may crash."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.engine.options import LoadOptions
from lockstep.errors import ArtifactError, CorruptArtifactError, UsageError
from lockstep.executors.options import ExecutorOptions
from lockstep.pocket import pocket_path
from lockstep.worker.messages import Load, TrialOptions
from lockstep.worker.preflight import COMMAND, run_trial, try_unknown


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


COUNTED = "import pathlib, sys; p = pathlib.Path({!r}); p.write_text(p.read_text() + 'x')"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Load]:
    """A load of a model file with a cache of its own."""
    model = tmp_path / "model.gguf"
    shutil.copy(pocket_path(), model)

    def make(source: str = str(model), trial: TrialOptions = TrialOptions(), kv: str = "f16") -> Load:  # noqa: B008  # frozen
        options = LoadOptions(cache_dir=tmp_path / "cache", executor=ExecutorOptions(kv_cache_precision=kv))
        return Load("model", source, options, trial)

    return make


def test_a_model_that_crashes_is_an_error_that_names_the_signal(load: Callable[..., Load]) -> None:
    crash = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ArtifactError, match=r"model\.gguf: .*signal 11 \(SIGSEGV\)"):
        try_unknown(load(), lambda stage, fraction: None, crash)


def test_crashed_trial_is_repeated_and_successful_one_is_not(load: Callable[..., Load], tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("")
    stages: list[str] = []

    def attempt(load: Load, code: str) -> None:
        try_unknown(load, lambda stage, fraction: stages.append(stage), python(code))

    with pytest.raises(ArtifactError):
        attempt(load(), COUNTED.format(str(count)) + "; import os; os.abort()")
    for _ in range(3):
        attempt(load(), COUNTED.format(str(count)))
    assert count.read_text() == "xx"
    assert stages == ["trial", "trial"]
    attempt(load(kv="int8"), COUNTED.format(str(count)))
    assert count.read_text() == "xxx", "other options are another thing to try"
    with pytest.raises(ArtifactError):
        attempt(load(trial=TrialOptions(is_forced=True)), "import os; os.abort()")
    attempt(load(), COUNTED.format(str(count)))
    assert count.read_text() == "xxxx", "what a worker ended over has to come through again"


def test_a_trial_without_end_is_ended(load: Callable[..., Load]) -> None:
    with pytest.raises(ArtifactError, match=r"more than 0\.3 s"):
        run_trial(load(trial=TrialOptions(limit_s=0.3)), python("import time; time.sleep(60)"))


def test_a_trial_that_exits_without_a_report_is_an_error(load: Callable[..., Load]) -> None:
    with pytest.raises(ArtifactError, match="exit code 3: so it goes"):
        run_trial(load(), python("import sys; print('so it goes'); sys.exit(3)"))


def test_trusted_sources_and_disabled_trials_are_not_tried(load: Callable[..., Load]) -> None:
    crash = python("import os; os.abort()")
    for exempt in (load("stub://x"), load("pocket://"), load(trial=TrialOptions(enabled=False))):
        try_unknown(exempt, lambda stage, fraction: None, crash)
    with pytest.raises(ArtifactError, match="SIGABRT"):
        try_unknown(load("pocket://+lora=pocket://legal"), lambda stage, fraction: None, crash)


def test_a_real_trial_loads_a_real_model(load: Callable[..., Load], tmp_path: Path) -> None:
    try_unknown(load(), lambda stage, fraction: None)
    assert len(list((tmp_path / "cache" / "trials").iterdir())) == 1


def test_a_real_trial_raises_the_same_errors_as_loading(load: Callable[..., Load], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(pocket_path().read_bytes()[:100_000])
    with pytest.raises(CorruptArtifactError, match=r"damaged\.gguf"):
        run_trial(load(str(damaged)), COMMAND)
    options = LoadOptions(executor=ExecutorOptions(quantize="int8"), cache_dir=tmp_path / "cache")
    with pytest.raises(UsageError, match="no float weights to quantise"):
        run_trial(Load("model", load().source, options, TrialOptions()), COMMAND)


def test_records_are_bounded_and_start_anew(
    load: Callable[..., Load], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.worker.preflight.MAX_RECORDS", 2)
    for kv in ("f16", "f32", "int8", "f16"):
        try_unknown(load(kv=kv), lambda stage, fraction: None, python(""))
        assert 1 <= len(list((tmp_path / "cache" / "trials").iterdir())) <= 2
