"""Headless Chromium, driven by Playwright: pages that must load nothing from elsewhere and make no JavaScript error."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

SCREENSHOTS_VARIABLE = "PACELINE_SCREENSHOTS"
"""Environment variable: the folder in which screenshots are kept."""
Scheme = Literal["light", "dark"]
PHONE, DESKTOP = (390, 844), (1440, 900)


def chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


def screenshots(tmp_path: Path) -> Path:
    """The folder for screenshots: `PACELINE_SCREENSHOTS`, or the test's own."""
    folder = Path(os.environ.get(SCREENSHOTS_VARIABLE) or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(slots=True)
class Visit:
    """A page that is open, and what went wrong on it."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    """JavaScript errors, messages of the console that are errors, and requests to other sites."""

    def watch(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("console", lambda line: line.type == "error" and self.errors.append(f"console: {line.text}"))
        self.page.on("request", lambda request: self._check(request.url))

    def _check(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc:
            self.errors.append(f"request to {url}")


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium())
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def visit(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light"
) -> AsyncIterator[Visit]:
    """Open a page. At the end it must have made no error."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1, has_touch=size == PHONE
    )
    visited = Visit(await context.new_page(), url)
    visited.watch()
    try:
        await visited.page.goto(url)
        yield visited
        assert visited.errors == []
    finally:
        await context.close()
