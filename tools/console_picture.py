"""Takes the picture of the console for the documentation, from a server that runs.

    penstock serve smollm2 --num-workers 2
    python -m tools.console_picture --url http://127.0.0.1:8000 --out docs/images/console.png

Asks the questions in a browser, at temperature 0, while other clients keep the workers busy. Needs
chromium and playwright (the extra `dev`).
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from playwright import sync_api as playwright

QUESTIONS = (
    "What is a penstock?",
    "What is the capital of France?",
    "Give me three tips for a good night's sleep.",
)
BUSY = ("Tell me a story about a lighthouse.", "Explain how rain forms.", "Write about the sea.")
SIZE = playwright.ViewportSize(width=1320, height=900)


@contextmanager
def busy(url: str, num_clients: int) -> Iterator[None]:
    """`num_clients` streams at a time, of other clients."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not is_over.is_set():
                said = {"role": "user", "content": BUSY[number % len(BUSY)]}
                client.post("/v1/chat/completions", json={"messages": [said], "max_tokens": 160})

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(num_clients)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=6, help="other clients at a time")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    path = shutil.which("chromium")
    if path is None:
        parser.error("there is no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver, busy(args.url, args.clients):
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(args.url)
        page.get_by_label("Temperature").fill("0")
        for question in QUESTIONS:
            page.focus("#message")
            page.keyboard.insert_text(question)
            page.keyboard.press("Enter")
            page.wait_for_selector(".assistant.busy", state="attached")
            page.wait_for_selector(".assistant.busy", state="detached", timeout=120_000)
        page.wait_for_timeout(2000)  # a few samples more in the curves
        page.screenshot(path=args.out)
        browser.close()
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
