"""Pictures of the dashboard for the documentation: `python -m tools.dashboard_pictures` writes docs/dashboard-*.png.

The customer-support cluster on the embedded model, while a few clients talk to it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Literal

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
NUM_CLIENTS, WARM_UP_S = 3, 20.0


def talk(server: ServerProcess, number: int, ended: threading.Event) -> None:
    """One client, until it is told to end."""
    with server.client() as client:
        for turn in range(10_000):
            if ended.is_set():
                return
            message = {"role": "user", "content": TEXTS[(turn + number) % len(TEXTS)]}
            body = {"messages": [message], "max_tokens": 48, "session_id": f"customer-{(turn + number) % 6}"}
            client.post("/v1/chat/completions", json=body)


def main() -> None:
    ended = threading.Event()
    with serve("--manifest", str(MANIFEST), "--backend", "pocket") as server, chromium() as browser:
        clients = [threading.Thread(target=talk, args=(server, number, ended)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        tabs = [browser.new_page(viewport={"width": 1180, "height": 1000}, color_scheme=scheme) for scheme in schemes]
        for tab in tabs:
            tab.goto(f"{server.base_url}/")
        time.sleep(WARM_UP_S)
        for tab, scheme in zip(tabs, schemes, strict=True):
            tab.bring_to_front()
            tab.screenshot(path=ROOT / "docs" / f"dashboard-{scheme}.png")
        ended.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main()
