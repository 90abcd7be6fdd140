"""The report's page in a real browser: right at both widths, fit for a phone, and it asks nothing of the network."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from simulated_runs import simulate, without_fsync

from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.reporting.report import build_report, write_report
from hf_dcsgd.runs.trace import read_trace

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not installed"),
]
DESKTOP, PHONE = 1200, 390
# A browser asks for the time, for updates and for accounts whatever page it shows.
BROWSERS_OWN = re.compile(r"^(http://)?[a-z0-9.-]+\.(google|googleapis|gvt1)\.com(:\d+)?(/|$)")


class _Recorder(BaseHTTPRequestHandler):
    """A proxy that lets nothing through and remembers what was asked."""

    asked: list[str]

    def _refuse(self) -> None:
        self.asked.append(self.path)
        self.send_error(502)

    do_GET = do_HEAD = do_POST = do_CONNECT = _refuse  # noqa: N815

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def proxy():
    handler = type("Recorder", (_Recorder,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, handler.asked
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture(params=[*STRATEGIES, "opt_out"])
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_fsync(monkeypatch)
    settings = {"dataset_size": 10_000, "expected_batch_size": 256, "steps": 120}
    if request.param == "opt_out":
        simulate(tmp_path, clipping="du", take=30, **settings)
        simulate(tmp_path, opt_outs=("raw_train_loss",), unsafe_noise_seed=1, take=60, **settings)
    else:
        simulate(tmp_path, clipping=request.param, **settings)
    return write_report(build_report(tmp_path), read_trace(tmp_path), tmp_path)


def browse(page: Path, folder: Path, *options: str, port: int | None = None) -> str:
    proxy = [f"--proxy-server=http://127.0.0.1:{port}", "--proxy-bypass-list=<-loopback>"] if port else []
    command = [
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
        f"--user-data-dir={folder / 'profile'}",
        *proxy,
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_screenshots(page: Path, tmp_path: Path, width: int):
    shot = tmp_path / "shot.png"
    browse(page, tmp_path, f"--screenshot={shot}", f"--window-size={width},2400")
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (2400, width)
    left, right = pixels[:, :6], pixels[:, -6:]
    assert np.allclose(left, left[0, 0], atol=0.02), "something touches the left margin"
    assert np.allclose(right, left[0, 0], atol=0.02), "something runs over the right margin"
    ink = (pixels.mean(axis=-1) < 0.5).mean()
    assert 0.005 < ink < 0.25
    red = (pixels[..., 0] > 0.55) & (pixels[..., 1] < 0.2) & (pixels[..., 2] < 0.2)
    assert (red[:600].mean() > 0.002) == ("No privacy guarantee" in page.read_text())


def test_it_fits_a_phone(page: Path, tmp_path: Path):
    """Inside a frame as wide as a phone, whose document the page around it may measure."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe id="f" width="{PHONE}" height="3000" style="border:0" '
        f'srcdoc="{html.escape(page.read_text())}"></iframe><script>'
        "f.onload = () => { const d = f.contentDocument; "
        "const sizes = [...d.querySelectorAll('td, th, p, li, figcaption')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)); document.title = "
        "`width ${d.documentElement.scrollWidth} font ${Math.min(...sizes)}` }</script>",
        encoding="utf-8",
    )
    dom = browse(frame, tmp_path, "--dump-dom", f"--window-size={DESKTOP},3200")
    found = re.search(r"<title>width (\d+) font ([\d.]+)</title>", dom)
    assert found, dom[:300]
    assert int(found[1]) <= PHONE
    assert float(found[2]) >= 12


def test_nothing_is_asked_of_the_network(page: Path, tmp_path: Path, proxy):
    port, asked = proxy
    browse(page, tmp_path, "--dump-dom", port=port)
    assert [path for path in asked if not BROWSERS_OWN.search(path)] == []


def test_the_proxy_would_have_seen_a_request(tmp_path: Path, proxy):
    port, asked = proxy
    page = tmp_path / "control.html"
    page.write_text('<img src="http://example.invalid/picture.png">')
    browse(page, tmp_path, "--dump-dom", port=port)
    assert any("example.invalid/picture.png" in path for path in asked)
