"""The page of `watch`, as text: whatever names say, it stays text."""

import time
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from services.failover.checks.check_report import check_up
from services.failover.execute.journal import Entry
from services.failover.model.view import View
from services.failover.watch.pause import Pause, newer
from services.failover.watch.snapshot import Event, Point, Snapshot
from services.failover.watch.web.lag_chart import bytes_text, curves
from services.failover.watch.web.markup import document, el
from services.failover.watch.web.page import page
from services.failover.watch.web.topology import boxes_of
from tests.promises.failover.views import node, slot, state, subscriber, subscription, views

EVIL = "<script>alert('x')</script>\"&'\x00\ud800"


class Tags(HTMLParser):
    """The tags and scripts of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str | None] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag == "script":
            self.scripts.append(dict(attrs).get("src"))


def entry(**values: object) -> Entry:
    given = {"run": "r", "number": 1, "at": "2026-01-01T00:00:00+00:00", "by": EVIL}
    return Entry(**{**given, "command": EVIL, "step": EVIL, "outcome": EVIL, **values})  # type: ignore[arg-type]


def test_every_text_is_escaped() -> None:
    there = state(slot(EVIL), standby=False)
    pair = (
        replace(node("a", there), name=EVIL),
        replace(node("b", state(slot(EVIL))), detail=EVIL),
    )
    view = View(pair, (subscriber(EVIL, subscription(EVIL, slot_name=EVIL)),), EVIL)
    snapshot = Snapshot(
        at="2026-01-01T00:00:00",
        view=view,
        checkup=None,
        problem=EVIL,
        pause=Pause(True, "x", EVIL, EVIL),
        points=tuple(Point(float(n), {EVIL: n * 1000}) for n in range(3)),
        events=(Event("2026-01-01T00:00:00", EVIL),),
        entries=(entry(), entry(number=2, step="end")),
        at_work=EVIL,
    )
    text = page(snapshot, 2.0)
    text.encode()
    found = Tags(text)
    assert found.scripts == ["page.js"]
    assert not found.handlers
    assert "alert" in text
    assert "<script>alert" not in text


@given(views(), st.booleans())
def test_any_view_can_be_drawn(view: View, judged: bool) -> None:
    checkup = check_up(view) if judged and len(view.writable) < 2 else None
    text = page(Snapshot(at="2026-01-01T00:00:00", view=view, checkup=checkup), 1.0)
    assert text.count("<main") == 1
    titles = [box.title.split(" ")[0] for box in boxes_of(view)]
    assert {found.name for found in view.nodes} <= set(titles)
    for box in boxes_of(view):
        assert box.parent is None or boxes_of(view)[box.parent].depth == box.depth - 1


def test_thousands_of_points_make_a_small_drawing_that_keeps_its_peak() -> None:
    started = time.time()
    points = [Point(started + n, {f"c{k}": k * n for k in range(9)}) for n in range(5000)]
    points[2500] = Point(points[2500].at, {"c1": 2**30})
    text = document(curves(points))
    assert len(text) < 60_000
    assert "1.0 GB" in text
    assert "and 3 more" in text


def test_sizes_for_people() -> None:
    assert [bytes_text(n) for n in (None, 0, 1023, 1536, 20 * 2**20)] == [
        *("?", "0 B", "1023 B", "1.5 kB", "20 MB")
    ]


def test_of_two_pauses_the_later_holds() -> None:
    """By their numbers, whatever the clocks of the replicas said."""
    early, late = Pause(True, "2026-01-02", version=1), Pause(False, "2026-01-01", version=2)
    assert newer(early, late) == newer(late, early) == late
    assert newer(Pause(), early) == early
    apart = Pause(True, "2026-01-01", version=2)
    assert newer(apart, late) == newer(late, apart) == apart


def test_markup_keeps_text_between_elements() -> None:
    text = document(el("p", "a < b ", el("b", "c"), " & d", None, class_="x", id=None))
    assert text == '<!doctype html>\n<p class="x">a &lt; b <b>c</b> &amp; d</p>'


def test_a_run_beside_which_watch_notes_something_is_shown_once() -> None:
    """Not as one that was broken off, and one that is done."""
    of_watch = {"run": "w", "command": "watch", "step": "seen", "outcome": "done"}
    run = [
        entry(command="switchover", step="begin"),
        entry(**of_watch),
        entry(command="switchover", number=2, step="promote b"),
        entry(**{**of_watch, "number": 2}),
        entry(command="switchover", number=3, step="end", outcome="done"),
    ]
    shown = page(Snapshot(at="2026-01-01T00:00:00", entries=tuple(run)), 1.0)
    assert (shown.count("<details"), "broken off" in shown, ">done<" in shown) == (1, False, True)
