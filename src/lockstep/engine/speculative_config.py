"""Configuration of speculative decoding: vLLM's ``--speculative-config``, as far as it applies to drafts without a
model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from lockstep.errors import ConfigError
from lockstep.option_fields import Range, check_options, option_types
from lockstep.spelling import listed

MAX_DRAFTS = 32
"""Maximum number of drafts of a sequence in a step."""
_EXAMPLE = 'for example: {"method": "suffix"}'


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Method and limits of drafts. Answers do not depend on it."""

    method: Literal["ngram", "suffix"]
    """``ngram`` continues the last place of the sequence where its last tokens occurred before; ``suffix`` the
    longest such match, in the sequence or in earlier answers with the same cache salt, also after a difference."""
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)] = 16
    """Maximum number of drafts of a sequence in a step."""
    prompt_lookup_min: Annotated[int, Range(1, 64)] = 1
    """Minimum number of last tokens that must match."""
    prompt_lookup_max: Annotated[int, Range(1, 64)] = 4
    """Maximum number of last tokens that ``ngram`` compares."""
    suffix_decoding_max_tree_depth: Annotated[int, Range(1, 64)] = 24
    """Maximum number of last tokens that ``suffix`` compares."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.prompt_lookup_min > self.most_compared:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, but at most {self.most_compared} tokens are compared"
            )

    @property
    def most_compared(self) -> int:
        """Maximum number of last tokens that are compared."""
        return self.prompt_lookup_max if self.method == "ngram" else self.suffix_decoding_max_tree_depth

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Parse a JSON object.

        Raises:
            ConfigError: it is no valid configuration; the message begins with ``speculative_config``.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"speculative_config is not JSON: {error}; {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"speculative_config is no JSON object; {_EXAMPLE}")
        try:
            return cls.of(given)
        except ConfigError as error:
            raise ConfigError(f"speculative_config: {error}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Check the members of an object.

        Raises:
            ConfigError: it is no valid configuration.
        """
        types = option_types(cls)
        if "method" not in given:
            raise ConfigError("has no method; it must be ngram or suffix")
        if not types["method"].fits(given["method"]):  # before the members of other methods, such as a draft model
            raise ConfigError(f"method is {given['method']!r}; it must be {types['method'].right()}")
        if unknown := [name for name in given if name not in types]:
            raise ConfigError(f"has the unsupported member {unknown[0]!r}; supported are {listed(list(types))}")
        return cls(**given)

    def text(self) -> str:
        """The configuration as JSON, with all members."""
        return json.dumps(asdict(self))
