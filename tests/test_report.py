"""Tables, figures and page are made from saved histories alone, and say what the histories say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gramtower.experiments.comparison import (
    MethodRun,
    Outcome,
    read_comparison,
    relative_difference,
    speed_up,
    summarise,
)
from gramtower.experiments.comparison_page import FLOOR, POINTS, build, page, thinned, value_range
from gramtower.training.result import Record

BROWSER = Path("/usr/bin/chromium")


def record(iteration, seconds, value, metric=None):
    return Record(
        iteration=iteration, seconds=seconds, value=value, relative_decrease=0.0, gradient_norm=1.0, cg_steps=0,
        step=1.0, damping=None, trials=1, data_passes=2.0 * iteration + 1, work={}, terms={}, metric=metric,
    )  # fmt: skip


def history(times, values, metrics=None):
    metrics = metrics or [None] * len(times)
    return [record(i, *row) for i, row in enumerate(zip(times, values, metrics, strict=True))]


FAST = history([0.5, 1.0, 2.0, 4.0], [300.0, 150.0, 105.0, 100.0], [0.1, None, 0.3, 0.2])
SLOW = history([0.5, 10.0, 30.0], [300.0, 140.0, 120.0], [0.1, 0.15, 0.2])
LOST = history([0.5, 1.0], [300.0, 5000.0])


def write(folder, runs, **about):
    for name, records in runs.items():
        (folder / f"{name}.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
    if about:
        (folder / "comparison.json").write_text(json.dumps(about))  # as version 0.2 wrote it
    return folder


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The same with all that is made of it, and what could not be made."""
    folder = written(tmp_path_factory.mktemp("built"))
    return folder, build(folder)[1]


def written(folder):
    methods = {
        "gd": {"status": "finished", "message": "time_limit was reached"},
        "sogram": {"status": "diverged", "message": "ended above <its> start & far", "options": {"ratio": 0.02}},
        "newton-kron": {"status": "finished", "message": "time_limit was reached", "others_busy": 0.4},
        "newtn": {"status": "unknown", "message": "no such method"},
    }
    data = {"left": 30, "right": 20, "pairs": 100, "validation_pairs": 11, "path": "a/b.csv"}
    return write(
        folder, {"gd": SLOW, "sogram": LOST, "newton-kron": FAST}, title="toy <&>", metric="paper_map@5", data=data,
        settings={"limits": {"time_limit": 30.0}}, commands=["gramtower compare 'a b.csv'"],
        environment={"processor": "X"}, methods=methods,
    )  # fmt: skip


def test_the_verdict_names_the_first_within_a_hundredth_and_its_lead(tmp_path):
    slower = history([0.5, 5.0, 9.0], [300.0, 100.5, 100.0])
    cases = {
        "{'newton-kron': FAST, 'gd': slower}": "newton-kron won: within 1% of the lowest objective of all after 4 s, "
        "1.25 times sooner than the next, gd.",
        "{'newton-kron': FAST, 'gd': SLOW}": "newton-kron won: within 1% of the lowest objective of all after 4 s, "
        "at least 7.5 times sooner than any other, as no other came so near in its time.",
        "{'newton-kron': SLOW, 'gd': LOST}": "newton-kron won: within 1% of the lowest objective of all after 30 s, "
        "and no other came so near in its time.",
        "{'gd': SLOW}": "only gd ran; it was within 1% of its lowest objective after 30 s.",
        "{'gd': []}": "no method ran.",
    }
    for number, (runs, expected) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        runs = eval(runs, {"FAST": FAST, "SLOW": SLOW, "LOST": LOST, "slower": slower})
        found = summarise(read_comparison(write(tmp_path / str(number), runs)))
        assert found["verdict"] == f"For this data {expected}"


def test_levels_are_relative_to_the_lowest_value_of_all(folder):
    found = summarise(read_comparison(folder))
    assert found["lowest"] == 100.0
    assert relative_difference(120.0, 100.0) == pytest.approx(0.2)
    kron, gd = found["methods"]["newton-kron"], found["methods"]["gd"]
    assert kron["seconds_to"] == {"1": 1.0, "0.5": 1.0, "0.2": 2.0, "0.1": 2.0, "0.05": 2.0, "0.02": 4.0, "0.01": 4.0}
    assert gd["seconds_to"] == {
        "1": 10.0, "0.5": 10.0, "0.2": 30.0, "0.1": None, "0.05": None, "0.02": None, "0.01": None,
    }  # fmt: skip
    assert (kron["passes_to"]["0.5"], gd["passes_to"]["0.5"]) == (3.0, 3.0)
    assert (kron["best_metric"], kron["last_metric"]) == (0.3, 0.2)
    assert gd["relative_difference"] == pytest.approx(0.2)


def test_a_method_that_never_gets_there_gives_a_bound(folder):
    table = summarise(read_comparison(folder))["speed_up"]
    assert table["0.2"]["newton-kron"]["gd"] == {"times": 15.0, "bound": ""}
    assert table["0.1"]["newton-kron"]["gd"] == {"times": 15.0, "bound": ">"}  # gd's whole 30 s over 2 s
    assert table["0.1"]["gd"]["newton-kron"] == {"times": pytest.approx(2 / 30), "bound": "<"}
    assert table["0.1"]["gd"]["sogram"] is None
    assert speed_up([], FAST, 100.0, 0.1) is None


def test_the_lead_is_over_the_next_and_not_over_one_that_diverged(folder):
    first = summarise(read_comparison(folder))["first"]
    assert first["0.2"] == {"method": "newton-kron", "seconds": 2.0, "next": "gd", "times": 15.0, "bound": ""}
    assert first["0.1"] == {"method": "newton-kron", "seconds": 2.0, "next": None, "times": 15.0, "bound": ">"}


def test_the_lead_is_not_over_one_that_stopped_by_itself(folder):
    manifest = json.loads((folder / "comparison.json").read_text())
    manifest["settings"]["limits"]["time_limit"] = 40.0  # gd's last record is at 30 s: it gave up
    (folder / "comparison.json").write_text(json.dumps(manifest))
    assert summarise(read_comparison(folder))["first"]["0.1"]["times"] is None


class Elements(HTMLParser):
    """Opened tags with their attributes, and the text of scripts by id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.depth = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.depth.append(tag)

    def handle_endtag(self, tag):
        while self.depth and self.depth.pop() != tag:
            pass

    def handle_data(self, data):
        if self.depth[-1:] == ["script"]:
            self.scripts[self.tags[-1][1].get("id", "")] = data


def test_the_page_needs_nothing_but_itself_and_embeds_the_histories(built):
    text = (built[0] / "report.html").read_text()
    elements = Elements(text)
    loading = [(tag, a) for tag, a in elements.tags if {"src", "href", "data", "poster", "srcset", "action"} & set(a)]
    assert loading == []
    assert {tag for tag, _ in elements.tags} & {"link", "img", "iframe", "object", "base"} == set()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in text.replace("url(#${id})", "")
    data = json.loads(elements.scripts["data"])
    for name, records in (("gd", SLOW), ("sogram", LOST), ("newton-kron", FAST)):
        drawn = data["methods"][name]
        assert drawn["seconds"] == [r.seconds for r in records]
        assert drawn["passes"] == [r.data_passes for r in records]
        assert drawn["value"] == [r.value for r in records]
        assert drawn["metric"] == [r.metric for r in records]
    assert data["lowest"] == 100.0
    policy = next(a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_the_page_names_every_method_and_hides_no_trouble(built):
    text = (built[0] / "report.html").read_text()
    for name, status in (("gd", "finished"), ("sogram", "diverged"), ("newton-kron", "finished"), ("newtn", "unknown")):
        assert re.search(rf"<th scope=row>{name}</th>.*?<td>{status}</td>", text)
    assert "ended above &lt;its&gt; start &amp; far" in text
    assert "toy &lt;&amp;&gt;" in text
    assert "<its>" not in text
    assert "gramtower compare &#x27;a b.csv&#x27;" in text
    assert "newton-kron 0.40" in text  # cores that others kept busy
    assert "For this data newton-kron won" in text


def test_a_synthetic_comparison_is_marked_everywhere(folder):
    about = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps({**about, "synthetic": "the shape of ml10m"}))
    content, _ = build(folder)
    assert content["synthetic"] == "the shape of ml10m"
    assert "Synthetic data: the shape of ml10m" in (folder / "report.html").read_text()
    assert "SYNTHETIC DATA" in (folder / "time.svg").read_text()
    assert "SYNTHETIC DATA" in (folder / "passes.svg").read_text()


def test_figures_are_there_twice_and_name_the_methods(built):
    folder, problems = built
    assert problems == []
    for name in ("time", "passes"):
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        svg = (folder / f"{name}.svg").read_text()
        for label in ("gd", "newton-kron", "sogram (diverged)", "paper_map@5", "(L − L*) / L*"):
            assert label in svg, label


def test_without_matplotlib_the_rest_is_made_and_that_is_said(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    _, problems = build(folder)
    assert "gramtower[plots]" in problems[0]
    assert (folder / "report.html").exists()
    assert not (folder / "time.png").exists()


def test_a_rebuilt_report_is_the_same_file_for_file(built, folder):
    made = ["report.html", "summary.json", "time.svg", "passes.svg", "time.png"]
    before = {name: (built[0] / name).read_bytes() for name in made}
    build(folder)
    assert {name: (folder / name).read_bytes() for name in made} == before


def test_histories_alone_are_enough(tmp_path):
    write(tmp_path, {"gd": SLOW, "newton-kron": FAST})
    content, _ = build(tmp_path)
    assert content["methods"]["newton-kron"]["seconds_to"]["0.1"] == 2.0
    assert content["methods"]["gd"]["status"] == "unfinished"  # no end was recorded
    assert "comparison.json, which holds them, is not in the folder" in (tmp_path / "report.html").read_text()


def test_a_damaged_or_empty_folder_is_refused(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="gramtower compare"):
        build(empty)
    (folder / "gd.jsonl").write_text('{"something": "else"}\n')
    with pytest.raises(ValueError, match=r"gd\.jsonl.*history"):
        build(folder)
    for text in (
        '{"methods": ',
        '{"methods": {}, "data": 1.5}',
        '{"methods": {}, "commands": [{}]}',
        "[" * 10**5,
        '{"methods": {"gd": {"status": 1}}}',
        '{"methods": {}, "data": {"left": "a"}}',
    ):
        (folder / "comparison.json").write_text(text)
        with pytest.raises(ValueError, match=r"comparison\.json.*damaged"):
            build(folder)


def test_a_method_without_metric_or_records_leaves_a_report(tmp_path):
    write(tmp_path, {"gd": history([0.1, 1.0], [5.0, 4.0])}, methods={"gd": {"status": "finished"}, "newton": {}})
    content, _ = build(tmp_path)
    assert content["metric"] is None
    assert content["methods"]["newton"]["message"] == "not started yet"
    assert 'data-chart="metric"' not in (tmp_path / "report.html").read_text()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    write(tmp_path, {}, methods={"gd": {"status": "failed", "message": "out of memory"}})
    build(tmp_path)
    assert "out of memory" in (tmp_path / "report.html").read_text()


def test_long_histories_stay_below_the_size(tmp_path):
    n = 3 * POINTS
    long = history([i * 1e-3 + 0.123456789 for i in range(n)], [1e6 / (i + 1) + 0.1 for i in range(n)], [0.2] * n)
    names = ["gd", "gd-diag", "newton", "sogram", "sogram-diag", "sampling", "sampling-diag", "newton-kron", "lbfgs"]
    write(tmp_path, dict.fromkeys(names[:1], long))
    comparison = read_comparison(tmp_path)
    whole = type(comparison)(tmp_path, [MethodRun(name, long, Outcome("finished")) for name in names])
    text = page(whole, summarise(whole))
    assert len(text.encode()) < 3e6
    assert f"{POINTS:,} records are drawn" in text
    kept = thinned(long, POINTS)
    assert (kept[0], kept[-1], len(kept)) == (long[0], long[-1], POINTS)
    assert thinned(FAST, POINTS) == FAST


def test_the_axis_of_differences_ignores_the_lowest_point_and_divergence():
    low, high = value_range([[2.0, 0.5, 0.0], [2.0, 1e30]])
    assert (low, high) == (pytest.approx(0.4), 4.0)
    assert value_range([[2.0, 1e-9]])[0] == FLOOR


def test_records_survive_the_folder(folder):
    read = {method.name: method.history for method in read_comparison(folder).methods}
    assert [asdict(r) for r in read["newton-kron"]] == [asdict(r) for r in FAST]
    assert list(read) == ["gd", "sogram", "newton-kron", "newtn"]  # the order asked for


@pytest.mark.skipif(not BROWSER.exists(), reason="needs /usr/bin/chromium, which CI does not have")
@pytest.mark.parametrize("width", [390, 1366])
def test_in_a_browser_the_page_draws_reads_and_fits(built, width):
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which CI does not have")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(BROWSER), args=["--headless", "--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        tab, complaints = context.new_page(), []
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.goto(f"file://{built[0] / 'report.html'}")
        paths = tab.locator(".chart path[data-method]")
        paths.first.wait_for(state="attached")
        assert paths.count() == 5  # three objectives, two metrics
        assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        box = tab.locator(".chart svg").first.bounding_box()
        tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + 50)  # the right end
        assert tab.locator("output[data-method=gd]").inner_text().split() == ["0.2", "·", "0.2"]
        tab.locator("button[data-method=gd]").click()
        assert paths.count() == 3
        tab.locator("input[value=passes]").click()
        assert "data passes" in tab.locator(".chart").first.inner_html()
        tab.locator("#level").select_option("0.5")
        assert tab.locator("[data-level]:visible").count() == 1
        browser.close()
    assert complaints == []
