"""A real browser without a window."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

WIDE, NARROW, PHONE = 1280, 390, 360
WAIT_MS = 20_000


# Not of the session: as long as it is there, no test of this process can have an event loop of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--no-proxy-server"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, which have no errors, and ask nobody but the service."""
    pages, troubles, hosts = list[Page](), list[str](), set[str]()

    def open_page(address: str, width: int = WIDE, scheme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.partition("//")[2].partition("/")[0]))
        page.goto(address)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert troubles == []
    assert all(host.startswith(("127.0.0.1", ",")) or not host for host in hosts), hosts
