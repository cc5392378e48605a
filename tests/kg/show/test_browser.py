"""The explorer in Chromium: no errors, nothing foreign, hostile names harmless, the keyboard alone, narrow and dark.

Needs playwright and a chromium: CHROMIUM=/path/of/it, or the one of the system.
"""

import os
import shutil
import threading

import pytest

from funcppo.kg.graph.text import display
from funcppo.kg.show import server
from tests.kg.show.graphs import ALSO, HOSTILE

pytestmark = pytest.mark.long
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def url(sites):
    """The address of a running explorer."""
    site = sites["questions"]
    listener = server.open_socket("127.0.0.1", 0)
    running = server.Server(site.make_app("127.0.0.1"), [site.worker])
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    yield server.url(listener, "127.0.0.1").rstrip("/")
    running.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=300_000
        )
        yield browser
        browser.close()


@pytest.fixture
def watched(browser, url):
    """A page and the list of what went wrong on it, which must stay empty."""
    context = browser.new_context()
    context.set_default_timeout(300_000)
    page = context.new_page()
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))

    def check_request(request):
        if not request.url.startswith(url):
            problems.append(request.url)

    page.on("request", check_request)
    yield page, problems
    assert problems == []
    context.close()


def focused(page, expression="document.activeElement.textContent"):
    return page.evaluate(expression)


def press_until(page, key, expression):
    """Press a key until an expression about the focused element holds."""
    for _ in range(60):
        page.keyboard.press(key)
        if focused(page, f"(e => {expression})(document.activeElement)"):
            return
    raise AssertionError(f"the focus never came to {expression}")


def test_hostile_names_are_text_and_pages_fit(watched, url, explorers):
    page, _ = watched
    explorer = explorers["questions"]
    relation = explorer.find("relation", ALSO)
    page.set_viewport_size({"width": 320, "height": 600})
    width = "document.documentElement.scrollWidth <= innerWidth"
    rules = (
        "[...document.querySelectorAll('td > .rule')].map(e => e.offsetWidth)"
    )
    widths = []
    for name in HOSTILE[:9]:
        entity = explorer.find("entity", name)
        paths = [f"/entity?entity_id={entity}"]
        if name == HOSTILE[0]:
            query = f"relation_id={relation}&head_id={entity}"
            paths += [f"/answers?{query}&known=1", f"/why?{query}&tail_id=1"]
        for path in paths:
            page.goto(url + path)
            assert display(name) in page.inner_text("h1").replace("\xa0", " ")
            assert page.evaluate(width), path
            widths += page.evaluate(rules)
    assert min(widths) > 150  # a rule is not broken after each letter
    page.goto(f"{url}/api")
    assert page.evaluate(width)


def test_the_keyboard_alone_leads_to_a_proof(watched, url):
    page, _ = watched
    page.goto(url)
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'main'")

    press_until(page, "Tab", "e.id === 'head'")
    page.keyboard.type("e1")
    options = page.locator("#options-1 li")
    options.first.wait_for()
    head = page.locator("#head")
    assert head.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    second = options.nth(1)
    assert second.get_attribute("aria-selected") == "true"
    active = head.get_attribute("aria-activedescendant")
    assert active == second.get_attribute("id")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert head.input_value() == "e1"
    assert head.get_attribute("aria-expanded") == "false"

    page.keyboard.press("Tab")
    page.keyboard.type("rel")
    page.locator("#options-2 li").first.wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#options-2").is_hidden()
    page.keyboard.press("ArrowDown")
    page.locator("#options-2 li").first.wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#relation").input_value() == display(ALSO)
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "/answers?" in page.url

    press_until(page, "Tab", "e.className === 'why'")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "/why?" in page.url
    press_until(page, "Tab", "e.tagName === 'SUMMARY'")
    is_open = "document.querySelector('.tree details').open"
    assert page.evaluate(is_open)
    page.keyboard.press("Enter")
    assert not page.evaluate(is_open)
    page.keyboard.press("Enter")
    assert page.evaluate(is_open)
    press_until(page, "Tab", "e.matches('.tree ul a.name')")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "/relation?" in page.url or "/entity?" in page.url


def test_pages_work_without_scripts(browser, url):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    page.fill("#head", "e1")
    page.fill("#relation", "<b>likes</b>")
    page.locator(".ask button").click()
    assert "/answers?" in page.url
    page.goto(url)
    page.fill("#head", "e111")
    page.fill("#relation", "<b>likes</b>")
    page.locator(".ask button").click()
    assert "'e11'" in page.inner_text("main")
    context.close()
