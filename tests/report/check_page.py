#!/usr/bin/env python3
"""Reads what `float8-tune report` writes with XML and HTML parsers and checks what a reader, also one
with a screen reader, relies on.

    check_page.py FLOAT8_TUNE

A figure has a role, a title, a description and a table with the same numbers; every control has a
label; every reference names one element; nothing is fetched; text has the contrast of WCAG's AA.
"""

import html.parser
import pathlib
import re
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
FETCHES = ("src", "srcset", "href", "xlink:href", "action", "poster", "data")
HOSTILE = (
    '[{"fqn": "</script><svg onload=alert(1)>&amp;", "in_features": 4096, "out_features": 1024},'
    ' {"fqn": "\\"\'\\ufffe", "in_features": 4096, "out_features": 4096}]'
)


def check_svg(root, where):
    """The description of one drawing, inline or in a file."""
    assert root.get("role") == "img", where
    names = [
        root.find(name) if root.tag == "svg" else root.find(SVG + name)
        for name in ("title", "desc")
    ]
    assert all(name is not None and name.text.strip() for name in names), where
    assert root.get("aria-labelledby").split() == [name.get("id") for name in names], where
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.get("viewBox")), where


def check_structure(page):
    """Roles, labels, headings, tables and references of the page."""
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids)), "an id is there twice"
    for e in page.iter():
        for name in ("aria-labelledby", "aria-describedby", "for"):
            for target in (e.get(name) or "").split():
                assert target in ids, f"{name}={target} names nothing"
        for name in FETCHES:
            value = e.get(name)
            assert value is None or value[1:] in ids and value[0] == "#", f"{e.tag} {name}={value}"
        assert not any(name.startswith("on") for name in e.attrib), f"{e.tag} has a handler"
        assert e.get("tabindex") in (None, "0", "-1"), "the tab order is that of the page"
        if e.get("tabindex") == "0":
            assert e.get("role") == "region" and e.get("aria-label"), "a stop without a name"
    labels = {e.get("for") for e in page.iter("label")}
    assert all(e.get("id") in labels for e in page.iter("select"))
    levels = [int(e.tag[1]) for e in page.iter() if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:])), "a heading skips a level"
    assert page.get("lang") == "en" and page.find("head/title").text
    assert "hidden" in page.find(".//*[@id='controls']").attrib, (
        "only the script shows the controls"
    )
    assert not [e for e in page.iter("article") if "hidden" in e.attrib]


def check_tables(page):
    for table in page.iter("table"):
        assert table.find("caption").text
        columns = table.findall("thead/tr/th")
        assert columns and all(th.get("scope") == "col" for th in columns)
        for row in table.findall("tbody/tr"):
            assert len(row) == len(columns), table.find("caption").text
            assert row[0].tag == "th" and row[0].get("scope") == "row"
    figures = [e for e in page.iter("article") if e.find(".//svg") is not None]
    assert len(figures) > 40
    for figure in figures:
        check_svg(figure.find(".//svg"), figure.get("id"))
        check_numbers(figure.find(".//details//pre"), figure.get("id"))


def check_numbers(numbers, where):
    """The lines that the script makes a table of: a cell below each head, and a name for each row."""
    heads = int(numbers.get("data-heads"))
    columns, *rows = (line.split("\t") for line in numbers.text.split("\n"))
    assert numbers.get("data-caption") and all(columns) and 0 < heads < len(columns), where
    assert rows and all(rows[0]), f"{where} has no numbers"
    for row in rows:
        assert len(row) == len(columns), f"{where}: {row}"


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def check_contrast(style):
    """Text on every cell and lines on the paper, in the light, the dark and the printed scheme."""
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(schemes) == 3 and len({frozenset(s) for s in schemes}) == 1
    for scheme in schemes:
        for name, color in scheme.items():
            if re.fullmatch(r"[npc]\d|even|paper", name):
                assert contrast(scheme["ink"], color) >= 4.5, f"ink on {name}"
            elif re.fullmatch(r"s\d|muted|rule|one", name):
                assert contrast(scheme["paper"], color) >= 4.5, f"{name} on paper"


class Strict(html.parser.HTMLParser):
    """Counts what an HTML parser, which knows no XML, takes for elements of scripts."""

    def __init__(self):
        super().__init__()
        self.scripts = 0
        self.handlers = []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def main(tool):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.json").write_text(HOSTILE)
        what = "-o page.html --svg svg --model model.json --tokens 8192 --recipe rowwise".split()
        subprocess.run([tool, "report", "--quiet", *what], cwd=folder, check=True)
        text = (folder / "page.html").read_text(encoding="utf-8")
        page = ElementTree.fromstring(text)
        check_structure(page)
        check_tables(page)
        check_contrast(page.find("head/style").text)
        policy = page.find("head/meta[@http-equiv='Content-Security-Policy']").get("content")
        assert policy.startswith("default-src 'none'")
        parser = Strict()
        parser.feed(text)
        assert parser.scripts == 1 and not parser.handlers
        files = sorted((folder / "svg").iterdir())
        for file in files:
            root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
            assert root.tag == SVG + "svg", file
            check_svg(root, file.name)
            assert "prefers-color-scheme: dark" in root.find(SVG + "style").text, file
        print(f"{len(text)} bytes, {len(files)} figures, {len(list(page.iter('table')))} tables")


if len(sys.argv) != 2:
    sys.exit(__doc__)
main(str(pathlib.Path(sys.argv[1]).resolve()))
