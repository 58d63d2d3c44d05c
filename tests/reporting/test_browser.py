"""The report in a real browser: nothing fails, nothing is loaded, nothing sticks out."""

from __future__ import annotations

import pytest

from fedxl.reporting import document
from tests.reporting import browser, sample

pytestmark = pytest.mark.skipif(
    browser.binary() is None, reason=f"needs a browser: one of {', '.join(browser.NAMES)}"
)
LOOKS = [
    *((width, scheme, "screen") for width in (390, 1440) for scheme in ("light", "dark")),
    (695, "light", "print"),  # A4 without its margins
]
COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
# What reaches beyond the window, besides what scrolls inside its own box (on paper nothing scrolls) and parts of SVG.
STICKING_OUT = """
[...document.querySelectorAll('body *')].filter(each => {
  const scrolls = !matchMedia('print').matches && each.closest('.scroll') && !each.matches('.scroll');
  const box = each.getBoundingClientRect();
  return !scrolls && !each.closest('svg > *') && (box.right > innerWidth + 1 || box.left < -1);
}).map(each => each.outerHTML.slice(0, 120))
"""
SIZES = """
[...document.querySelectorAll('svg')].map(each => [each.clientWidth, each.clientHeight, each.getAttribute('role')])
"""
TEXT_CUT_OFF = """
[...document.querySelectorAll('svg text')].filter(each => {
  const box = each.getBoundingClientRect(), around = each.ownerSVGElement.getBoundingClientRect();
  return box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1
    || box.bottom > around.bottom + 1;
}).map(each => each.textContent)
"""
LETTERS_THAT_TOUCH = """
[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  const all = [...chart.querySelectorAll('.letter')].map(each => [each.textContent, each.getBoundingClientRect()]);
  return all.flatMap(([a, one], i) => all.slice(i + 1).filter(([b, two]) =>
    one.left + 2 < two.right && two.left + 2 < one.right && one.top + 4 < two.bottom && two.top + 4 < one.bottom
  ).map(([b]) => a + b));
})
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    found = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module", params=["plain", "hostile"])
def page(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    long = "W" * 90 + " " + sample.EVIL
    document.write(path, sample.runs(long if request.param == "hostile" else ""))
    return path.as_uri()


@pytest.mark.parametrize(("width", "scheme", "media"), LOOKS)
def test_the_report_reads_well(chromium, page, width, scheme, media):
    chromium.look(width, scheme, media)
    chromium.go(page)
    assert [event["params"] for event in chromium.events if event["method"] in COMPLAINTS] == []
    requests = {event["params"]["request"]["url"] for event in chromium.events if "request" in event["params"]}
    assert requests == {page}, "it loads nothing but itself"
    sizes = chromium.value(SIZES)
    charts = chromium.value("document.querySelectorAll('svg.chart').length")
    assert charts == 7, "ROC, precision and recall, calibration, counts, decision, convergence, bytes"
    assert len(sizes) == charts + 4, "and a row for all sites and each of three"
    assert all(wide > 50 and high > 10 and role == "img" for wide, high, role in sizes)
    assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.value(STICKING_OUT) == []
    assert chromium.value(TEXT_CUT_OFF) == []
    assert chromium.value(LETTERS_THAT_TOUCH) == []
    assert (
        chromium.value("document.scripts.length + document.querySelectorAll('img, link, iframe, object').length") == 0
    )


@pytest.fixture(scope="module", params=["plain", "hostile"])
def several(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "report.html"
    evil = "W" * 90 + " " + sample.EVIL if request.param == "hostile" else ""
    document.write(path, [sample.labelled(6, evil)])
    return path.as_uri()


@pytest.mark.parametrize(("width", "scheme", "media"), [LOOKS[0], LOOKS[3], LOOKS[-1]])
def test_the_report_of_several_labels_reads_well(chromium, several, width, scheme, media):
    chromium.look(width, scheme, media)
    chromium.go(several)
    assert [event["params"] for event in chromium.events if event["method"] in COMPLAINTS] == []
    charts = chromium.value("document.querySelectorAll('svg.chart').length")
    assert charts == 5 + 4 + 2, "ROC of all but the label with one class, calibration of all but two, and two more"
    ids = "[...document.querySelectorAll('[id]')].map(each => each.id)"
    found = chromium.value(ids)
    assert len(set(found)) == len(found), "each picture has names of its own"
    beside = chromium.value("getComputedStyle(document.querySelector('.many')).gridTemplateColumns.split(' ').length")
    assert beside == {390: 2, 1440: 7, 695: 4}[width]
    assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.value(STICKING_OUT) == []
    assert chromium.value(TEXT_CUT_OFF) == []


def test_dark_is_dark_and_print_is_light(chromium, page):
    background = "getComputedStyle(document.body).backgroundColor"
    found = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        chromium.look(1440, scheme, media)
        chromium.go(page)
        found[scheme, media] = chromium.value(background)
    assert found["light", "screen"] == found["dark", "print"] == "rgb(255, 255, 255)"
    assert found["dark", "screen"] == "rgb(20, 23, 27)"
    assert chromium.pdf().startswith(b"%PDF-")


def test_what_would_be_a_script_is_not_run_even_if_it_got_in(chromium, tmp_path):
    """The content security policy by itself: a script, an image and a style sheet of others come to nothing."""
    text = document.render(document.build(sample.runs()[:1]))
    more = "<script>document.title = 'run'</script><img src='other.png'><link rel='stylesheet' href='other.css'>"
    path = tmp_path / "broken.html"
    path.write_text(text.replace("</main>", f"{more}</main>"))
    chromium.go(path.as_uri())
    assert chromium.value("document.title") != "run"
    blocked = [
        e for e in chromium.events if e["method"] == "Log.entryAdded" and "Security" in e["params"]["entry"]["text"]
    ]
    assert len(blocked) == 3
