"""The report: what stands in it, that it is well formed, and that a real browser shows it without asking anyone."""

import itertools
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from bench import results
from hypothesis import given
from hypothesis import strategies as st

from dflash.bench import plots, report
from dflash.bench.plots import Bar, Series

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1100,2400",
    "--enable-logging=stderr",
]
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Nesting(HTMLParser):
    """Fails where an element is closed that is not the innermost open one."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    return report.page(results.result())


def test_the_page_nests_and_every_plot_has_a_title_and_a_description(page):
    seen = Nesting(page).seen
    images = [attrs for tag, attrs in seen if tag == "svg"]
    assert len(images) == 7 and all(image["role"] == "img" for image in images)
    ids = [attrs["id"] for tag, attrs in seen if tag in ("title", "desc") and "id" in attrs]
    assert len(ids) == len(set(ids)) == 2 * len(images)
    assert all(set(image["aria-labelledby"].split()) <= set(ids) for image in images)
    assert len([1 for tag, _ in seen if tag == "details"]) == len(images)  # the figures as a table


def test_the_page_names_no_address_and_has_no_script(page):
    assert "://" not in page and "<script" not in page and "@import" not in page
    assert not re.search(r'\b(src|href)="(?!data:,")', page)


def test_text_from_the_machine_is_escaped(page):
    assert "A &lt;fast&gt; &amp; small one" in page and "target &lt;&amp;&gt;" in page


def test_the_figures_are_those_of_the_result(page):
    assert "2.00 ×" in page and "4 / 4" in page
    assert "Width over time: chat" in page and "Width over time: code" in page
    assert "copies, where reached" in page and "draft, of all cycles" in page
    assert page.count("<td>equal</td>") == 4


def test_what_a_reader_must_not_miss_stands_on_top():
    replay = {"accepted_lengths": [6, 2], "draft_cost": "none", "agreement": 0.97}
    page = report.page(results.result(replay=replay, complete=False))
    assert "A replay, not a measurement of answers" in page and "6, 2 per cycle" in page and "97.0 %" in page
    assert "Interrupted." in page
    parted = results.result()
    tokens = parted["summary"]["tokens"] | {"verdict": "differs", "different_runs": 1, "largest_margin": 2.5}
    parted["summary"]["tokens"] = tokens
    parted["runs"][0]["first_difference"] = {"index": 3, "baseline": 1, "dflash": 2, "margin": 2.5}
    page = report.page(parted)
    assert "1 of 4 answers part" in page and "part at 3 (2.5)" in page and "more than rounding" in page
    assert "part from the baseline" not in report.page(results.result())


def test_one_length_without_a_draft_is_a_page_too():
    page = report.page(results.result(lengths=(16,), curve=None))
    assert page.count("<svg") == 5 and "Cost of a pass" not in page


def test_acceptance_is_pooled_over_runs_by_what_was_reached():
    runs = results.result(lengths=(9,))["runs"]
    found = report.pooled_positions(runs, "dflash")
    assert found[:4] == [(1, 1.0, 1.0), (2, 1.0, 1.0), (3, 1.0, 1.0), (4, 0.0, 0.0)]


def test_curves_of_different_answers_are_pooled_by_token():
    short = [{"token": at, "width": 2.0, "tokens_per_cycle": 1.0} for at in range(10)]
    long = [{"token": at * 10, "width": 4.0, "tokens_per_cycle": 3.0} for at in range(32)]
    found = report.pooled_along([short, long])
    assert [at for at, _, _ in found] == sorted(at for at, _, _ in found) and len(found) <= 32
    assert found[0][1:] == pytest.approx(((2.0 * 10 + 4.0) / 11, (10 + 3.0) / 11)) and found[-1] == (
        310,
        4.0,
        3.0,
    )


# ---------------------------------------------------------------- plots


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_few_evenly_spaced_and_reach_the_top(most, wanted):
    found = plots.ticks(most, wanted)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-6) and found[-2] < most
    assert len(found) <= 2 * wanted + 2
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-4)


coordinates = st.lists(
    st.tuples(st.integers(0, 8192), st.floats(0, 1e4)), min_size=1, max_size=40, unique_by=lambda p: p[0]
)


@given(st.lists(coordinates, min_size=1, max_size=5), st.booleans())
def test_lines_stay_inside_their_picture(drawn, even):
    series = [Series("<name> & more", sorted(points)) for points in drawn]
    svg = ET.fromstring(plots.lines("a < b", "about", series, across="x", up="y", even=even))
    _, _, width, height = map(float, svg.get("viewBox").split())
    for line in svg.iter("polyline"):
        for spot in line.get("points").split():
            x, y = map(float, spot.split(","))
            assert 0 <= x <= width and 0 <= y <= height


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8), st.floats(0, 100)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_bars_are_as_long_as_their_values(rows):
    drawn = [Bar(label, value, [value / 2, value]) for label, value in rows]
    svg = ET.fromstring(plots.bars("t", "about", drawn, "times", mark=1.0))
    lengths = [float(bar.get("width")) for bar in svg.iter("rect")]
    assert len(lengths) == len(rows)
    scale = max(lengths) / max(max(value for _, value in rows), 1e-9)
    for length, (_, value) in zip(lengths, rows, strict=True):
        assert length == pytest.approx(value * scale, abs=0.2)


# ---------------------------------------------------------------- a real browser


def shown(file, folder):
    """The page's DOM and the browser's console lines; leaves a picture in `folder`."""
    call = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'page.png'}"]
    done = subprocess.run([*call, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_real_browser_shows_the_page_and_has_nothing_to_say(page, tmp_path):
    """The page's policy forbids every request; the browser would tell the console of one."""
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    dom, console = shown(tmp_path / "report.html", tmp_path)
    assert console == []
    assert dom.count("<svg") == page.count("<svg") and "Width over time: code" in dom
    picture = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (1100, 2400) and len(picture) > 30_000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_browser_would_tell_of_a_request(page, tmp_path):
    asked = "http://127.0.0.1:9/"
    asking = page.replace(
        "</main>", f'<img src="{asked}a.png" alt=""><script src="{asked}b.js"></script></main>'
    )
    (tmp_path / "report.html").write_text(asking, encoding="utf-8")
    _, console = shown(tmp_path / "report.html", tmp_path)
    for name in ("a.png", "b.js"):
        assert any("Content Security Policy" in line and name in line for line in console), name
