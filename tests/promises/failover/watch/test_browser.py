"""The page of `watch` in a real headless Chromium, and the API beside it, on a pair of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.failover.watch.web.api import _HEADERS
from tests.promises.failover.servers import (
    AS_ROLES,
    Ran,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.watch.watch_process import SETTINGS, TOKEN, Watching
from tests.providers.browser import running_browser
from tests.providers.interface import Provider, Trio
from tests.providers.waiting import eventually, patient_ms

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = "<script>document.title='evil'</script>"
CONTRAST_MIN = 4.5
"""Web Content Accessibility Guidelines 2.2, 1.4.3."""
CONTRAST = """() => {
  const rgb = text => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("h1,h2,p,dt,dd,td,th,span,li,summary,a,code")) {
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (element.textContent.trim()) found.push([contrast, element.textContent.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0])[0];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def trio(provider: Provider) -> Iterator[Trio]:
    with provider.new_trio(synchronous=False, settings={}) as made:
        subscribe(made, "s1")
        write(made.primary, made.dbname, 1)
        await_equal(made, made.primary)
        yield made


@pytest.fixture(scope="module")
def watching(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """A replica that watches the trio, of which one check warns and whose journal is evil."""
    config = configuration(
        tmp_path_factory.mktemp("watch"), trio, watch={**SETTINGS, "repoint": False, "token": TOKEN}
    )
    assert journalled(config).code == 0
    tell(
        trio.primary,
        "UPDATE slotfailover.journal SET by = " + quoted(EVIL),
        "ALTER SYSTEM SET synchronized_standby_slots = ''",
        "SELECT pg_reload_conf()",
    )
    replica = Watching(config)
    replica.await_verdict("rest")
    yield replica
    replica.end()


def journalled(config: Path) -> Ran:
    """A command that has nothing to do, and leaves its entries in the journal."""
    return slotfailover("repoint", "--config", config, "--yes")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def opened(browser: "Browser", watching: Watching, **options: object) -> "Page":
    """The page, whose console must stay silent."""
    page = browser.new_page(**options)  # type: ignore[arg-type]
    page.set_default_timeout(patient_ms(30_000))
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(watching.url)
    page.wait_for_selector("svg.curves")
    assert said == []
    return page


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_page_is_readable_in_light_and_dark_wide_and_narrow(
    browser: "Browser", watching: Watching, scheme: str, width: int, tmp_path: Path
) -> None:
    page = opened(browser, watching, viewport={"width": width, "height": 700}, color_scheme=scheme)
    try:
        contrast, where = page.evaluate(CONTRAST)
        assert contrast >= CONTRAST_MIN, where
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        channels = [int(part) for part in paper.strip("rgb()").split(",")]
        assert (max(channels) < 64) == (scheme == "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('svg.topology text, svg.curves text')].map("
            "t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a))"
        )
        assert smallest >= 9.5
        page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    finally:
        page.close()


def test_page_shows_what_the_api_says(browser: "Browser", watching: Watching) -> None:
    page = opened(browser, watching)
    try:
        status = watching.status
        assert page.title() == "Slotbridge: a"
        assert page.locator("h1").inner_text() == "A failover is safe now"
        picture = page.locator("svg.topology").text_content() or ""
        for expected in ("a · primary", "b · standby, streams", "sub/s1", "connected"):
            assert expected in picture
        assert [slot["slot"] for slot in status["slots"]] == ["s1"]
        assert "ready" in page.locator("table.slots").inner_text()
        assert "standby-slot-listed" in page.locator("ul.problems").inner_text()
        assert EVIL in (page.locator("summary").first.text_content() or "")
        assert len(page.locator("ul.legend li").all()) == len(status["lag_bytes"]) == 2
    finally:
        page.close()


@pytest.mark.long
def test_page_refreshes_by_itself_and_keeps_what_was_opened(
    browser: "Browser", watching: Watching, trio: Trio
) -> None:
    page = opened(browser, watching)
    try:
        page.locator("details").first.click()
        marked = "document.querySelector('main').dataset.mine = 'old'"
        page.evaluate(marked)
        gone = "!document.querySelector('main').dataset.mine"
        eventually(lambda: page.evaluate(gone), what="the page is fetched anew")
        assert page.locator("details[open]").count() == 1
        tell(trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=trio.dbname)
        page.locator("text=subscription-enabled").wait_for()
        tell(trio.subscriber, "ALTER SUBSCRIPTION s1 ENABLE", dbname=trio.dbname)
        page.locator("text=subscription-enabled").wait_for(state="detached")
    finally:
        page.close()


@pytest.mark.long
def test_the_page_works_without_scripts(browser: "Browser", watching: Watching) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(watching.url)
        assert page.locator("svg.topology").count() == 1
        assert page.locator("noscript meta").count() == 1
        with page.expect_navigation():
            pass  # by its meta element
    finally:
        context.close()


@pytest.mark.long
def test_the_page_loads_nothing_from_other_hosts(watching: Watching) -> None:
    answer = watching.ask("")
    assert answer.headers["content-security-policy"] == _HEADERS["Content-Security-Policy"]
    assert "http://" not in answer.text and "https://" not in answer.text
    for name in ("page.css", "page.js"):
        assert "://" not in watching.ask(name).text


def test_orders_need_the_token(watching: Watching) -> None:
    said = watching.ask("v1/pause", body=b"")
    assert (said.status, "a token is needed" in said.text) == (401, True)
    assert said.headers["www-authenticate"].startswith("Bearer")
    for wrong in (TOKEN[:-1], TOKEN + "x", "ä" * 20):
        assert watching.ask("v1/resume", token=wrong, body=b"").status == 401
    for body in (b"{", b"[]", b'{"why": 1}', b'{"reason": 1}', b"x" * 5000):
        assert watching.ask("v1/pause", token=TOKEN, body=body).status == 400
    assert watching.ask("v1/pause").status == 405
    assert not watching.status["pause"]["at"]
    watching.order("pause", "for a test")
    eventually(lambda: watching.metric("slotfailover_paused") == 1, what="it is paused")
    assert watching.status["pause"]["reason"] == "for a test"
    watching.order("resume")
    eventually(lambda: watching.metric("slotfailover_paused") == 0, what="it goes on")


@pytest.mark.long
def test_orders_are_refused_if_no_token_is_set(trio: Trio, tmp_path: Path) -> None:
    replica = Watching(configuration(tmp_path, trio, watch=SETTINGS))
    try:
        said = replica.ask("v1/pause", token=TOKEN, body=b"")
        assert said.status == 403
        assert "set failover.watch.token" in said.json["error"]
    finally:
        replica.end()
    short = configuration(tmp_path, trio, watch={**SETTINGS, "token": "short"})
    refused = slotfailover("watch", "--config", short)
    assert (refused.code, "at least 16" in refused.err) == (2, True)


@pytest.mark.long
def test_the_api_says_what_the_commands_say(watching: Watching) -> None:
    assert watching.ask("v1/checks").json["ready"] is True
    plan = watching.ask("v1/plan").json
    assert plan["order"] == "switchover"
    if AS_ROLES:  # who may not fence is told no steps
        assert "lacks the privilege to end sessions and to fence" in plan["error"]
    else:
        assert plan["new_primary"] == "b"
        assert plan["steps"][0]["sql"] is not None
    assert watching.ask("v1/history").json["entries"][0]["command"] == "repoint"
    assert watching.ask("healthz").text == "ok"
    assert watching.metric('slotfailover_slot_ready{slot="s1",standby="b"}') == 1
    assert watching.metric('slotfailover_up{server="sub"}') == 1
    assert "hush" not in watching.ask("v1/status").text + watching.ask("v1/plan").text
