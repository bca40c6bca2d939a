"""Both pages in a real browser: a race, a killed draft, the keyboard, keys, many workers, and what they look like."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from paceline.api_keys import ApiKey, KeyFile, digest, new_key, write
from paceline.state import WorkerRecord
from tests.browser.chromium import DESKTOP, PHONE, Scheme, open_browser, screenshots, visit
from tests.helpers.openai_stack import TOKENIZER, counts, open_stack
from tests.helpers.served import serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

ENDS_MS = 60_000
CODE = "def read_lines(path):"
WORKERS = 300


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The shipped model with its draft worker, as a demo."""
    with serving("pydoc", "--port", "0", "--demo-page") as served:
        yield served.wait_for(r"Serving pydoc at (\S+)/v1")[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


async def race(page: Page, max_tokens: int = 96) -> None:
    """Race a completion to its end."""
    await page.get_by_label("Completion").check(force=True)
    await page.get_by_label("Prompt").fill(CODE)
    if not await page.get_by_label("Max tokens").is_visible():
        await page.get_by_text("Settings").click()
    await page.get_by_label("Max tokens").fill(str(max_tokens))
    await page.get_by_role("button", name="Race").click()
    await page.locator(".verdict").wait_for(timeout=ENDS_MS)


async def test_a_race_shows_that_the_tokens_are_the_same(browser: Browser, url: str) -> None:
    async with visit(browser, url) as visited:
        page = visited.page
        await race(page)
        assert await page.locator("#served").inner_text() == "pydoc · drafts: draft model pydoc-draft, ngram"
        verdict = await page.locator(".verdict").inner_text()
        assert re.match(r"Identical\. All \d+ token ids are equal\.", verdict)
        plain, fast = [await lane.inner_text() for lane in await page.locator(".lane .text").all()]
        assert plain == fast != ""
        assert await page.locator(".lane .token.draft, .lane .token.lookup").count() > 0
        guessed = [await lane.locator(".token:not(.own)").count() for lane in await page.locator(".lane").all()]
        assert guessed[0] == 0 < guessed[1], "no guess without speculation"
        assert await page.locator("#tree .node:not(.root):not(.own)").count() > 0
        assert await page.locator("#by-depth tr").count() > 1
        legend = await page.locator("#legend").inner_text()
        assert sum(map(int, re.findall(r"\d+", legend))) == await page.locator(".lane").last.locator(".token").count()


async def test_a_killed_draft_changes_nothing(browser: Browser, url: str) -> None:
    async with visit(browser, url) as visited:
        page = visited.page
        await page.get_by_label("Completion").check(force=True)
        await page.get_by_label("Prompt").fill(CODE)
        await page.get_by_label("Max tokens").fill("400")
        await page.get_by_role("button", name="Kill the draft").click()
        await page.locator(".verdict.same").wait_for(timeout=ENDS_MS)
        verdict = await page.locator(".verdict").inner_text()
        assert re.search(r"Identical\. .* draft-1-\w+ was killed after token \d+", verdict)
        assert await page.locator(".note").count() == 1


async def test_everything_by_keyboard(browser: Browser, url: str) -> None:
    from playwright.async_api import expect

    async with visit(browser, url) as visited:
        page, keys = visited.page, visited.page.keyboard
        await page.locator("#model option").first.wait_for(state="attached")
        await keys.press("Tab")
        await keys.press("Enter")  # skip to the prompt
        await expect(page.locator("#prompt")).to_be_focused()
        await keys.press("Shift+Tab")
        await keys.press("ArrowRight")  # chat → completion
        await keys.press("Tab")
        await keys.press("Control+a")
        await keys.type("import json\n")
        await keys.press("Control+Enter")
        await expect(page.locator("#announcer")).to_contain_text("Finished.", timeout=ENDS_MS)
        await expect(page.locator("#prompt")).to_be_focused()
        await reach(page, "step")
        await keys.press("Home")
        await expect(page.locator("#step-words")).to_contain_text("1 of ")
        await keys.press("ArrowRight")
        await expect(page.locator("#step-words")).to_contain_text("2 of ")
        assert (await page.locator("#step").get_attribute("aria-valuetext") or "").startswith("2 of ")
        await page.locator("#prompt").focus()
        await keys.press("Control+Shift+Enter")  # a race
        await keys.press("Escape")
        await expect(page.locator("#run")).to_be_enabled(timeout=ENDS_MS)


async def reach(page: Page, id_: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await page.locator(f"#{id_}:focus").count():
            return
    raise AssertionError(f"#{id_} cannot be reached")


async def test_an_error_is_said_in_the_server_s_words(browser: Browser, url: str) -> None:
    async with visit(browser, url) as visited:
        page = visited.page
        await page.get_by_label("Max tokens").fill("2048")
        await page.get_by_role("button", name="Run", exact=True).click()
        await page.locator(".lane .trouble").wait_for()
        assert "exceed the context" in await page.locator(".lane .trouble").inner_text()
        visited.errors = [each for each in visited.errors if "400 (Bad Request)" not in each]  # Chromium logs it


async def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    key = new_key()
    write(tmp_path / "keys.json", KeyFile(keys=(ApiKey(name="alice", sha256=digest(key)),)))
    async with (
        open_stack(counts, api_keys=tmp_path / "keys.json") as stack,
        visit(browser, f"http://{stack.addresses.http}/operator") as visited,
    ):
        page = visited.page
        await page.get_by_label("Key", exact=True).fill(key)
        await page.keyboard.press("Enter")
        await page.get_by_role("rowheader", name="target-0").wait_for()
        await page.get_by_role("link", name="Playground").click()
        await page.locator("#model option").first.wait_for(state="attached")
        await page.get_by_role("button", name="Run", exact=True).click()
        await page.locator(".token").first.wait_for()
        await page.get_by_role("button", name="Forget key").click()
        await page.get_by_role("dialog").wait_for()


async def test_hundreds_of_workers(browser: Browser, tmp_path: Path) -> None:
    async with open_stack(counts, counts) as stack:
        for number in range(WORKERS):
            name, address = f"draft-{number}", f"127.0.0.1:{number + 1}"
            described = "pydoc-draft", "draft_model", TOKENIZER.fingerprint
            record = WorkerRecord("draft", name, address, *described, time.time())
            await stack.store.registry.heartbeat(record, {"requests": float(number % 7)})
        async with visit(browser, f"http://{stack.addresses.http}/operator") as visited:
            page = visited.page
            await page.get_by_text(f"{WORKERS} up").wait_for()
            assert await page.locator("#drafts-map i").count() == WORKERS
            assert await page.locator("#drafts-table tbody tr").count() == 100
            await page.get_by_role("button", name=f"Show all {WORKERS}").click()
            assert await page.locator("#drafts-table tbody tr").count() == WORKERS
            await page.get_by_label("Filter workers").fill("draft-29")
            assert await page.locator("#drafts-table tbody tr").count() == 11
            await page.locator("#drafts-table").get_by_role("button", name="Worker").click()
            assert await page.locator("#drafts-table tbody th").first.inner_text() == "draft-299\n127.0.0.1:300"
            await page.get_by_label("Filter workers").fill("")
            await page.screenshot(path=screenshots(tmp_path) / "operator-many-workers.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
async def test_what_the_pages_look_like(
    browser: Browser, url: str, size: tuple[int, int], scheme: Scheme, tmp_path: Path
) -> None:
    """Nothing wider than the screen, names and contrast as WCAG 2 AA demands; and a screenshot of each."""
    folder, where = screenshots(tmp_path), f"{'phone' if size == PHONE else 'desktop'}-{scheme}"
    async with visit(browser, url, size, scheme) as visited:
        await visited.page.locator("#model option").first.wait_for(state="attached")
        await visited.page.screenshot(path=folder / f"playground-first-{where}.png")
        await race(visited.page, 256)
        await check_looks(visited.page)
        await visited.page.screenshot(path=folder / f"playground-{where}.png", full_page=size == PHONE)
    async with visit(browser, f"{url}/operator", size, scheme) as visited:
        await visited.page.get_by_role("rowheader", name=re.compile("target-1-")).wait_for()
        for seed in range(4):  # a few reports with traffic
            body = {"prompt": CODE, "max_tokens": 256, "temperature": 0.5 * (seed % 2), "seed": seed}
            await asyncio.to_thread(httpx.post, f"{url}/v1/completions", json=body, trust_env=False, timeout=60.0)
            await visited.page.wait_for_timeout(500)
        await check_looks(visited.page)
        await visited.page.screenshot(path=folder / f"operator-{where}.png", full_page=size == PHONE)


async def check_looks(page: Page) -> None:
    from axe_playwright_python.async_playwright import Axe

    wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    found = await Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    assert found.violations_count == 0, found.generate_report()
    assert {"color-contrast", "label", "button-name"} <= {rule["id"] for rule in found.response["passes"]}
