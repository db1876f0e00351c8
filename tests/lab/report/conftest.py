"""A real browser that opens a report."""

import functools
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def open_page(browser):
    """open_page(folder, ...) shows the folder's report in a tab.

    Calls with the same arguments share a tab, because loading a page takes 2.7 s of CPU time. The module's last test
    fails if a page has loaded anything from a network, or has printed an error.
    """
    contexts, requests, errors = [], [], []

    @functools.cache
    def open_page(folder, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto((folder / "report.html").as_uri())
        tab.wait_for_function("window.Plotly")  # the page unpacks it, and then draws at once
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests
    assert not errors
