"""Commands and snippets of README, CONTRIBUTING and docs/ do what the pages say: each is run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.artifacts.hub.stand_in import StandIn
from tests.documents.pages import ROOT, blocks_of, pages
from tests.documents.walking import Walk, environment
from tests.server.process import serve

BLOCKS = {page: blocks for page in pages() if (blocks := blocks_of(page, (ROOT / page).read_text()))}
SLOW = [page for page, blocks in BLOCKS.items() if any(block.has("slow") for block in blocks)]


@pytest.fixture(scope="module")
def hub() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of all pages: what one has compiled, the next need not."""
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def shared_url() -> Iterator[Callable[[], str]]:
    """Pocket, for pages whose commands ask a server that somebody else has started."""
    with ExitStack() as stack:
        urls: list[str] = []

        def url() -> str:
            if not urls:
                urls.append(stack.enter_context(serve("pocket://", "--served-model-name", "pocket")).base_url)
            return urls[0]

        yield url


@pytest.fixture
def walk(tmp_path: Path, home: Path, hub: StandIn, shared_url: Callable[[], str]) -> Iterator[Walk]:
    with Walk(tmp_path, environment(tmp_path, home, hub), hub, shared_url) as made:
        yield made


@pytest.mark.parametrize("page", BLOCKS)
def test_the_examples_of_a_page_work(page: str, walk: Walk, record_property: Callable[[str, object], None]) -> None:
    faults = walk.page(BLOCKS[page])
    record_property("documents", asdict(walk.tally))
    assert not faults, "\n\n".join(faults)


FENCE = "```"


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ((FENCE, "lockstep check nowhere.yaml", FENCE), "p:2: lockstep check nowhere.yaml\n.*nowhere.yaml"),
        ((FENCE, "lockstep serve stub://a --no-such-flag", FENCE), "p:2: .*--no-such-flag"),
        ((FENCE, "curl -s localhost:9000/v1/nothing", FENCE), "p:2: .*exit code 22"),
        ((FENCE, "true && systemctl start x", FENCE), "p:2: .*'systemctl' is not run by tests"),
        ((FENCE, "$ lockstep check examples/customer-support.yaml --backend stub", "other", FENCE), "p:2: .*'other'"),
        ((f"{FENCE}python", "", "1 / 0", FENCE), "p:2\nZeroDivisionError"),
        ((f"{FENCE}yaml", "hosts: {routing: by_heart}", FENCE), "p:2\nManifestError.*by_heart"),
        ((f"{FENCE}yaml", "model: stub://a", "no-such-flag: 1", FENCE), "p:2\nAssertionError.*no-such-flag"),
        ((f"{FENCE}json", "{", FENCE), "p:2\nJSONDecodeError"),
        (("<!-- run: prints -->", f"{FENCE}text", "nothing", FENCE), "p:3\n.*the page shows 'nothing'"),
    ],
)
def test_a_failed_example_is_reported_with_its_line_and_the_rest_is_tried(
    block: tuple[str, ...], fault: str, walk: Walk
) -> None:
    rest = (f"{FENCE}json", "{}", FENCE)
    faults = walk.page(blocks_of("p", "\n".join((*block, "", *rest))))
    assert len(faults) == 1
    assert re.match(fault, faults[0], re.DOTALL), faults[0]
    assert walk.tally.snippets >= 1


def test_a_command_whose_program_is_not_here_is_counted(walk: Walk) -> None:
    walk.environment["PATH"] = str(walk.folder)
    assert walk.page(blocks_of("p", "\n".join((FENCE, "jq . cost.json", FENCE)))) == []
    assert (walk.tally.commands, walk.tally.missing) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_slow_examples_of_a_page_work(page: str, walk: Walk) -> None:
    walk.is_slow = True
    faults = walk.page(BLOCKS[page])
    assert not faults, "\n\n".join(faults)
