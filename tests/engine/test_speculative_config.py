"""``--speculative-config``: vLLM's members that apply here; others are rejected by name."""

from __future__ import annotations

import pytest

from lockstep.engine.options import EngineOptions
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ConfigError


def test_members_have_the_names_of_vllm() -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    config = SpeculativeConfig.parse(text)
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max) == ("suffix", 5, 4)
    assert SpeculativeConfig.parse(config.text()) == config
    assert EngineOptions(speculative_config=text).speculative_config == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "not JSON"),
        ("[1]", "JSON object"),
        ("{}", "no method"),
        ('{"method": "eagle"}', "eagle"),
        ('{"method": "eagle", "model": "draft"}', "method is 'eagle'"),
        ('{"method": "ngram", "model": "draft"}', "'model'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "33"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_min is 5"),
    ],
)
def test_other_values_are_rejected_by_name(text: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config") as caught:
        SpeculativeConfig.parse(text)
    assert shown in str(caught.value)
    with pytest.raises(ConfigError):
        EngineOptions(speculative_config=text)
