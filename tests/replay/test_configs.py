"""Sources of a replay's limits, and the errors for invalid ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import ConfigError, UsageError
from lockstep.replay.configs import changed_fields, config_for, order_note, parse_overrides
from lockstep.replay.workload import ArrivalUnit, Workload
from tests.replay.sample import request, workload

PLAIN = Workload("trace", (), ArrivalUnit.PS)


def test_the_default_pool_has_a_million_tokens() -> None:
    config = config_for(PLAIN)
    assert (config.block_size, config.num_blocks, config.max_model_len) == (16, 65_536, 1_048_576)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_chunk_tokens) == (256, 8192, 8192)


def test_blocks_have_the_size_of_contents_unless_overridden() -> None:
    config = config_for(replace(PLAIN, content_size=512))
    assert (config.block_size, config.num_blocks) == (512, 2048)
    config = config_for(replace(PLAIN, content_size=512), {"block_size": "32"})
    assert (config.block_size, config.num_blocks) == (32, 32_768)


def test_overrides_precede_the_file_and_the_file_precedes_defaults() -> None:
    load = replace(PLAIN, config={"block_size": 8, "num_blocks": 10, "max_num_seqs": 3, "chunking": False})
    config = config_for(load, {"max_num_seqs": "5"})
    assert (config.block_size, config.num_blocks, config.max_num_seqs, config.chunking) == (8, 10, 5, False)
    assert config.max_model_len == 80
    named = changed_fields(config)
    assert (named["max_num_seqs"], named["chunking"], named["num_blocks"]) == (5, False, 10)
    assert "order" not in named


@pytest.mark.parametrize(
    ("in_file", "overrides", "order", "note"),
    [
        ({}, {}, "priority", "requests have priorities and no order is set, so they are admitted by priority"),
        ({"order": "priority"}, {}, "priority", ""),
        ({"order": "fcfs"}, {}, "fcfs", "order is fcfs, so the queue ignores the priorities"),
        ({"order": "priority"}, {"order": "fair"}, "fair", "order is fair, so the queue ignores"),
        ({"order": "fcfs"}, {"order": "priority"}, "priority", ""),
    ],
)
def test_requests_with_priorities_are_ordered_by_them_unless_an_order_is_set(
    in_file: dict[str, object], overrides: dict[str, str], order: str, note: str
) -> None:
    load = replace(workload(request("a", 4, 1), request("b", 4, 1, priority=-1)), config=in_file)
    assert config_for(load, overrides).order == order
    said = order_note(load, overrides)
    assert said.startswith(note)
    assert bool(said) == bool(note)


def test_without_priorities_the_order_is_that_of_a_server() -> None:
    load = workload(request("a", 4, 1))
    assert (config_for(load).order, order_note(load)) == ("fcfs", "")
    assert order_note(load, {"order": "fcfs"}) == ""


def test_values_are_parsed_by_the_type_of_their_field() -> None:
    config = config_for(
        PLAIN,
        parse_overrides(
            ["max_num_prefill_tokens=none", "chunking=off", "order=priority", "num_blocks=1_000", "max_skips = 3"]
        ),
    )
    assert (config.max_num_prefill_tokens, config.chunking, config.order) == (None, False, "priority")
    assert (config.num_blocks, config.max_skips) == (1000, 3)


@pytest.mark.parametrize(
    ("pair", "complaint"),
    [
        ("max_num_seq=3", r"'max_num_seq'; did you mean max_num_seqs"),
        ("zebra=3", r"'zebra'; fields: max_num_seqs"),
        ("max_num_seqs", "'max_num_seqs' has no value; write field=value"),
        ("max_num_seqs=", "has no value"),
        ("max_num_seqs=many", "max_num_seqs is 'many'; it must be a whole number"),
        ("max_num_seqs=2.5", "it must be a whole number"),
        ("max_num_seqs=none", "it must be a whole number"),
        ("chunking=maybe", "chunking is 'maybe'; it must be true or false"),
        ("order=random", "order is 'random'; it must be fcfs, priority or fair"),
    ],
)
def test_a_wrong_override_is_rejected_with_a_hint(pair: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        config_for(PLAIN, parse_overrides([pair]))


def test_a_field_set_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="max_skips is set twice, to 1 and to 2"):
        parse_overrides(["max_skips=1", "max_skips=2"])


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("max_seqs", 3, "trace: its config has an unknown scheduler field: 'max_seqs'"),
        ("max_num_seqs", "3", "trace: config: max_num_seqs is '3'; it must be a whole number"),
        ("max_num_seqs", True, "max_num_seqs is True; it must be a whole number"),
        ("max_num_prefill_tokens", 2.5, "it must be a whole number, at least 1"),
    ],
)
def test_an_invalid_field_of_a_file_is_named(field: str, value: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        config_for(replace(PLAIN, config={field: value}))


def test_limits_that_are_invalid_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 0; it must be"):
        config_for(PLAIN, {"num_blocks": "0"})
    with pytest.raises(ConfigError, match="block_size is -4"):
        config_for(PLAIN, {"block_size": "-4"})
