"""Open every page of the site in a headless Chromium and report text that is cut off or runs out of the window.

    pip install playwright && apt install chromium     # once; playwright's own browser is not needed
    python scripts/check_site.py [--screenshots FOLDER]

At 1,280 pixels nothing may need scrolling sideways, neither the page nor a block of code or a table in it. At 390 pixels the
page itself may not, and what is wider than the window must scroll inside itself. Exits with 1 if anything is reported.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = {"desktop": 1280, "phone": 390}

# Elements that are wider than the room they have. `scrolls` says whether a reader can still reach the rest of them.
FAULTS = """
(phone) => {
  const faults = [];
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth + 1) faults.push(`page is ${root.scrollWidth} wide in ${window.innerWidth}`);
  const checked = "article pre > code, article table, article figure, article img, article h1";
  for (const element of document.querySelectorAll(checked)) {
    let box = element;
    let scrolls = false;
    while (box && box.tagName !== "ARTICLE") {
      scrolls = scrolls || ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
      box = box.parentElement;
    }
    const holder = element.closest(".md-typeset__scrollwrap, pre, figure") || element;
    const wide = Math.max(element.scrollWidth, element.getBoundingClientRect().width);
    const room = Math.min(holder.clientWidth || wide, document.querySelector("article").clientWidth);
    if (wide > room + 2 && !(phone && scrolls)) {
      const said = element.textContent.trim().slice(0, 50);
      faults.push(`${element.tagName.toLowerCase()} is ${Math.round(wide)} wide in ${room}: ${said}`);
    }
  }
  return faults;
}
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that does not log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def serve(folder: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    """Serve a folder on a free port of the loopback interface."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


def check(site: Path, chromium: str, screenshots: Path | None) -> list[str]:
    """What is wrong, one line a fault."""
    from playwright.sync_api import sync_playwright

    faults = []
    server, address = serve(site)
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for name, width in WIDTHS.items():
            window = browser.new_page(viewport={"width": width, "height": 900})
            window.set_default_timeout(120_000)  # a busy machine is no fault of the page
            for page in pages:
                window.goto(f"{address}/{page}/", wait_until="load")
                faults += [f"{name} {page}: {fault}" for fault in window.evaluate(FAULTS, name == "phone")]
                if screenshots is not None:
                    window.screenshot(path=screenshots / f"{name}-{page.replace('/', '-')}.png", full_page=True)
        browser.close()
    server.shutdown()
    return faults


def main() -> None:
    """Build the site into a temporary folder and check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser")
    parser.add_argument("--screenshots", type=Path, help="also write a picture of every page into this folder")
    options = parser.parse_args()
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True)
        faults = check(Path(folder), options.chromium, options.screenshots)
    print("\n".join(faults) or "every page fits")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
