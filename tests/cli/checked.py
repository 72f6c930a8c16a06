"""`lockstep` in a process that says at its end that its engine holds nothing any more."""

from __future__ import annotations

import sys

from lockstep.cli.main import invoke
from lockstep.engine.llm import LLM


def main() -> None:
    close = LLM.close

    def checked_close(llm: LLM) -> None:
        engine = llm.engine
        engine.scheduler.check()
        assert not engine.has_work
        assert engine.num_open == engine.scheduler.num_held_blocks == 0
        print("nothing is left", file=sys.stderr)
        close(llm)

    setattr(LLM, "close", checked_close)  # noqa: B010 - in this process alone
    sys.exit(invoke(sys.argv[1:]))
