"""The race: figures of a piece of work, ratios of rounds, and the verb with our own server as a peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.bench.client import Outcome
from lockstep.bench.contenders import Answer, Done, Work, answers_of
from lockstep.bench.peers import Race, RaceOptions, figures, ratios
from lockstep.cli.main import invoke
from tests.server.process import serve

TINY = ("--contexts", "8", "--streams", "1,2", "--output-len", "12", "--rounds", "2")


def test_decoding_is_counted_while_every_stream_is_in_it() -> None:
    """Stream 1 has tokens at 1, 2, ... 10 s, stream 2 at 3, 4, ... 12 s: the window is 3 to 10 s."""
    answers = [Answer(0.0, tuple(map(float, range(1, 11)))), Answer(0.5, tuple(map(float, range(3, 13))))]
    found = figures(Work(8, 2, 10), Done(answers, cpu_s=4.0, memory_mb=7.0))
    assert found == {
        "ttft_ms": pytest.approx(1750.0),
        "output_throughput": pytest.approx(20 / 12),
        "decode_throughput": pytest.approx(14 / 7),
        "cpu_ms_per_token": pytest.approx(200.0),
        "memory_mb": 7.0,
    }


def test_streams_that_hardly_meet_have_no_speed_of_decoding() -> None:
    answers = [Answer(0.0, (1.0, 2.0, 3.0)), Answer(0.0, (2.5, 3.5, 4.5))]
    assert "decode_throughput" not in figures(Work(8, 2, 3), Done(answers))


def test_texts_one_after_the_other_are_charged_their_own_time() -> None:
    """Each is asked, answered from 1 s on with a token a second; the pause between them is nobody's."""
    answers = [Answer(start, tuple(start + i for i in range(1, 7))) for start in (0.0, 100.0)]
    found = figures(Work(8, 1, 6, ("a", "b")), Done(answers))
    assert found == {"ttft_ms": 1000.0, "output_throughput": pytest.approx(1.0), "decode_throughput": 1.0}


def test_tokens_of_one_chunk_came_together() -> None:
    outcome = Outcome(True, 5.0, ttft_s=1.0, itl_s=(2.0,), output_tokens=4)
    late = Outcome(True, 5.5, ttft_s=1.0, output_tokens=1)
    assert answers_of([outcome, late]) == [Answer(0.0, (1.0, 1.0, 3.0, 3.0)), Answer(0.5, (1.5,))]


def test_ratios_are_of_rounds_and_above_one_where_we_win() -> None:
    race = Race(RaceOptions("x"), {"lockstep": {"kind": "engine"}, "llama.cpp": {"kind": "engine"}})
    race.seen["w", "lockstep"] = {0: {"output_throughput": 10, "ttft_ms": 10}, 1: {"output_throughput": 30}}
    race.seen["w", "llama.cpp"] = {0: {"output_throughput": 5, "ttft_ms": 5}, 1: {"output_throughput": 10}}
    assert ratios(race, "w", "llama.cpp", "output_throughput") == [2.0, 3.0]
    assert ratios(race, "w", "llama.cpp", "ttft_ms") == [0.5]


def test_work_with_too_many_prompt_tokens_is_left_out_and_named() -> None:
    done, left = RaceOptions("x", (200, 4000), (1, 8), max_prompt_tokens=4000).works()
    assert [work.name for work in done] == ["200 x1", "200 x8", "4000 x1", "4 prompts"]
    assert [work.name for work in left] == ["4000 x8"]


def test_a_race_goes_on_without_peers_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Our engine, our server, and another server of ours as a running peer; one is not installed, one is down."""
    path = tmp_path / "race.json"
    with serve("stub://alpha", "--worker", "thread") as server:
        urls = ("--peer-url", server.base_url, "--peer-url", "http://127.0.0.1:9")
        arguments = ["--peers", "llama_cpp.server,openvino-genai", "--result-filename", str(path)]
        assert invoke(["bench", "peers", "stub://alpha", *TINY, *arguments, *urls]) == 0
        printed = capsys.readouterr()
    result = json.loads(path.read_text())
    assert "without llama_cpp.server: " in printed.out
    assert "openvino-genai: it is not installed for " in printed.err
    assert "cannot connect to http://127.0.0.1:9" in result["out"]["http://127.0.0.1:9"]
    assert list(result["contenders"]) == ["lockstep", "lockstep serve", server.base_url]
    for work in ("8 x1", "8 x2"):
        for name in result["contenders"]:
            assert len(result["figures"][f"{work} {name} output_throughput"]["values"]) == 2
    own = result["figures"]["4 prompts lockstep serve output_throughput"]["values"]
    theirs = result["figures"][f"4 prompts {server.base_url} output_throughput"]["values"]
    ratio = result["times_better"][f"4 prompts {server.base_url} output_throughput"]
    pairs = [ours / other for ours, other in zip(own, theirs, strict=True)]
    assert (ratio["least"], ratio["greatest"]) == pytest.approx((min(pairs), max(pairs)))
    assert invoke(["bench", "compare", str(path), str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "many"), "--contexts is 'many'"),
        (("--streams", "0"), "--contexts and --streams take numbers from 1"),
        (("--peers", "ollama"), "--peers has 'ollama'; there are llama.cpp"),
        (("--no-grid", "--no-suite"), "no work is left"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--peer-url", "http://:x"), "--peer-url is 'http://:x'"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "peers", "stub://alpha", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
