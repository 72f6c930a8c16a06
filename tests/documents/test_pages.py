"""Commands and snippets of README, CONTRIBUTING and docs/ do what the pages say: each is run as it stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.artifacts.hub.stand_in import StandIn
from tests.documents.pages import ROOT, blocks_of, pages
from tests.documents.walking import Walk, environment
from tests.server.process import serve

PAGES = [page for page in pages() if blocks_of(page, (ROOT / page).read_text())]


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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, walk: Walk, record_property: Callable[[str, object], None]) -> None:
    faults = walk.page(blocks_of(page, (ROOT / page).read_text()))
    record_property("documents", asdict(walk.tally))
    assert not faults, "\n\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- run: slow" in (ROOT / page).read_text()])
def test_a_page_does_what_it_says_where_that_takes_long(page: str, walk: Walk) -> None:
    walk.is_slow = True
    faults = walk.page(blocks_of(page, (ROOT / page).read_text()))
    assert not faults, "\n\n".join(faults)
