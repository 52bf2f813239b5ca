"""A headless Chromium, driven through its own driver's HTTP interface (W3C WebDriver)."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

# The one name under which WebDriver hides an element's handle.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]


class Browser:
    """One window; elements are named by their ids."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def call(self, method: str, path: str, **body: Any) -> Any:
        """A WebDriver command of this session; raises an assertion with the driver's message."""
        response = self._client.request(method, path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function with this body returns in the page."""
        return self.call("POST", "/execute/sync", script=script, args=arguments)

    def text(self, element: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", element)

    def click(self, element: str) -> None:
        self.call("POST", f"/element/{self._handle(element)}/click")

    def type(self, element: str, text: str) -> None:
        """Replaces what is in a field."""
        handle = self._handle(element)
        self.call("POST", f"/element/{handle}/clear")
        self.call("POST", f"/element/{handle}/value", text=text)

    def is_shown(self, element: str) -> bool:
        return self.call("GET", f"/element/{self._handle(element)}/displayed")

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the page's viewport in CSS pixels; a window would not go below 500."""
        parameters = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self.call("POST", "/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=parameters)

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the last call, as for scripts that fail or were not let run."""
        return [entry["message"] for entry in self.call("POST", "/se/log", type="browser")]

    def _handle(self, element: str) -> str:
        return self.call("POST", "/element", using="css selector", value=f"#{element}")[_ELEMENT]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts Chromium; fails where there is none."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.fail("chromium and chromedriver are not on PATH (Debian: apt install chromium chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        options = {"binary": chromium, "args": _OPTIONS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            started = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in started, started
            session = f"http://127.0.0.1:{port}/session/{started['sessionId']}"
            client.base_url = session
            yield Browser(client)
            assert client.delete(session).status_code == 200
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
