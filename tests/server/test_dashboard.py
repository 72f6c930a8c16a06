"""The dashboard in a real browser, of real servers: panels fill, controls work, nothing from outside is markup."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx2
import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Page, expect

from benchmarks.dashboard import DENSITY, POLL_S, POLLED, measured_page, models_of, streaming
from lockstep.server.status import dashboard_page
from tests.browser import chromium
from tests.server.living import Living, living_cluster
from tests.server.managing import Hosted
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.visits import PAINTED
from tests.waiting import HANG_S

SUPPORT = Path(__file__).resolve().parents[2] / "examples" / "customer-support.yaml"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
CONTROLS = "button, input, select, textarea, [tabindex]"
HTML = {"Accept": "text/html,application/xhtml+xml"}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("--manifest", str(SUPPORT), "--backend", "stub", *IN_THREAD) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the dashboard of a server; nothing may ask anybody else, or complain."""
    pages: list[tuple[Page, list[str], list[str], str]] = []

    def open_page(server: ServerProcess | Living, width: int = 1280) -> Page:
        url = server.url if isinstance(server, Living) else server.base_url
        page = browser.new_page(viewport={"width": width, "height": 900})
        asked: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        pages.append((page, asked, complaints, url))
        page.goto(f"{url}/")
        return page

    yield open_page
    for page, asked, complaints, base_url in pages:
        page.close()
        assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in asked} == {base_url}
        assert not any("secret" in url for url in asked), "no key is in an address"
        assert complaints == []


def ask(server: ServerProcess, text: str, **body: object) -> None:
    with server.client() as client:
        message = {"role": "user", "content": text}
        response = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 8, **body})
        assert response.status_code == 200, response.text


def test_a_browser_gets_the_page_and_a_program_the_names_of_paths(server: ServerProcess) -> None:
    with server.client() as client:
        page = client.get("/", headers=HTML)
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["vary"] == "Accept"
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        assert client.get("/").json()["name"] == "lockstep"
        assert client.get("/", headers={"Accept": "application/json"}).json()["api"] == "/v1"


def test_the_page_needs_nothing_but_itself_and_is_small() -> None:
    page, policy = dashboard_page()
    assert len(page.encode()) <= 150_000
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "innerHTML" not in page.partition("/* The page asks")[2]
    assert "'unsafe-" not in policy


def test_every_panel_fills(server: ServerProcess, open_page: Open) -> None:
    page = open_page(server)
    expect(page.locator("#live")).to_have_text("live")
    for number in range(12):
        ask(server, "I was charged twice", session_id=f"user {number % 3}")
    expect(page.locator("#cluster")).to_have_text("customer-support-agent")
    expect(page.locator("#models tbody tr")).to_have_count(5)
    expect(page.locator("#models tbody tr", has_text="billing").locator("td").nth(6)).to_have_text("12")
    expect(page.locator("#sessions tbody tr")).to_have_count(3)
    expect(page.locator("#sessions tbody tr", has_text="on the device")).to_have_count(3)
    expect(page.locator("#requests tbody tr")).to_have_count(12)
    expect(page.locator("#requests tbody tr").first).to_contain_text("router (billing) → billing")
    expect(page.locator("#budgets .bar")).to_have_count(3)
    expect(page.locator("#events li", has_text="session admitted")).to_have_count(3)
    expect(page.locator("#now .tile").nth(4).locator("dd > span").first).to_have_text("12")
    expect(page.locator("#logs li", has_text="endpoint=/v1/chat/completions")).to_have_count(12)
    for name in ("rates", "steps"):
        canvas = page.locator(f"#{name} canvas")
        expect(canvas).to_be_visible()
        assert canvas.evaluate(PAINTED) > 3
    assert page.locator("#panels .empty:visible").count() == 0
    expect(page.locator("#hosts-card")).to_be_hidden()
    cards = page.locator("#panels section.card:visible")
    assert cards.count() == 10
    data = ":is(tbody tr, li, canvas, option + option, .bar, textarea:not([placeholder]))"
    assert [card.locator(data).count() > 0 for card in cards.all()] == [True] * 10


def test_measured_requests_are_those_of_the_page(server: ServerProcess, browser: Browser) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server.base_url)))
    page.goto(f"{server.base_url}/")
    expect(page.locator("#logs li").first).to_be_visible()
    page.wait_for_timeout(1.5 * POLL_S * 1e3)
    before, turns = len(asked), 4
    page.wait_for_timeout(turns * POLL_S * 1e3)
    page.close()
    found = Counter(re.sub(r"(?<=after=)\d+$", "", path) for path in asked[before:])
    assert found.keys() == POLLED.keys()
    for path, every in POLLED.items():
        assert found[path] <= turns / every + 1, path
    assert "/v1/events" in asked


def test_a_models_name_is_text(open_page: Open) -> None:
    with serve("stub://one", "--served-model-name", HOSTILE, *IN_THREAD) as server:
        ask(server, "hello", model=HOSTILE)
        page = open_page(server)
        page.get_by_role("button", name="details").click()
        for place in ("#models tbody th", "#requests tbody tr", "#chat option", "#logs li"):
            expect(page.locator(place, has_text="<img src=x").first).to_be_attached()
        assert page.title() == "Lockstep"
        assert page.locator("#panels img, #panels script").count() == 0


def test_a_chat_streams_and_shows_its_route(server: ServerProcess, open_page: Open) -> None:
    page = open_page(server)
    expect(page.locator("#chat select option")).to_have_count(6)
    page.fill("#chat textarea", "my invoice is wrong")
    page.fill("#chat input[name=session]", "browser")
    page.press("#chat textarea", "Control+Enter")
    expect(page.locator("#talk .route")).to_contain_text("router (billing) → billing · first token")
    expect(page.locator("#talk .theirs")).to_contain_text("[stub:billing] ok")
    expect(page.locator("#sessions tbody tr", has_text="browser")).to_have_count(1)


def test_models_are_unloaded_and_loaded(server: ServerProcess, open_page: Open) -> None:
    page = open_page(server)
    row = page.locator("#models tbody tr", has_text="technical")
    row.get_by_role("button", name="unload").click()
    expect(row.locator("td").first).to_contain_text("standby")
    row.get_by_role("button", name="load", exact=True).click()
    expect(row.locator("td").first).to_contain_text("resident")
    expect(page.locator("#events li", has_text="by hand").first).to_be_visible()


def test_hosts_and_their_replicas_are_shown_and_a_host_is_drained(open_page: Open) -> None:
    with living_cluster(Hosted()) as server:
        page = open_page(server)
        expect(page.locator("#hosts tbody tr")).to_have_count(3)
        expect(page.locator("#hosts tbody tr", has_text="gone").locator("td").nth(1)).to_have_text("lost")
        expect(page.locator("#places tbody tr", has_text="org/legal#0")).to_contain_text(
            "waiting: no host has 4 CPU free"
        )
        router = page.locator("#places tbody tr", has_text="router#0").locator("td").first
        expect(router).to_have_text("a (10.0.0.1:5001)")
        row = page.locator("#hosts tbody tr").first
        row.get_by_role("button", name="drain").click()
        expect(row.locator("td").nth(1)).to_have_text("drained")
        expect(router).to_have_text("b (10.0.0.1:5001)")
        row.get_by_role("button", name="undrain").click()
        expect(row.locator("td").nth(1)).to_have_text("there")
        page.close()  # it watches events for as long as it is open


def test_a_hosts_name_is_text(open_page: Open) -> None:
    cluster = Hosted()
    cluster.hosts = (replace(cluster.hosts[0], name=HOSTILE),)
    with living_cluster(cluster) as server:
        page = open_page(server)
        row = page.locator("#hosts tbody tr", has_text="<img src=x")
        row.get_by_role("button", name="drain").click()
        expect(row.locator("td").nth(1)).to_have_text("drained")
        assert list(cluster.drained) == [HOSTILE]
        assert page.title() == "Lockstep"
        assert page.locator("#panels img, #panels script").count() == 0
        page.close()


def test_faults_of_a_manifest_are_shown_in_place(server: ServerProcess, open_page: Open) -> None:
    page = open_page(server)
    area = page.locator("#manifest textarea")
    expect(area).to_have_value(re.compile("^cluster: customer-support-agent"))
    text = area.input_value()
    area.fill(text.replace("tier: resident", "tier: nowhere", 1).replace("gpu_budget: 18GB", "gpu_budget: much"))
    page.get_by_role("button", name="Replace").click()
    expect(page.locator("#faults li")).to_have_count(2)
    expect(page.locator("#replaced")).to_have_text("2 to mend; nothing has changed")
    page.locator("#faults button").nth(1).click()
    chosen = "area => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert area.evaluate(chosen).strip() == "tier: nowhere"
    area.fill(text)
    page.get_by_role("button", name="Replace").click()
    expect(page.locator("#replaced")).to_have_text("it holds now")
    expect(page.locator("#faults li")).to_have_count(0)


def test_text_of_callers_is_not_interpreted_as_html(server: ServerProcess, open_page: Open) -> None:
    ask(server, HOSTILE, session_id=HOSTILE[:60], metadata={"note": HOSTILE})
    page = open_page(server)  # where it is the newest
    expect(page.locator("#sessions tbody tr", has_text="<img src=x")).to_have_count(1)
    page.get_by_role("button", name="details").first.click()
    expect(page.locator("#requests .detail", has_text="session <img src=x")).to_be_visible()
    expect(page.locator("#logs li", has_text="<img src=x").first).to_be_visible()
    page.fill("#chat textarea", HOSTILE)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#talk .theirs")).to_contain_text("[stub:")
    assert page.title() == "Lockstep"
    assert page.locator("#panels img, #panels script").count() == 0


def test_request_row_has_wait_reasons_and_the_replay_command(open_page: Open, tmp_path: Path) -> None:
    flags = ("stub://one?step_ms=20", "--max-num-seqs", "1", "--trace", str(tmp_path / "<b>&trace"))
    with serve(*flags, *IN_THREAD) as server:
        page = open_page(server)
        threads = [threading.Thread(target=ask, args=(server, HOSTILE), kwargs={"ignore_eos": True}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        expect(page.locator("#requests tbody tr", has_text="length")).to_have_count(3)
        waited = page.locator("#requests tbody tr", has_text="1 of 1 sequences run").first
        waited.get_by_role("button", name="details").press("Enter")
        detail = page.locator("#requests td.detail")
        expect(detail).to_contain_text("no place: from")
        expect(detail).to_contain_text("sequence ")
        with server.client() as client:
            commands = {row["replay"][0]["command"] for row in client.get("/v1/requests").json()["data"]}
        assert commands >= {detail.locator("li code").inner_text()}
        detail.get_by_role("button", name="copy").click()
        expect(detail.get_by_role("button", name=re.compile("copied|selected"))).to_be_visible()
        assert page.evaluate("getSelection().toString()") in commands
        for _ in range(21):
            ask(server, "newer")
        expect(page.locator("#requests tbody tr")).to_have_count(22)  # twenty, that one and its details
        page.locator("#requests [aria-expanded=true]").press("Enter")
        expect(detail).to_have_count(0)


def test_a_narrow_window_scrolls_tables_and_not_the_page(server: ServerProcess, open_page: Open) -> None:
    ask(server, HOSTILE * 20, session_id="x" * 60)
    page = open_page(server, width=400)
    expect(page.locator("#models tbody tr")).to_have_count(5)
    page.get_by_role("button", name="details").first.click()
    expect(page.locator("#requests td.detail")).to_have_count(1)
    expect(page.locator("#logs li").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_every_control_is_reached_by_keyboard(server: ServerProcess, open_page: Open) -> None:
    ask(server, "my invoice", session_id="keyboard")
    page = open_page(server)
    expect(page.locator("#models tbody tr")).to_have_count(5)
    page.get_by_role("button", name="details").first.press("Enter")
    expect(page.locator("#requests td.detail")).to_have_count(1)
    page.route("**/v1/**", lambda route: route.abort())  # nothing comes and goes while somebody walks through the page
    expect(page.locator("#live")).to_have_text("the server does not answer; trying again")
    wanted = page.locator(f"#panels :is({CONTROLS}):visible")
    reached: set[str] = set()
    page.locator("body").click(position={"x": 2, "y": 2})
    for _ in range(wanted.count() + 12):
        page.keyboard.press("Tab")
        focused = "() => { const e = document.activeElement; e.dataset.seen = 1; return e.tagName; }"
        reached.add(page.evaluate(focused))
    assert page.locator(f"#panels :is({CONTROLS}):visible:not([data-seen])").count() == 0
    assert reached >= {"BUTTON", "INPUT", "SELECT", "TEXTAREA"}


@pytest.mark.parametrize(("motion", "expected"), [("reduce", "0s"), ("no-preference", "0.4s")])
def test_reduced_motion_disables_animations(
    motion: Literal["reduce", "no-preference"], expected: str, server: ServerProcess, open_page: Open
) -> None:
    page = open_page(server)
    page.emulate_media(reduced_motion=motion)
    expect(page.locator("#budgets .bar")).to_have_count(3)
    page.locator("#budgets").scroll_into_view_if_needed()
    expect(page.locator("#budgets .fill").first).to_have_css("transition-duration", expected)
    moving = "nodes => nodes.filter(node => getComputedStyle(node).animationName !== 'none').length"
    assert page.locator("body *").evaluate_all(moving) == 0


@pytest.mark.slow
def test_fifty_models_and_sixty_four_streams_hold_no_frame_for_long(browser: Browser) -> None:
    """No bound that a busy machine would break: a page that lays all of its tables out at once takes seconds there."""
    with (
        serve("--manifest", str(DENSITY), "--backend", "stub") as server,
        streaming(server.base_url, 64, models_of(server.base_url), 2.0),
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        found = measured_page(page, server.base_url, 20.0)
        page.close()
    assert found["rows"] == 51
    assert found["requests"] == 20
    assert len(found["gaps"]) > 100
    assert max((lasted for _, lasted in found["tasks"]), default=0.0) < 1_000.0


def test_a_server_of_one_model_shows_no_control_that_it_would_refuse(open_page: Open) -> None:
    with serve("stub://one", *IN_THREAD) as server:
        page = open_page(server)
        expect(page.locator("#models tbody tr")).to_have_count(1)
        assert page.get_by_role("button", name="load").count() == 0
        expect(page.locator("#manifest-card")).to_be_hidden()


def test_a_callers_key_shows_its_own_requests_and_nothing_of_others(open_page: Open) -> None:
    environment = {"LOCKSTEP_API_KEY": "secret-caller", "LOCKSTEP_ADMIN_KEY": "secret-admin"}
    with serve("stub://one", *IN_THREAD, environment=environment) as server:
        for key in ("secret-caller", "secret-admin"):
            with server.client(api_key=key) as client:
                body = {"prompt": "a b", "max_tokens": 4, "session_id": f"of {key[7:]}"}
                assert client.post("/v1/completions", json=body).status_code == 200
        page = open_page(server)
        page.fill("#key input", "secret-caller")
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#live")).to_have_text("this key sees what is its own; an admin key sees all")
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        expect(page.locator("#sessions tbody tr")).to_have_text(re.compile("^of caller"))
        for panel in ("#now", "#models", "#events", "#logs", "#budgets", "#manifest", "#rates"):
            expect(page.locator(panel)).to_be_hidden()
        page.fill("#chat textarea", "hello")
        page.press("#chat textarea", "Control+Enter")
        expect(page.locator("#talk .theirs")).to_contain_text("[stub:")
        expect(page.locator("#requests tbody tr")).to_have_count(2)
        page.fill("#key input", "secret-admin")
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#requests tbody tr")).to_have_count(3)
        expect(page.locator("#models tbody tr")).to_have_count(1)
        expect(page.locator("#logs li", has_text="tenant=admin-1").first).to_be_visible()


def test_page_of_a_server_with_keys_requests_a_key_and_does_not_expose_it(open_page: Open) -> None:
    with serve("stub://one", "--api-key", "secret-key", *IN_THREAD) as server:
        page = open_page(server)
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#models tbody tr")).to_have_count(0)
        expect(page.locator("#key")).to_contain_text("without a header name")
        page.fill("#key input", "secret-key")
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#models tbody tr")).to_have_count(1)
        expect(page.locator("#key")).to_be_hidden()
        expect(page.locator("#budgets .bar").first).to_have_text(re.compile("^memory for models.*, no limit set$"))
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        page.reload()
        expect(page.locator("#key")).to_be_visible()


@pytest.mark.parametrize("pasted", [" secret-key ", "Bearer secret-key", "Authorization: Bearer secret-key"])
def test_a_key_may_be_pasted_as_a_header_has_it(open_page: Open, pasted: str) -> None:
    with serve("stub://one", "--api-key", "secret-key", *IN_THREAD) as server:
        page = open_page(server)
        page.fill("#key input", pasted)
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#models tbody tr")).to_have_count(1)


@pytest.mark.slow
def test_a_lost_server_is_shown_and_reconnected(open_page: Open) -> None:
    with serve("stub://one", *IN_THREAD) as server:
        page = open_page(server)
        for _ in range(30):
            ask(server, "before")
        expect(page.locator("#logs li", has_text="chat/completions")).to_have_count(30)
    expect(page.locator("#live")).to_have_text("the server does not answer; trying again")
    expect(page.locator("#logs li", has_text="chat/completions")).to_have_count(30)  # what was logged last is of use
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.base_url)
    with serve("stub://one", "--port", server.base_url.rpartition(":")[2], *IN_THREAD) as another:
        expect(page.locator("#live")).to_have_text("live")
        ask(another, "after")
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        expect(page.locator("#logs li", has_text="chat/completions")).to_have_count(1)
