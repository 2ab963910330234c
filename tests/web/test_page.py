"""The page in a real browser with a fake microphone. Needs chromium and the extra `browser`."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.server.harness import LiveServer, serve
from tests.server.realtime.test_socket_openai import INTENT, PCM_16, update
from tests.speechlike import SAMPLE_RATE_HZ
from tests.web.reciting_engine import TEXT, RecitingEngine
from tests.word_lists import num_differing, words
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.errors import CheckpointError
from voxlite.server.bundled import bundled_model
from voxlite.server.session.voice_activity import SileroModel

pytestmark = pytest.mark.browser

# The recital takes 8 s. The fake microphone runs from when it is opened: on a busy machine much of
# the sound has gone by when the page begins to record.
LOUD_S = 60.0
SWITCHES = (
    "--use-fake-device-for-media-stream",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WAIT_MS = 30_000


@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    """Playwright, stopped in the end; skips where it or Chromium is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        yield playwright


@contextmanager
def chromium(playwright: Any, microphone: Path, *switches: str) -> Iterator[Any]:
    browser = playwright.chromium.launch(
        executable_path=shutil.which("chromium"),
        args=[*SWITCHES, f"--use-file-for-fake-audio-capture={microphone}%noloop", *switches],
    )
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound that is long and loud enough for the whole recital."""
    times_s = np.arange(round(LOUD_S * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    path = tmp_path_factory.mktemp("speech") / "speech.wav"
    silence = np.zeros(4 * SAMPLE_RATE_HZ)
    tone = 0.3 * np.sin(2 * np.pi * 300 * times_s)
    soundfile.write(path, np.concatenate((tone, silence)), SAMPLE_RATE_HZ)
    return path


@pytest.fixture(scope="module")
def browser(playwright: Any, speech: Path) -> Iterator[Any]:
    with chromium(playwright, speech, "--use-fake-ui-for-media-stream") as browser:
        yield browser


@contextmanager
def opened(browser: Any, live: LiveServer, **options: Any) -> Iterator[Any]:
    """Open the page; in the end, nothing may have gone wrong in it or been asked from elsewhere."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    faults: list[str] = []
    urls: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.on("request", lambda request: urls.append(request.url))
    page.goto(live.url + "/")
    yield page
    # The browser reports answers such as 401 and 404, which the page handles.
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []
    assert [url for url in urls if not url.startswith((live.url, "blob:"))] == []
    context.close()


def wait_for_phase(page: Any, phase: str) -> None:
    page.wait_for_selector(f'body[data-phase="{phase}"]')


def start(page: Any) -> None:
    page.click("#toggle:enabled")
    wait_for_phase(page, "running")


def wait_for_text(page: Any, text: str) -> None:
    page.wait_for_function(
        "text => document.querySelector('#lines').textContent.includes(text)", arg=text
    )


def said(page: Any) -> str:
    return " ".join(page.locator(".said").all_inner_texts())


def test_what_the_microphone_hears_appears_with_its_times(browser: Any) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        start(page)
        wait_for_text(page, "quick")
        assert page.inner_text("#status") == "Live"
        assert re.fullmatch(r"−\d+ dB", page.inner_text("#stat-level"))
        wait_for_text(page, "jump!")
        page.click("#toggle")
        wait_for_phase(page, "idle")
        assert said(page) == TEXT
        starts_s = [float(word.get_attribute("data-start")) for word in page.locator(".word").all()]
        assert starts_s == sorted(starts_s)
        assert np.allclose(np.diff(starts_s), 0.32, atol=0.1)
        assert [len(line.split()) for line in page.locator(".said").all_inner_texts()] == [9, 8, 6]
        assert all(re.fullmatch(r"0:0\d", at) for at in page.locator(".at").all_inner_texts())
        assert int(page.inner_text("#stat-words")) == len(TEXT.split())
        latency_s = float(page.inner_text("#stat-latency").removesuffix(" s"))
        assert 0.4 < latency_s < 1.5
        assert page.inner_text("#announcer").endswith("jump!")
        assert page.locator("#alert").is_hidden()


def test_the_text_is_copied_without_times(browser: Any) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with serve(RecitingEngine(text="One two three.")) as live:
        with opened(browser, live, permissions=permissions) as page:
            start(page)
            wait_for_text(page, "three.")
            page.click("#toggle")
            wait_for_phase(page, "idle")
            page.click("#copy")
            page.wait_for_selector("#copy:text('Copied')")
            assert page.evaluate("navigator.clipboard.readText()") == "One two three."
            page.click("#clear")
            assert page.locator("#empty").is_visible()
            assert said(page) == ""


def test_words_have_their_times_while_the_speaker_goes_on(browser: Any) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        start(page)
        page.wait_for_selector(".word[data-start] >> nth=3")
        assert page.locator("body").get_attribute("data-phase") == "running"


def test_a_file_is_transcribed_at_once(browser: Any, speech: Path) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        page.check('[value="file"]', force=True)
        assert page.locator("#toggle").is_disabled()
        page.set_input_files("#file", speech)
        page.check('[value="fast"]', force=True)
        page.click("#toggle:enabled")
        wait_for_text(page, "jump!")
        wait_for_phase(page, "idle")
        assert said(page) == TEXT
        assert page.inner_text("#stat-audio") == "1:04"
        assert float(page.inner_text("#stat-latency").removesuffix("×")) > 1


def test_a_dropped_file_is_transcribed_as_it_is_played(browser: Any) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        data = page.evaluate_handle(
            """() => {
              const data = new DataTransfer();
              const rate = 8000, samples = new Int16Array(2 * rate).fill(0).map(
                (_, i) => 9000 * Math.sin(i / 4));
              const header = new DataView(new ArrayBuffer(44));
              const ascii = (at, s) => [...s].forEach((c, i) =>
                header.setUint8(at + i, c.charCodeAt(0)));
              ascii(0, "RIFF"); header.setUint32(4, 36 + samples.byteLength, true);
              ascii(8, "WAVEfmt "); header.setUint32(16, 16, true);
              header.setUint16(20, 1, true); header.setUint16(22, 1, true);
              header.setUint32(24, rate, true); header.setUint32(28, 2 * rate, true);
              header.setUint16(32, 2, true); header.setUint16(34, 16, true);
              ascii(36, "data"); header.setUint32(40, samples.byteLength, true);
              data.items.add(new File([header, samples], "two seconds.wav"));
              return data;
            }"""
        )
        page.dispatch_event("#transcript", "drop", {"dataTransfer": data})
        page.wait_for_selector("#file-note:text('0:02')")
        assert page.inner_text("#file-name") == "two seconds.wav"
        page.click("#toggle:enabled")
        wait_for_phase(page, "idle")
        wait_for_text(page, "The quick brown fox jumps over")
        assert page.inner_text("#stat-audio") in ("0:01", "0:02")


def test_a_file_that_is_not_audio_is_named_as_such(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "letter.wav").write_text("no sound")
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        page.set_input_files("#file", tmp_path / "letter.wav")
        page.wait_for_selector("#alert:has-text('can\\'t be played')")
        assert page.locator("#toggle").is_disabled()


def test_the_delay_of_the_slider_is_asked_for(browser: Any) -> None:
    engine = RecitingEngine()
    with serve(engine) as live, opened(browser, live) as page:
        assert page.inner_text("#delay-value") == "480 ms"
        page.focus("#delay")
        page.keyboard.press("Home")
        assert page.inner_text("#delay-value") == "80 ms"
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#delay-value") == "1200 ms"
        page.keyboard.press("End")
        assert page.inner_text("#delay-value") == "2400 ms"
        start(page)
        live.wait_until(lambda: set(engine.delays_ms) == {2400})
        page.focus("#delay")
        page.keyboard.press("Home")
        live.wait_until(lambda: set(engine.delays_ms) == {2400, 80})
        page.click("#toggle")
        wait_for_phase(page, "idle")


def test_the_space_bar_starts_and_stops(browser: Any) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        page.wait_for_selector("#toggle:enabled")
        page.keyboard.press("Space")
        wait_for_phase(page, "running")
        page.keyboard.press("Space")
        wait_for_phase(page, "idle")


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    # Not every character of a key may stand in a subprotocol.
    with serve(RecitingEngine(), api_key=("k/e=y",)) as live, opened(browser, live) as page:
        page.wait_for_selector("#key-form:visible")
        assert page.inner_text("#status") == "Key needed"
        assert page.locator("#toggle").is_disabled()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-note:text('does not know this key')")
        page.fill("#key", "k/e=y")
        page.keyboard.press("Enter")
        start(page)
        wait_for_text(page, "quick")


def test_a_busy_server_says_so(browser: Any) -> None:
    with serve(RecitingEngine(max_sessions=1)) as live, opened(browser, live) as page:
        page.wait_for_selector("#toggle:enabled")
        with live.socket() as client:
            client.receive()
            page.click("#toggle")
            page.wait_for_selector("#alert:has-text('The server is busy.')")
        wait_for_phase(page, "idle")
        live.wait_until(lambda: live.engine.num_taken_seats == 0)
        start(page)
        assert page.locator("#alert").is_hidden()


def test_a_server_that_ends_the_session_is_told(browser: Any) -> None:
    limits = {"max_session_seconds": 2.0}
    with serve(RecitingEngine(), **limits) as live, opened(browser, live) as page:
        start(page)
        page.wait_for_selector("#alert:has-text('The session has ended.')")
        wait_for_phase(page, "idle")
        assert said(page).startswith("The quick")


def test_a_server_that_goes_away_is_told_and_waited_for(browser: Any) -> None:
    with ExitStack() as running:
        live = running.enter_context(serve(RecitingEngine()))
        with opened(browser, live) as page:
            start(page)
            wait_for_text(page, "quick")
            running.close()
            page.wait_for_selector("#alert:has-text('The server is being stopped.')")
            wait_for_phase(page, "idle")
            page.wait_for_selector("#status:has-text('Not reachable')")
            assert page.locator("#toggle").is_disabled()
            with serve(RecitingEngine(), port=live.port):
                page.wait_for_selector("#toggle:enabled")


def test_a_server_that_is_being_stopped_is_not_out_of_order(browser: Any) -> None:
    engine = RecitingEngine()
    with serve(engine) as live, live.socket(INTENT) as neighbour, opened(browser, live) as page:
        page.wait_for_selector("#toggle:enabled")
        update(neighbour, format=PCM_16)
        engine.running.clear()
        neighbour.append(bytes(3200))
        neighbour.send("input_audio_buffer.commit")
        (session,) = live.services.sessions
        live.wait_until(lambda: session.is_waiting_for_text)
        live.stop()
        live.wait_until(live.services.stopping.is_set)
        # The page asks when it is about to begin.
        page.click("#toggle")
        page.wait_for_selector("#status:has-text('Being stopped')")
        assert page.inner_text("#alert-title") == "Being stopped."
        assert page.locator("#toggle").is_disabled()
        engine.running.set()


def test_a_model_that_is_loading_is_waited_for(browser: Any) -> None:
    is_loaded = threading.Event()
    engine = RecitingEngine()

    def load() -> RecitingEngine:
        is_loaded.wait()
        return engine

    with serve(engine, load) as live:
        try:
            with opened(browser, live) as page:
                page.wait_for_selector("#status:has-text('Loading the model')")
                assert page.locator("#toggle").is_disabled()
                is_loaded.set()
                page.wait_for_selector("#toggle:enabled")
        finally:
            is_loaded.set()


def test_a_blocked_microphone_is_explained(playwright: Any, speech: Path) -> None:
    with chromium(playwright, speech, "--deny-permission-prompts") as browser:
        with serve(RecitingEngine()) as live, opened(browser, live) as page:
            page.click("#toggle:enabled")
            page.wait_for_selector("#alert:has-text('The microphone is blocked.')")
            wait_for_phase(page, "idle")


def background(page: Any) -> str:
    color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return color


def test_the_theme_follows_the_system_or_the_reader(browser: Any) -> None:
    with serve(RecitingEngine()) as live, opened(browser, live, color_scheme="dark") as page:
        dark = background(page)
        page.click("#theme")
        assert page.get_attribute("#theme", "aria-label") == "Theme: light"
        light = background(page)
        assert light != dark
        page.reload()
        assert background(page) == light
        page.click("#theme")
        assert background(page) == dark
        page.emulate_media(color_scheme="light")
        assert background(page) == dark
        page.click("#theme")
        assert background(page) == light


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_nothing_is_wider_than_the_window(browser: Any, width: int) -> None:
    with serve(RecitingEngine(text=TEXT.replace("jumps", "j" * 60))) as live:
        with opened(browser, live, viewport={"width": width, "height": 700}) as page:
            start(page)
            wait_for_text(page, "over")
            scroll_width = page.evaluate("document.scrollingElement.scrollWidth")
            assert scroll_width <= width


def test_the_bundled_model_writes_what_the_microphone_hears(playwright: Any) -> None:
    try:
        folder = bundled_model()
    except CheckpointError as err:
        pytest.skip(str(err))
    if not (folder / "sample.wav").exists():
        pytest.skip("the bundled model has no sample")
    expected = words((folder / "sample.txt").read_text())
    seconds = soundfile.info(folder / "sample.wav").duration
    with chromium(playwright, folder / "sample.wav", "--use-fake-ui-for-media-stream") as browser:
        engine = Engine(EngineConfig(model=str(folder)))
        with serve(engine, voice_model=SileroModel()) as live, opened(browser, live) as page:
            start(page)
            page.wait_for_timeout((seconds + 3) * 1000)
            page.click("#toggle")
            wait_for_phase(page, "idle")
            # The model is small: where the recording begins may cost it one word.
            assert num_differing(words(said(page)), expected) <= 1, said(page)


def test_one_press_transcribes_the_bundled_sample(browser: Any) -> None:
    try:
        has_sample = (bundled_model() / "sample.wav").exists()
    except CheckpointError:
        has_sample = False
    with serve(RecitingEngine()) as live, opened(browser, live) as page:
        page.wait_for_selector("#toggle:enabled")
        button = page.locator("#empty .sample")
        if not has_sample:
            assert button.is_hidden()
            return
        button.click()
        wait_for_phase(page, "running")
        wait_for_text(page, "The quick")
        wait_for_phase(page, "idle")
