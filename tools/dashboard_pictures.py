"""Pictures of the dashboard for the documentation: `python -m tools.dashboard_pictures` writes docs/dashboard-*.png.

The pictures show the customer-support cluster on the embedded model with more clients than places, so that requests
have wait reasons.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page

from tests.browser import chromium
from tests.server.process import ServerProcess, serve

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "examples" / "customer-support.yaml"
TEXTS = (
    "I was charged twice for my subscription last week",
    "My login page shows a 502 Bad Gateway error after the latest release",
    "Is a binding arbitration clause enforceable under California consumer law",
    "What is the capital of France",
)
NUM_CLIENTS, NUM_PLACES, WARM_UP_S = 6, 2, 20.0


def talk(server: ServerProcess, number: int, ended: threading.Event) -> None:
    """Run one client until ``ended`` is set."""
    with server.client() as client:
        for turn in range(10_000):
            if ended.is_set():
                return
            message = {"role": "user", "content": TEXTS[(turn + number) % len(TEXTS)]}
            body = {"messages": [message], "max_tokens": 48, "session_id": f"customer-{(turn + number) % 6}"}
            client.post("/v1/chat/completions", json=body)


def picture(tab: Page, path: Path) -> None:
    """Picture of a tab with the details of a request that waited."""
    tab.bring_to_front()
    waited = tab.locator("#requests tr", has_text="sequences run").first
    waited.get_by_role("button", name="details").dispatch_event("click")
    tab.locator("#requests .detail").wait_for()
    tab.evaluate("document.querySelectorAll('.scroll').forEach(each => { each.scrollLeft = 0; })")
    tab.screenshot(path=path)


def main() -> None:
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        flags = ("--backend", "pocket", "--max-num-seqs", str(NUM_PLACES), "--trace", f"{folder}/recording")
        with serve("--manifest", str(MANIFEST), *flags) as server, chromium() as browser:
            clients = [threading.Thread(target=talk, args=(server, number, ended)) for number in range(NUM_CLIENTS)]
            for client in clients:
                client.start()
            schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
            tabs = [browser.new_page(viewport={"width": 1180, "height": 1420}, color_scheme=each) for each in schemes]
            for tab in tabs:
                tab.goto(f"{server.base_url}/")
            tabs[0].wait_for_timeout(WARM_UP_S * 1e3)
            for tab, scheme in zip(tabs, schemes, strict=True):
                picture(tab, ROOT / "docs" / f"dashboard-{scheme}.png")
            ended.set()
            for client in clients:
                client.join()


if __name__ == "__main__":
    main()
