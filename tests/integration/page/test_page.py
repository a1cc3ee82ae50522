"""The page, in a real browser."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route, expect
from tests.integration.page.conftest import NARROW, PHONE, WAIT_MS, WIDE
from tests.support.fleet import ITEM, Trainer, admin_of, follow, wait_until_delivered, wait_until_in_sync
from tests.support.local_cluster import LocalCluster
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from tests.support.wire import TABLES, USER, ReplicaStream, ack, size_of

from deltasync.access.roles import Grant, Role, Roles, TokenRoles, token_digest
from deltasync.client import NumpyTarget, TableSpec
from deltasync.core.policy import Policy
from deltasync.status.answers import Sampler
from deltasync.wire.messages import position_from_message

expect.set_options(timeout=WAIT_MS)
Open = Callable[..., Page]
VIEWS = ("#/", "#/consumers/predictors", "#/tables", "#/tables/item")
Status = dict[str, Any]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies={"mobile": Policy(top_k=5)}) as service:
        yield service


class InSync(NamedTuple):
    """A service whose one consumer, "predictors", is in sync, and what it then answers to `/status`."""

    http: str
    status: Status


@pytest.fixture(scope="module")
def in_sync(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InSync]:
    tables = [ITEM, TableSpec("towers/" + "history" * 20, 4, 2)]
    folder = tmp_path_factory.mktemp("in-sync")
    with RunningService(folder) as service, Trainer(service.grpc, tables) as trainer:
        admin_of(service).delete_consumer("probes")
        with follow(service, "predictors", "p", NumpyTarget()):
            wait_until_in_sync(service, "predictors", trainer.publish_all())
            yield InSync(service.http, service.get_json("/status"))


def answer(page: Page, *statuses: Status) -> None:
    """Answer the page's next requests for `/status` with these, and then close the connection."""
    body = "".join(f"event: status\ndata: {json.dumps(each)}\n\n" for each in statuses)
    page.route("**/status", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def live(page: Page) -> None:
    expect(page.locator("#connection.good")).to_contain_text("Live")


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_can_be_read_by_all(service: RunningService, opened: Open, width: int, scheme: str) -> None:
    with (
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", NumpyTarget()),
        follow(service, "mobile", "m", NumpyTarget()),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        page = opened(service.http, width, scheme)
        for view in VIEWS:
            page.goto(f"{service.http}/{view}")
            live(page)
            expect(page.locator("tbody tr").first).to_be_visible()
            found = Axe().run(page)
            assert found.violations_count == 0, (view, found.generate_report())
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view


def test_it_shows_what_is_wrong_and_updates_itself(service: RunningService, opened: Open) -> None:
    page = opened(service.http)
    live(page)
    with Trainer(service.grpc) as trainer:
        sealed = trainer.publish_all()
        expect(page.locator("tr", has_text="clicks 1")).to_contain_text("100")
        with follow(service, "predictors", "p", NumpyTarget()):
            wait_until_in_sync(service, "predictors", sealed)
            wait_until_in_sync(service, "predictors", trainer.publish_all())
            row = page.locator("tr", has=page.get_by_role("link", name="predictors", exact=True))
            expect(row).to_contain_text("in sync")
            bar = page.locator("tr", has_text="clicks 2").get_by_role("img")
            expect(bar).to_have_attribute("aria-label", _every_part())
    page.get_by_role("link", name="probes", exact=True).click()
    expect(page.locator("h2").first).to_contain_text("Consumer probes: empty")
    page.get_by_role("link", name="item").click()
    expect(page.locator("main")).to_contain_text(f"{ITEM.rows} rows of {ITEM.dim}")


def test_it_shows_kept_versions_and_who_follows_them(service: RunningService, opened: Open) -> None:
    page, admin = opened(service.http), admin_of(service)
    live(page)
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin.keep_version("clicks", "good")
        admin.keep_version("clicks")
        admin.follow_version("mobile", "good")
        trainer.publish_all()
        row = page.get_by_role("table", name="Cuts").locator("tr", has_text="clicks 1")
        expect(row).to_contain_text("good, followed by mobile; without a name")
        expect(page.locator("tr", has=page.get_by_role("link", name="mobile", exact=True))).to_contain_text(
            "follows version 1 (good) since"
        )
        admin.follow_version("mobile", "live")
        expect(row).not_to_contain_text("followed by")
        admin.release_version("clicks", "good")
        expect(row).not_to_contain_text("good")


def test_a_kept_version_older_than_the_last_cuts_has_a_line_of_its_own(in_sync: InSync, opened: Open) -> None:
    # Clearly over two hours: the page's clock may run a little behind.
    two_hours_ago = in_sync.status["unix_ms"] * 10**6 - 7230 * 10**9
    kept = {
        "model": "ads",
        "version": 3,
        "name": "old",
        "sealed_unix_ns": two_hours_ago,
        "bytes": 5,
        "followers": ["a", "b"],
    }
    page = opened("about:blank")
    answer(page, in_sync.status | {"kept": [kept]})
    page.goto(in_sync.http)
    lines = page.get_by_role("table", name="Cuts").locator("tbody tr")
    expect(lines).to_have_count(2)
    expect(lines.last.locator("th, td")).to_have_text(
        ["ads 3", "old, followed by a, b", *["\N{EN DASH}"] * 5, "2.0 h"], use_inner_text=True
    )


def _every_part() -> re.Pattern[str]:
    return re.compile(".*".join(("gather", "send", "seal", "log", "apply", "release", "ack")))


@pytest.mark.nightly
def test_a_replica_that_is_away_is_named_with_the_reason(service: RunningService, opened: Open) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with ReplicaStream(service.grpc, consumer="predictors", replica="p-7") as replica:
            rows, end = replica.release()
            replica.send(ack(size_of(rows), position_from_message(end.position)))
            wait_until_delivered(service, "predictors", position_from_message(end.position))
        page = opened(f"{service.http}/#/consumers/predictors")
        row = page.locator("tr", has_text="p-7")
        expect(row).to_contain_text("away")
        expect(row.locator("td.description")).to_contain_text("away for")
        page.goto(f"{service.http}/#/")
        expect(page.locator(".flow").get_by_role("link", name="predictors/p-7: away for")).to_be_visible()


@pytest.mark.nightly
def test_it_says_when_the_connection_is_lost_and_comes_back(tmp_path: Path, opened: Open) -> None:
    with RunningService(tmp_path / "data") as service:
        port = int(service.http.rpartition(":")[2])
        page = opened(service.http)
        live(page)
    expect(page.locator("#connection.bad")).to_contain_text("Connection lost: trying again; showing the state of")
    with RunningService(tmp_path / "data", http_port=port):
        live(page)


@pytest.mark.nightly
def test_it_says_when_nothing_new_comes_although_it_is_connected(
    service: RunningService, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say, since the service waits for a disk: its stream goes on, without news."""
    page = opened("about:blank")
    page.clock.install()
    page.goto(service.http)
    live(page)
    ended = asyncio.Event()
    monkeypatch.setattr(Sampler, "_look", lambda _: ended.wait())
    before = page.locator("#time").inner_text()
    page.clock.fast_forward(11_000)
    expect(page.locator("#connection.bad")).to_contain_text(f"No update since {before}")
    monkeypatch.undo()


@pytest.mark.nightly
def test_what_is_gone_is_shown_no_more(service: RunningService, opened: Open) -> None:
    page = opened(f"{service.http}/#/consumers/mobile")
    expect(page.locator("h2").first).to_contain_text("Consumer mobile: empty")
    admin_of(service).delete_consumer("mobile")
    expect(page.locator("#trouble")).to_contain_text("no consumer 'mobile'")
    expect(page.locator("main")).to_be_hidden()
    live(page)
    admin_of(service).create_consumer("mobile", "clicks", Policy(top_k=5))
    expect(page.locator("main")).to_be_visible()
    expect(page.locator("#trouble")).to_be_empty()


@pytest.mark.nightly
def test_any_name_has_a_page(service: RunningService, opened: Open) -> None:
    with Trainer(service.grpc, [TableSpec("towers/100%", 4, 2)]) as trainer:
        trainer.publish_all()
        page = opened(f"{service.http}/#/tables")
        page.get_by_role("link", name="towers/100%").click()
        expect(page.locator("main")).to_contain_text("4 rows of 2")
        page.goto(f"{service.http}/#/tables/towers/100%")  # As somebody may have written it.
        page.reload()
        expect(page.locator("main")).to_contain_text("4 rows of 2")


@pytest.mark.nightly
def test_what_is_read_and_focused_stays_so(service: RunningService, opened: Open) -> None:
    page = opened(service.http)
    live(page)
    page.evaluate(
        "window.said = 0; new MutationObserver(() => window.said++).observe("
        "document.getElementById('connection'), {subtree: true, childList: true, characterData: true})"
    )
    names = page.get_by_role("table", name="Consumers").locator("tbody th")
    expect(names).to_have_text(["mobile", "predictors", "probes"])
    link = page.get_by_role("link", name="mobile", exact=True)
    link.focus()
    with Trainer(service.grpc) as trainer, follow(service, "mobile", "m", NumpyTarget()):
        trainer.publish_all()
        expect(names).to_have_text(["predictors", "probes", "mobile"])
        expect(link).to_be_focused()
    assert page.evaluate("window.said") == 0
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_contain_text("Consumer mobile")
    expect(page.locator("main")).to_be_focused()


@pytest.mark.nightly
def test_all_is_in_sync_only_if_there_is_something(tmp_path: Path, opened: Open) -> None:
    with RunningService(tmp_path / "data") as service:
        for name in ("predictors", "probes"):
            admin_of(service).delete_consumer(name)
        page = opened(service.http)
        live(page)
        expect(page.locator(".cards")).to_contain_text("no consumer")
    with RunningService(tmp_path / "other") as service, Trainer(service.grpc) as trainer:
        admin_of(service).delete_consumer("probes")
        with follow(service, "predictors", "p", NumpyTarget()):
            wait_until_in_sync(service, "predictors", trainer.publish_all())
            page = opened(service.http)
            expect(page.locator(".cards .good")).to_have_text("all")


@pytest.mark.nightly
def test_that_of_any_process_shows_all_of_them(tmp_path: Path, opened: Open) -> None:
    watcher = TokenRoles("watcher", token_digest("see"), (Grant(Role.READ),))
    with LocalCluster(tmp_path, roles=Roles((watcher,)), lease_seconds=4) as cluster:
        first, second = cluster.processes
        here, there = cluster.model(first, "desktop"), cluster.model(second, "mobile")
        for process in cluster.processes:
            page = opened(process.http)
            page.get_by_label("Token").fill("see")
            page.keyboard.press("Enter")
            expect(page.locator("#connection.good")).to_have_text("Live: a, b")
            expect(page.locator(".flow")).to_contain_text("2 of 2 processes ready")
            for consumer, model in (("desktop", here), ("mobile", there)):
                expect(page.locator("tr", has_text=f"{model} 1")).to_be_visible()
                page.get_by_role("link", name=consumer, exact=True).click()
                expect(page.locator("main")).to_contain_text(f"model {model}, version 1")
                page.go_back()
            page.goto(f"{process.http}/#/tables")
            expect(page.locator("tbody tr")).to_have_count(2 * len(TABLES))
            page.goto(f"{process.http}/#/tables/{USER.name}")
            for consumer in ("desktop", "mobile"):
                expect(page.locator("tr", has_text=consumer)).to_be_visible()
            page.goto(f"{process.http}/#/")
        cluster.kill(first)  # The page is of the second one.
        expect(page.locator("#connection.warn")).to_have_text("Live: b; no answer from a")
        expect(page.get_by_role("link", name="mobile", exact=True)).to_be_visible()
        expect(page.locator("#connection.good")).to_have_text("Live: b")
        expect(
            page.get_by_role("link", name="desktop", exact=True)
        ).to_be_visible()  # The second one has taken it.


def guarded(folder: Path) -> RunningService:
    """A service for which token "see" may read and "pub" publish."""
    roles = folder / "roles.toml"
    roles.write_text(
        f'[tokens.watcher]\nsha256 = "{token_digest("see").hex()}"\nroles = ["read"]\n'
        f'[tokens.publisher]\nsha256 = "{token_digest("pub").hex()}"\nroles = ["publish:clicks"]\n'
    )
    return RunningService(folder / "data", admin_token=None, roles=roles)


@pytest.mark.nightly
def test_it_shows_nothing_that_a_role_may_not_see(tmp_path: Path, opened: Open) -> None:
    with guarded(tmp_path) as service:
        page = opened(service.http)
        unknown, known = (
            "no valid token or certificate: role read",
            "'publisher' has no role read",
        )
        for token, refusal in (("", unknown), ("pub", known), ("wrong", unknown)):
            if token:
                page.get_by_label("Token").fill(token)
                page.keyboard.press("Enter")
            expect(page.locator("#refusal")).to_contain_text(refusal)
            expect(page.locator("main")).to_be_empty()
            assert "predictors" not in page.content()
        page.get_by_label("Token").fill("see")
        page.get_by_role("button", name="Show").click()
        live(page)
        expect(page.get_by_role("link", name="predictors", exact=True)).to_be_visible()
        assert "see" not in page.url


@pytest.mark.nightly
def test_the_token_that_was_shown_last_counts(tmp_path: Path, opened: Open) -> None:
    unanswered = list[Route]()

    def let_wrong_wait(route: Route) -> None:
        wrong = route.request.headers.get("authorization") == "Bearer wrong"
        unanswered.append(route) if wrong else route.continue_()

    with guarded(tmp_path) as service:
        page = opened(service.http)
        expect(page.locator("#refusal")).not_to_be_empty()
        page.route("**/status", let_wrong_wait)
        for token in ("wrong", "see"):
            page.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")
            page.wait_for_function("sessionStorage.getItem('token') === " + repr(token))
        unanswered.pop().continue_()
        live(page)
        expect(page.locator("#refusal")).to_be_hidden()


@pytest.mark.nightly
def test_it_is_used_by_keyboard_alone(service: RunningService, opened: Open) -> None:
    page = opened(service.http)
    live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    link = page.get_by_role("link", name="predictors", exact=True)
    for _ in range(30):
        page.keyboard.press("Tab")
        if link.evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_contain_text("Consumer predictors")


@pytest.mark.nightly
def test_many_consumers_and_many_tables_do_not_choke_it(tmp_path: Path, opened: Open) -> None:
    tables = [TableSpec(f"t{number:04}", 2, 4) for number in range(2000)]
    many = {f"c{number:03}": Policy(tables=("t0000", "t0001")) for number in range(200)}
    with RunningService(tmp_path / "data", policies=many) as service, Trainer(service.grpc, tables) as trainer:
        trainer.publish_all()
        page = opened(service.http)
        live(page)
        expect(page.get_by_role("table", name="Consumers").locator("tbody tr")).to_have_count(202)
        page.get_by_label("Consumer", exact=True).fill("c17")
        expect(page.get_by_role("table", name="Consumers").locator("tbody tr")).to_have_count(10)
        page.goto(f"{service.http}/#/tables")
        expect(page.get_by_text("the first 200 of 2000")).to_be_visible()
        page.get_by_label("Table", exact=True).fill("t1999")
        expect(page.locator("tbody tr")).to_have_count(1)
        first = page.locator("#time").inner_text()
        expect(page.locator("#time")).not_to_have_text(first)
        page.goto(f"{service.http}/#/consumers/predictors")
        expect(page.get_by_text("the first 200 of 2000")).to_be_visible()


def test_a_rate_is_shown_once_it_is_known(in_sync: InSync, opened: Open) -> None:
    """Not before two reports of one process have come over one connection, and not where a counter went back."""
    page = opened("about:blank")
    for counters, shown in (([5], None), ([5, 7], "2.0 MB/s"), ([5, 7, 1], None), ([5, 7, 1, 4], "3.0 MB/s")):
        answer(page, *(_sent(in_sync.status, at, each) for at, each in enumerate(counters)))
        page.goto("about:blank")
        page.goto(in_sync.http)
        _expect_rate(page, shown)
    answer(page, _sent(in_sync.status, 9, 9))  # The answer to the next connection.
    _expect_rate(page, None)


def _sent(status: Status, second: int, megabytes: int) -> Status:
    """What a service reports after some seconds, in which it has sent that much."""
    found = deepcopy(status)
    found["unix_ms"] += 1000 * second
    for each in found["consumers"]:
        each |= {"released_bytes": megabytes * 10**6, "released_rows": megabytes}
    for each in found["models"]:
        each |= {"published_bytes": megabytes * 10**6}
    return found


def _expect_rate(page: Page, shown: str | None) -> None:
    card = page.locator(".cards li", has_text="How much?")
    value = card.locator("strong")
    expect(value).to_have_text(shown or "\N{EN DASH}")
    chart = page.locator("figcaption", has_text="Bytes sent per second")
    if shown:
        rows = shown.partition(".")[0]
        expect(card).to_contain_text(f"{rows} rows/s to replicas; {shown} from trainers")
        expect(chart).to_contain_text(f": {shown.removesuffix('/s')} now")
        expect(value).not_to_have_attribute("title", "measuring")
    else:
        expect(value).to_have_attribute("title", "measuring")
        expect(card.locator(".soft")).to_have_text("measuring")
        expect(chart).to_contain_text("unknown")


def test_a_process_that_nobody_hears_leaves_a_rate_and_a_sum_open(in_sync: InSync, opened: Open) -> None:
    page = opened("about:blank")
    answer(page, *(_sent(in_sync.status, at, at) | {"missing": ["b"]} for at in range(2)))
    page.goto(in_sync.http)
    cards = page.locator(".cards")
    expect(cards).to_contain_text("at least 1.0 MB/s")
    expect(cards).to_contain_text("at least 1 consumer")
    expect(page.locator(".flow")).to_contain_text("1 in total, others unknown")


AWAY = [{"replica": "p", "reason": "away for 3 s: its connection was lost"}]
UNKNOWN = {"state": "waiting", "head": None, "lag": None, "fleet": None, "connected": None}
SYNC, STALE, TRAINERS = (f'li:has-text("{title}")' for title in ("In sync?", "How stale?", "Trainers"))
SERVICE = '.flow > li:has(strong:text-is("Service"))'
CONSUMER = 'table:has-text("unsent") tr:has-text("predictors")'
CUT = 'tr:has-text("clicks 1")'


# What the service says otherwise than when all is in sync, and what then stands where on the page.
WORDS: list[tuple[str, Status, dict[str, str]]] = [
    ("consumers", {}, {SYNC: "In sync?all1 consumer, 1 replica"}),
    (
        "consumers",
        {"replicas": AWAY, "connected": 0},
        {SYNC: "In sync?all but 1 replica1 consumer, 1 of 1 replica to look at", CONSUMER: "in sync"},
    ),
    ("consumers", {"replicas": AWAY, "state": "away"}, {SYNC: "1 of 1 not1 consumer, 1 of 1 replica to look at"}),
    ("consumers", {"state": "delivered"}, {SYNC: "In sync?all, but not verified"}),
    ("consumers", {"state": "empty"}, {SYNC: "In sync?1 of 1 not", STALE: "How stale?unknown"}),
    ("consumers", UNKNOWN, {SYNC: "In sync?1 of 1 not", CONSUMER: "waiting"}),
    ("processes", {"ready": False}, {SYNC: "In sync?unknown for some", STALE: "How stale?at least 0 s"}),
    (
        "models",
        {"trouble": "the last cut was refused"},
        {SYNC: "In sync?all, but 1 model cannot seal", SERVICE: "clicks: version 1, the last cut was refused"},
    ),
    (
        "models",
        {"head": None, "trouble": "no live process owns this model"},
        {SYNC: "In sync?unknown for some", SERVICE: "clicks: no live process owns this model"},
    ),
    ("models", {"head": 0}, {SERVICE: "clicks: no version yet"}),
    ("models", {"ranks": 4}, {TRAINERS: "1 of 4 ranks connectedclicks rank 0: connected"}),
    ("models", {"ranks": 4}, {TRAINERS: "clicks: 3 ranks have not connected since the service started"}),
    ("models", {"connected": 0, "finished": 1}, {TRAINERS: "0 of 1 ranks connected, 1 finished"}),
    ("models", {"ranks": 0, "connected": 0}, {TRAINERS: "no trainer since the service started"}),
    ("trainers", {"connected": False, "finished": True}, {TRAINERS: "clicks rank 0: finished"}),
    ("trainers", {"connected": False, "left": "its connection was lost"}, {TRAINERS: "away, its connection"}),
]


def test_its_words_are_true_of_what_the_service_says(in_sync: InSync, opened: Open) -> None:
    page = opened("about:blank")
    for name, changes, said in WORDS:
        status = deepcopy(in_sync.status)
        status[name][0] |= changes
        answer(page, status)
        page.goto("about:blank")
        page.goto(in_sync.http)
        for where, text in said.items():
            found = page.locator(where)
            expect(found, f"{name} {changes}").to_contain_text(text)
            if changes:
                expect(found.locator("strong.good, td .good"), f"{name} {changes}").to_have_count(0)


def test_what_is_not_known_is_a_dash(in_sync: InSync, opened: Open) -> None:
    """It is neither zero nor empty, and the sum of a cut whose way is not over is named as such."""
    status = deepcopy(in_sync.status)
    status["consumers"][0] |= UNKNOWN | {"freshness": {"counts": [0] * 99, "count": 0, "p50": None, "p99": None}}
    status["cuts"][0]["seconds"]["ack"] = None
    page = opened("about:blank")
    answer(page, status)
    page.goto(in_sync.http)
    cells = page.locator(CONSUMER).locator("td.number")
    expect(cells).to_have_text(["\N{EN DASH}"] * 9)
    for cell in cells.all():
        expect(cell).to_have_attribute("title", "unknown")
    expect(page.locator(CUT)).to_contain_text(re.compile(r"s so far"))
    expect(page.locator(STALE)).to_contain_text("freshness not measured yet")


def test_a_consumer_shows_its_offset_and_no_unknown_age(in_sync: InSync, opened: Open) -> None:
    """Without releases there is no row that one has left."""

    releases = {"offset 1,234;": None, "offset 1,234, counted in releases;": {"number": 1234}}

    def behind(route: Route) -> None:
        lag = route.fetch().json()
        for each in lag["tables"]:
            each |= {"rows": 5, "oldest_row_seconds": None, "unsent_norm": None, "unsent_share": None}
        route.fulfill(json=lag | {"offset": 1234, "release": releases[offset]})

    page = opened("about:blank")
    answer(page, in_sync.status)
    page.route("**/consumers/predictors", behind)
    for offset in releases:
        page.goto("about:blank")
        page.goto(f"{in_sync.http}/#/consumers/predictors")
        expect(page.locator("main")).to_contain_text(f"model clicks, version 1, {offset}")
        cells = page.locator("tr", has_text="item").locator("td")
        expect(cells).to_have_text(["5", re.compile("B"), *["\N{EN DASH}"] * 3])


def test_a_consumer_that_needs_somebody_comes_first_and_is_not_green(in_sync: InSync, opened: Open) -> None:
    status = deepcopy(in_sync.status)
    status["consumers"] = [status["consumers"][0] | {"consumer": each} for each in ("a", "b", "c")]
    status["consumers"][1] |= {"replicas": AWAY}
    page = opened("about:blank")
    answer(page, status)
    page.goto(in_sync.http)
    table = page.get_by_role("table", name="Consumers")
    expect(table.locator("tbody th")).to_have_text(["b", "a", "c"])
    expect(table.locator("tbody td .warn")).to_have_text(["in sync"])
    expect(page.locator(".flow .warn")).to_have_text(["3 in sync"])


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_every_column_is_reached_on_a_phone(in_sync: InSync, opened: Open, scheme: str) -> None:
    """A shadow at its edge shows that a table goes on, by touch and by keyboard."""
    page = opened("about:blank", PHONE, scheme)
    answer(page, in_sync.status)
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(f"{in_sync.http}/{view}")
        expect(page.locator("tbody tr").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
        assert not page.locator("th, td").and_(page.locator(":not(:visible)")).count(), view
        for table in page.get_by_role("region").filter(has=page.locator("tbody tr")).all():
            name = table.locator("thead th").first
            assert name.evaluate("each => each.offsetWidth") <= PHONE / 2, view
            page.evaluate("document.querySelectorAll('table').forEach(each => each.style.visibility = 'hidden')")
            before = _right_edge(page, table)
            table.focus()
            page.keyboard.press("ArrowRight")
            wait_for(partial(table.evaluate, "each => each.scrollLeft > 0"))
            table.evaluate("each => each.scrollTo(each.scrollWidth, 0)")
            assert _right_edge(page, table) != before, view
            page.evaluate("document.querySelectorAll('table').forEach(each => each.style.visibility = '')")
            assert name.evaluate("each => each.getBoundingClientRect().left") >= 0, view


def _right_edge(page: Page, table: Locator) -> bytes:
    """The pixels of the right edge."""
    table.scroll_into_view_if_needed()
    box = table.bounding_box()
    assert box is not None
    return page.screenshot(clip={"x": box["x"] + box["width"] - 6, "y": box["y"], "width": 6, "height": 20})


def test_each_heading_stands_once(in_sync: InSync, opened: Open) -> None:
    page = opened("about:blank")
    answer(page, in_sync.status)
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(f"{in_sync.http}/{view}")
        expect(page.locator("tbody tr").first).to_be_visible()
        found = [each.split()[0] for each in page.locator("h1, h2, h3, caption, legend").all_inner_texts()]
        assert len(found) == len(set(found)), (view, found)
        for table in page.get_by_role("table").all():
            assert table.evaluate("each => each.getAttribute('aria-labelledby')"), view
