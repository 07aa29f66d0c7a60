"""report.html: complete, escaped, without any other file; as a parser and a real browser see it."""

import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from run_directories import make_run

from zagora_jax.callbacks import Begin, End, Sample, Sampled, Saved
from zagora_jax.interruption import Interrupted
from zagora_jax.reporting import report_writer
from zagora_jax.reporting.report_page import Samples, layer_shares, render_report
from zagora_jax.reporting.report_writer import ReportWriter
from zagora_jax.reporting.run_view import RunView

VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = "</pre></title><script>alert(1)</script><img src=x onerror=alert(1)> & \x00 {{ 7 * 7 }} ]]> \ud800é"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GIB = 2**30
LAYOUT = {
    "mesh": {"stage": 2, "data": 1, "fsdp": 1, "tensor": 1},
    "layers": 3,
    "layers_of_stages": [2, 1],
    "bytes_a_device": {f"gpu:{d}": {"codes": 4 * GIB, "LoRA": GIB} for d in (0, 1)},
    "host_bytes_a_device": {"gpu:0": {"layers": 2 * GIB}, "gpu:1": {"layers": 0}},
    "planned_bytes_a_device": {"gpu:0": 9 * GIB, "gpu:1": 8 * GIB},
    "limit_bytes_a_device": {"gpu:0": 22 * GIB, "gpu:1": 22 * GIB},
    "wire_bytes_a_step": {"activations": 12_500_000},
}


class Page(HTMLParser):
    """Collects a page's elements and text, and sees that they are nested well."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def evil_run(tmp_path):
    """Whatever the files of a run say, they say something evil."""
    report = {
        "facts": {"model": EVIL, EVIL: EVIL},
        "versions": {EVIL: EVIL},
        "cards": [{"index": EVIL, "name": EVIL}, EVIL],
        "loss_before": 6.0,
        "synthetic": True,
    }
    cards = [{"card": card, "celsius": 60.0, "throttled_by": [EVIL]} for card in (0, 1)]
    run = make_run(tmp_path / "run<b>", steps=30, total=30, report=report, cards=cards, learning_rate=1e-4)
    layout = json.loads(json.dumps(LAYOUT).replace("gpu:0", "gpu<script>").replace("codes", "codes<img src=x>"))
    (run / "layout.json").write_text(json.dumps(layout))
    (run / "config.yaml").write_text(f"model: '{EVIL}'\n", errors="surrogatepass")
    return run


def evil_page(run):
    page = render_report(RunView(run), Samples({EVIL: "before " + EVIL}, 0, {EVIL: "after " + EVIL}, 30))
    return page.encode("utf-8", errors="replace").decode()


def test_the_page_is_whole_and_needs_nothing_else(evil_run):
    page = evil_page(evil_run)
    parsed = Page(page)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "image", "use"}
    for tag, attributes in parsed.elements:
        assert not attributes.keys() & {"src", "href", "xlink:href", "onerror", "onload", "data"}, tag
    assert not re.search(r"url\(|@import", page)
    policy = next(a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    titles = [ElementTree.fromstring(chart)[0].text for chart in charts]
    assert titles == [
        "loss", "learning rate", "tokens a second", "seconds a step",
        "memory of each device by part, against what it has for arrays", "in the host's memory for each device",
        "part of each layer's weights that a device holds", "temperature",
    ]  # fmt: skip


def test_everything_is_said(evil_run):
    text = " ".join("".join(Page(evil_page(evil_run)).text).split())
    for words in (
        "Run report", "30 of 30", "6.0000", "before </pre></title><script>", "after </pre></title><script>",
        "activations12.5 MB", "& ␀ {{ 7 * 7 }}", "9 of 22 GiB", "at work (activations, gradients, ...)",
        "The weights are synthetic", "Card 1 was slowed down in 30 steps", "model: '</pre>", "after (step 30)",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_it_without_a_script_or_a_request(evil_run, tmp_path):
    (tmp_path / "page.html").write_text(evil_page(evil_run))
    common = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,2400",
        f"--user-data-dir={tmp_path / 'profile'}", "--disable-background-networking", "--no-first-run",
    ]  # fmt: skip
    shot = tmp_path / "page.png"
    command = [*common, "--dump-dom", f"--screenshot={shot}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ":CONSOLE" not in done.stderr  # scripts, refused loads, errors of the page
    assert done.stdout.count("<svg") == 8
    parsed = Page(done.stdout)
    assert not {tag for tag, _ in parsed.elements} & {"script", "img"}
    if shot.exists():  # which some versions leave out beside --dump-dom
        assert shot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"facts": 3, "versions": [1], "cards": 5, "loss_before": "x"}'])
@pytest.mark.parametrize("name", ["report.json", "layout.json"])
def test_a_directory_in_any_state_has_a_page(tmp_path, name, content):
    run = make_run(tmp_path / "run", steps=2)
    (run / name).write_text(content)
    (run / "config.yaml").unlink()
    Page(render_report(RunView(run)))
    Page(render_report(RunView(tmp_path / "none")))


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"stage": 0}, "bytes_a_device": {"cpu:0": {"codes": 1}}, "layers": 2},
        {"mesh": 5, "bytes_a_device": {"cpu:0": {"codes": None}}, "layers": 2},
        {"mesh": {"fsdp": "x"}, "bytes_a_device": {"cpu:0": 7, "cpu:1": {"codes": 1e999}}, "layers": True},
        {"bytes_a_device": {"cpu:0": {}}, "layers_of_stages": ["a"], "layers": 10},
        {
            "planned_bytes_a_device": {"cpu:0": -5},
            "limit_bytes_a_device": {"cpu:0": 0},
            "wire_bytes_a_step": {"a": "b"},
        },
    ],
)
def test_a_layout_that_is_not_ours_has_a_page(tmp_path, layout):
    run = make_run(tmp_path / "run", steps=2)
    (run / "layout.json").write_text(json.dumps(layout))
    Page(render_report(RunView(run)))


def test_layers_lie_where_the_mesh_puts_them():
    assert layer_shares(LAYOUT) == [("gpu:0", [1.0, 1.0, 0.0]), ("gpu:1", [0.0, 0.0, 1.0])]
    devices = {f"gpu:{d}": {} for d in range(4)}
    spread = {"mesh": {"stage": 1, "data": 2, "fsdp": 2}, "layers": 2, "bytes_a_device": devices}
    assert layer_shares(spread) == [(device, [0.5, 0.5]) for device in devices]
    two = {"mesh": {"stage": 2, "fsdp": 2}, "layers": 3, "bytes_a_device": devices}  # equal stages, as near as can be
    assert [cells for _, cells in layer_shares(two)] == [[0.5, 0.5, 0.0]] * 2 + [[0.0, 0.0, 0.5]] * 2
    assert layer_shares({}) == []


def begin(writer, run):
    writer.on_begin(Begin(SimpleNamespace(), run, 0, 10, {}))
    writer._thread.join()


def test_a_page_is_written_at_the_beginning_at_saves_and_at_the_end(tmp_path):
    run, said = make_run(tmp_path / "run", steps=2), []
    page = run / "report.html"
    writer = ReportWriter(said.append)
    begin(writer, run)
    assert "2 of 10" in page.read_text()
    for step, text in ((0, "no idea"), (4, "better"), (8, "good")):
        writer.on_sample(Sampled(step, [Sample("Who?", text)]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.0}\n')
    writer.on_save(Saved(8, run))
    writer._thread.join()
    assert "8 of 10" in page.read_text()
    assert [word in page.read_text() for word in ("no idea", "better", "good")] == [True, False, True]
    writer.on_end(End(run, None, Interrupted(15)))
    assert "stopped by SIGTERM; --resume goes on" in page.read_text()
    writer.on_end(End(run, None, ValueError("a <b> failed")))
    assert "broken off: a &lt;b&gt; failed" in page.read_text()
    assert said == []
    assert not [path for path in run.iterdir() if path.suffix == ".tmp"]


def test_a_page_that_cannot_be_made_ends_nothing(tmp_path, monkeypatch):
    run, said = make_run(tmp_path / "run", steps=2), []
    writer = ReportWriter(said.append)
    begin(writer, run)
    before = (run / "report.html").read_bytes()
    monkeypatch.setattr(report_writer, "render_report", lambda *_: 1 / 0)
    for _ in range(2):
        writer.on_save(Saved(2, run))
        writer._thread.join()
    writer.on_end(End(run, None, None))
    assert said == ["warning: report.html could not be written: ZeroDivisionError: division by zero"]
    assert writer.failures == 3
    assert (run / "report.html").read_bytes() == before


def test_a_disk_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    run, said, free = make_run(tmp_path / "run", steps=2), [], threading.Event()
    monkeypatch.setattr(report_writer, "write_bytes", lambda *_: free.wait(10))
    monkeypatch.setattr(report_writer, "LAST_PAGE", 0.01)
    writer = ReportWriter(said.append)
    writer.on_begin(Begin(SimpleNamespace(), run, 0, 10, {}))
    writer.on_save(Saved(2, run))
    writer.on_end(End(run, None, None))
    assert said == ["warning: report.html is not written after 0.01 s, and is left as it is"]
    free.set()


def test_a_directory_that_was_replaced_gets_no_page(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    writer = ReportWriter(print)
    begin(writer, run)
    run.rename(tmp_path / "moved")
    run.mkdir()
    writer.on_end(End(run, None, None))
    assert list(run.iterdir()) == []


def test_a_run_that_goes_on_keeps_its_first_samples(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    lines = [{"step": step, "prompt": "Who?", "text": f"answer {step}"} for step in (0, 1, 2)]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    writer = ReportWriter(print)
    begin(writer, run)
    page = (run / "report.html").read_text()
    assert [f"answer {step}" in page for step in (0, 1, 2)] == [True, False, True]
