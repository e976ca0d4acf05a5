"""The page in a real browser: no error, no request to elsewhere, fit for everybody."""

from __future__ import annotations

import pytest
from browser import Browser, find_axe
from made_runs import BEGIN, MadeRun, Outage, write_run
from test_dashboard_app import start, stop

pytestmark = pytest.mark.dist

SIZES = {"desk": (1280, 900), "phone": (390, 844)}
DRAWN = "Number(document.body?.dataset.drawn) > 0"
DEAD = Outage(island=1, at_s=100, seconds=9)
RUNS = {
    of.islands: of
    for of in (
        MadeRun(islands=3, seconds=240, outages=(DEAD,)),
        MadeRun(islands=64, seconds=180, outages=(DEAD,)),
    )
}
CUT_OFF = """
[...document.querySelectorAll('h2, dt, dd, .legend li, .parts li, button')]
  .filter(e => e.offsetWidth && !e.closest('.hidden, [hidden]')
    && e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent)
"""
"""Texts that are wider than their places."""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """The address of the dashboard of a made run, by its islands."""
    started = {
        islands: start(write_run(run, tmp_path_factory.mktemp("run")))
        for islands, run in RUNS.items()
    }
    yield {n: f"http://localhost:{port}/" for n, (_, port) in started.items()}
    for process, _ in started.values():
        stop(process)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("islands", RUNS)
def test_the_page_is_whole(browser, addresses, islands, size, scheme):
    axe = find_axe()
    browser.open(addresses[islands], *SIZES[size], scheme)
    browser.wait(DRAWN)
    browser.wait("document.querySelectorAll('#events tbody tr').length > 3")
    assert browser.troubles() == []
    here = (addresses[islands], "data:")
    assert [url for url in browser.requested() if not url.startswith(here)] == []
    page = "document.documentElement"
    assert browser.value(f"{page}.scrollWidth <= {page}.clientWidth")
    assert browser.value(CUT_OFF) == []
    assert len(browser.value(DRAWN_CHARTS)) == browser.value(VISIBLE_CHARTS)
    browser.value(axe + "; 1")
    found = browser.value("axe.run().then(r => r.violations)")
    serious = [
        (v["id"], v["nodes"][0]["html"])
        for v in found
        if v["impact"] in ("serious", "critical", "moderate")
    ]
    assert serious == []


DRAWN_CHARTS = "[...document.querySelectorAll('.chart canvas')].map(c => c.width)"
VISIBLE_CHARTS = "document.querySelectorAll('section:not([hidden]) .chart').length"


def test_all_is_reached_by_keyboard(browser, addresses):
    browser.open(addresses[3], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    reached = []
    for _ in range(20):
        browser.key("Tab")
        reached.append(browser.value("document.activeElement.id"))
    wanted = ["play", "live", "length", "until", "lanes", "merges", "words"]
    assert [name for name in wanted if name not in reached] == []
    browser.value("document.getElementById('lanes').focus()")
    for key in ("ArrowUp", "ArrowDown", "ArrowDown"):
        browser.key(key)
    said = "document.getElementById('lanes-said').textContent"
    assert browser.value(said).startswith(sorted(RUNS[3].names)[1])
    assert "computing" in browser.value(said)
    browser.key("Enter")
    browser.wait("document.querySelector('#islands tr.chosen') !== null")


def test_a_place_where_none_of_many_islands_has_a_loss_is_told(browser, addresses):
    browser.open(addresses[64], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    none = (
        "Array.from({length: 64}, (_, n) => ({seriesName: `${n}`, value: [0, null]}))"
    )
    chart = "echarts.getInstanceByDom(document.getElementById('loss'))"
    told = browser.value(f"{chart}.getOption().tooltip[0].formatter({none})")
    assert told.endswith("no island told its loss")


def test_what_did_not_change_is_not_read_aloud_again(browser, addresses):
    browser.open(addresses[3], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    browser.wait("document.querySelectorAll('#events tbody tr').length > 3")
    drawn = browser.value(WATCHED)
    browser.wait(f"Number(document.body.dataset.drawn) > {drawn}")
    assert browser.value("aloud") == []


WATCHED = """
window.aloud = [];
for (const place of document.querySelectorAll('[role=status], [aria-live]'))
  new MutationObserver(() => aloud.push(place.id))
    .observe(place, {childList: true, subtree: true, characterData: true});
const drawn = Number(document.body.dataset.drawn);
document.getElementById('live').click();
drawn
"""
"""Begin to note places that are read aloud when they change; have the page drawn."""


def test_the_slider_shows_the_run_as_it_was(browser, addresses):
    browser.open(addresses[3], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    text = "document.getElementById('until-text').textContent"
    assert browser.value(text).startswith("4:0")
    browser.value(
        "(u => { u.value = 440; u.dispatchEvent(new Event('input')) })"
        "(document.getElementById('until'))"
    )
    browser.wait(f"{text}.startsWith('1:46')")
    # The island that died at 1:40 is away at this end of the window.
    rows = "[...document.querySelectorAll('#islands tbody tr')]"
    browser.wait(f"{rows}.some(r => r.cells[2].textContent === 'away')")
    browser.value("document.activeElement.blur()")
    browser.key("l")
    browser.wait(f"{text}.startsWith('4:0')")


def test_the_tokens_that_were_lost_are_those_of_the_books(browser, addresses):
    browser.open(addresses[3], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    numbers = "[...document.querySelectorAll('#numbers div')].map(d => d.innerText)"
    assert "tokens lost\n8,192" in browser.value(numbers)


def test_a_failure_is_found_by_the_clock(browser, addresses):
    browser.open(addresses[3], *SIZES["desk"], "light")
    browser.wait(DRAWN)
    began, failed = (
        browser.value(f"new Date({1000 * at:.0f}).toLocaleTimeString('en-GB')")
        for at in (BEGIN, BEGIN + DEAD.at_s)
    )
    told = browser.value("document.getElementById('from').textContent")
    assert told.endswith(f" 2026, {began}")
    cell = "document.querySelector('#failures tbody td')"
    assert browser.value(f"{cell}.textContent") == "1:40"
    assert browser.value(f"{cell}.title") == failed


def test_events_are_searched(browser, addresses):
    browser.open(addresses[64], *SIZES["desk"], "dark")
    browser.wait(DRAWN)
    browser.key("/")
    for letter in "died":
        browser.key(letter)
    rows = "document.querySelectorAll('#events tbody tr')"
    browser.wait(f"{rows}.length === 1")
    assert "tokens are lost" in browser.value(f"{rows}[0].textContent")
