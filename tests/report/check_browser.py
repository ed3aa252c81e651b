#!/usr/bin/env python3
"""Opens the report in headless Chromium and looks at what its script and its layout did.

    check_browser.py FLOAT8_TUNE

The browser is FLOAT8_CHROMIUM, or the first of the usual names; where there is none the test says so
and is skipped (exit code 77).
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Reports what a reader would see at first, and after choosing all figures.
PROBE = """<script>
addEventListener("load", function () {
  const visible = () => Array.from(document.querySelectorAll("article"))
    .filter((a) => a.getBoundingClientRect().height > 0).length;
  const first = visible();
  for (const select of document.querySelectorAll("#controls select")) {
    select.value = "";
    select.dispatchEvent(new Event("change"));
  }
  const wide = document.documentElement.scrollWidth > innerWidth;
  const details = document.querySelector("article details");
  const lines = details.querySelector("pre").textContent.split("\\n").length;
  details.open = true;
  details.dispatchEvent(new Event("toggle"));
  const rows = details.querySelectorAll("table tr").length === lines;
  const text = document.querySelector("article svg text").getBoundingClientRect().height;
  document.title = [first, visible(), document.querySelectorAll("article").length, wide,
    text > 9, rows, getComputedStyle(document.body).backgroundColor].join(" ");
});
</script></body>"""


def look(browser, page, width, dark):
    """What the probe reports: figures shown at first and after choosing all, and the layout."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    if dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    dump = subprocess.run(
        [browser, *flags, "--virtual-time-budget=4000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=1000,
        check=True,
    ).stdout
    return re.search(r"<title>(.*?)</title>", dump).group(1)


def main(tool):
    browser = os.environ.get("FLOAT8_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )
    if browser is None:
        print(f"skipped: no browser ({', '.join(NAMES)}); name one in FLOAT8_CHROMIUM")
        return 77
    with tempfile.TemporaryDirectory() as name:
        page = pathlib.Path(name) / "page.html"
        model = "--model llama3-8b --tokens 8192 --recipe rowwise".split()
        subprocess.run([tool, "report", "--quiet", "-o", page, *model], check=True)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("</body>", PROBE), encoding="utf-8")
        total = text.count("<article")
        for width in (1280, 390):
            for dark in (False, True):
                seen = look(browser, page, width, dark)
                print(f"{width} px, {'dark' if dark else 'light'}: {seen}")
                first, every, there, is_wide, is_legible, is_table, *color = seen.split(" ", 6)
                assert 5 <= int(first) < total, "the script chooses one device and recipe"
                assert int(every) == int(there) == total, "and shows all where it is asked to"
                assert is_wide == "false", "the page is wider than the window"
                assert is_legible == "true", "the figures' text is too small"
                assert is_table == "true", "opened numbers are no table"
                assert color[0] == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    return 0


if len(sys.argv) != 2:
    sys.exit(__doc__)
sys.exit(main(str(pathlib.Path(sys.argv[1]).resolve())))
