"""The site of mkdocs.yml in a browser: every page at the width of a laptop and of a telephone."""

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Opens each page in frames, and posts its faults. Code of more than 100 columns scrolls on purpose;
# in the narrow frame all code may, and a table does in its wrapper.
PROGRAM = """<!doctype html><link rel="icon" href="data:,"><body><script>
const PAGES = [], COLUMNS = 100, WIDE = 1280, NARROW = 390;
const later = ms => new Promise(done => setTimeout(done, ms));
const named = element => `<${element.localName} class="${element.className}"> ` +
  JSON.stringify(element.textContent.trim().slice(0, 60));
const scrolls = element => element.scrollWidth > element.clientWidth &&
  ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
const isLong = code => code.textContent.split("\\n").some(line => line.length > COLUMNS);
async function opened(path, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.src = path; document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await frame.contentDocument.fonts.ready;
  await later(100);  // in which the theme wraps tables
  return frame;
}
function* faults(page, width) {
  const whole = page.scrollingElement.scrollWidth;
  if (whole > width) yield `the page is ${whole} px wide`;
  for (const element of page.querySelectorAll(".md-content *")) {
    const block = element.closest("pre"), scroller = element.closest(".md-typeset__scrollwrap");
    if (scrolls(element)) {
      if (!block && !scroller) yield `scrolls sideways: ${named(element)}`;
      if (block && width === WIDE && !isLong(element)) yield `code does not fit: ${named(element)}`;
    } else if (!block && !scroller && element.getBoundingClientRect().right > width)
      yield `ends beyond the window: ${named(element)}`;
    if (element.localName === "img" && !element.naturalWidth)
      yield `no picture: ${element.getAttribute("src")}`;
    if (element.matches("td code, th code") && element.getClientRects().length > 1)
      yield `a name is broken over lines: ${named(element)}`;
  }
}
async function places(words) {
  let frame = await opened(`/?q=${words}`, WIDE), links = [];
  for (let left = 200; left && !links.length; left--, await later(100))
    links = [...frame.contentDocument.querySelectorAll("a.md-search-result__link")];
  return links.map(link => new URL(link.href).pathname);
}
(async () => {
  const found = {faults: [], places: PAGES.length > 1 ? await places("CastPlan") : []};
  for (const path of PAGES) for (const width of [WIDE, NARROW]) {
    const frame = await opened(path, width);
    for (const fault of faults(frame.contentDocument, width))
      found.faults.push(`${path} at ${width} px: ${fault}`);
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a site, and takes what is found to be wrong in it."""

    def do_POST(self):
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.found.put(found)

    def send_error(self, code, *words):
        self.server.missing.append(f"{code}: {self.path}")
        super().send_error(code, *words)


def looked_at(site, profile):
    """What a browser finds in the site in a folder: faults, and places of a search."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser on PATH, one of {', '.join(BROWSERS)}")
    pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("index.html"))
    (site / "look.html").write_text(PROGRAM.replace("PAGES = []", f"PAGES = {json.dumps(pages)}"))
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.found, server.missing = queue.Queue(), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/look.html"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        command = [browser, *options, f"--user-data-dir={profile}", address]
        with open(profile / "said", "w") as said, subprocess.Popen(command, stderr=said) as process:
            try:
                found = server.found.get(timeout=280)
            finally:
                process.terminate()
                server.shutdown()
    console = re.findall(r'CONSOLE.*?\] (".*)', (profile / "said").read_text())
    return found["faults"] + server.missing + console, found["places"]


@pytest.mark.nightly
def test_every_page_fits_its_window(tmp_path):
    """At 1280 and 390 px only long code and wide tables scroll sideways, each by itself. Pictures
    are there, names in tables are whole, the console is silent, and the search finds a page.
    """
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    subprocess.run(build, cwd=ROOT, check=True)
    faults, places = looked_at(site, tmp_path)
    assert faults == []
    assert "/api/CastPlan/" in places


@pytest.mark.nightly
def test_faults_of_a_page_are_found(tmp_path):
    """One page with each of them."""
    page = """<!doctype html><link rel="icon" href="data:,"><div class="md-content">
        <p style="width: 2000px">wide</p>
        <p style="overflow: auto; white-space: nowrap">""" + "long " * 100 + """</p>
        <pre style="width: 300px; overflow: auto">""" + "x" * 100 + """</pre>
        <table><td style="width: 20px"><code>two words</code></table>
        <img src="gone.png"><script>console.error("said so")</script></div>"""  # fmt: skip
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text(page)
    faults, _ = looked_at(tmp_path / "site", tmp_path)
    text = "\n".join(faults)
    kinds = [
        "the page is 20", "ends beyond the window: <p", "scrolls sideways: <p", "code does not fit",
        "a name is broken over lines", "no picture: gone.png", "said so", "404: /gone.png",
    ]  # fmt: skip
    assert [kind for kind in kinds if kind not in text] == []
