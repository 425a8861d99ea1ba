"""The page loads nothing but itself, and in a browser it finds, lists, draws and builds without a complaint."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from serving_cases import ITEMS, ODD, client, genres, held_out, listening, model, source

import gramtower as gt
from gramtower.serving.snapshot import Source
from gramtower.serving.web_page import PAGE_POLICY, page

BROWSER = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def api():
    with client(source(), source("plain", table=False)) as made:
        yield made


def test_the_page_needs_nothing_from_elsewhere(api):
    text = page().decode()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r'(?:src|href|action)="([^"]*)"', text)) == {"data:,", "/docs"}
    assert not re.search(r"\son\w+=|style=|innerHTML|eval\(|import\(|localStorage", text)
    answer = api.get("/")
    assert answer.headers["content-security-policy"] == PAGE_POLICY
    assert "unsafe" not in PAGE_POLICY
    assert PAGE_POLICY.count("'sha256-") == 3  # the page's script and style, and the style of /docs


def test_an_entity_has_its_columns_and_its_history(api):
    found = api.post("/entity", json={"side": "left", "id": "日本 😀"}).json()
    row = model().left_.rows(["日本 😀"])[0]
    assert [one["id"] for one in found["history"]] == model().right_.ids[model().seen_[row].indices].tolist()
    assert found["pairs"] == model().seen_[row].nnz
    item = api.post("/entity", json={"id": "i7"}).json()
    assert item["columns"]["genre"].split("|") == genres()["i7"]
    column = model().seen_.tocsc()[:, model().right_.rows(["i7"])[0]]
    assert [one["id"] for one in item["history"]] == model().left_.ids[column.indices].tolist()
    assert api.post("/entity", json={"id": "i77"}).status_code == 404


def test_nothing_was_observed_with_itself(tmp_path):
    """Where both sides are one set; lists leave an entity out of its own all the same."""
    pairs = [(f"p{i}", f"p{j}") for i in range(9) for j in range(9) if i != j and (i + 2 * j) % 3 < 2]
    known = gt.Interactions.from_arrays(*zip(*pairs, strict=True), same_entities=True)
    gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu").fit(known).save(tmp_path / "one.gramtower")
    with client(Source("one", tmp_path / "one.gramtower")) as api:
        for place, side in enumerate(("left", "right")):
            found = api.post("/entity", json={"id": "p4", "side": side}).json()
            expected = [pair[1 - place] for pair in pairs if pair[place] == "p4"]
            assert sorted(one["id"] for one in found["history"]) == sorted(expected)
            assert found["pairs"] == len(expected)
        listed = api.post("/recommend", json={"left": ["p4"], "k": 9}).json()["answers"][0]["results"]
        assert "p4" not in [one["id"] for one in listed]


def test_a_search_answers_with_titles(api):
    found = api.post("/search", json={"text": "thing 3", "most": 5}).json()["results"]
    assert len(found) == 5
    assert all(one["title"].startswith("Thing 3") for one in found)
    assert api.post("/search", json={"text": "x", "most": 1000}).status_code == 422


def test_the_map_has_places_and_groups(api):
    found = api.get("/map?side=right&column=genre").json()
    assert len(found["ids"]) == len(found["x"]) == len(found["y"]) == len(found["group"]) == ITEMS
    first = {key: values[0] for key, values in genres().items()}
    for key, group in zip(found["ids"], found["group"], strict=True):
        assert group == (found["groups"].index(first[key]) if key in first else -1)
    assert len(api.get("/map?side=left").json()["ids"]) == len(model().left_.ids)
    assert api.get("/map?side=up").status_code == 422
    assert api.get("/map?column=nothing").status_code == 422
    assert api.get("/map?model=plain&column=genre").status_code == 422


def test_a_model_with_low_rank_labels_is_served_without_their_numbers(tmp_path):
    seen = model("plain").seen_
    labels = np.ones((seen.shape[0], 2)), np.ones((seen.shape[1], 2))
    gt.TwoTower(dim=5, hidden=(), max_iterations=1, imputed=labels, device="cpu").fit(seen).save(tmp_path / "m")
    with client(source("plain", table=False, path=tmp_path / "m")) as api:
        assert api.get("/run").json()["settings"]["imputed"] == "low rank, 2"
        assert api.post("/recommend", json={"left": [3], "k": 4}).status_code == 200


def test_the_run_tells_settings_counts_and_curves(api):
    found = api.get("/run").json()
    assert found["history"]["value"] == [record.value for record in model().history_]
    assert (found["settings"]["dim"], found["right"], found["pairs"]) == (6, ITEMS, model().seen_.nnz)
    assert found["stopped"] == model().message_


def test_the_run_tells_metrics_on_held_out_pairs_by_popularity():
    with client(source(test=held_out)) as tested:
        found = tested.get("/run").json()["evaluation"]
    assert found == pytest.approx(dict(model().evaluate(held_out(), by="popularity")))
    assert "recall@20 popularity=low" in found


@contextmanager
def tab_at(address, complaints, width=1400, **options):
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(BROWSER), args=["--headless", "--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        tab = context.new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on(
            "request", lambda request: request.url.startswith(address.split("#")[0]) or complaints.append(request.url)
        )
        tab.set_default_timeout(20_000)
        tab.goto(address)
        try:
            yield tab
        finally:
            browser.close()


needs_browser = pytest.mark.skipif(not BROWSER.exists(), reason=f"needs {BROWSER}, which is not there")


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_in_a_browser_one_finds_looks_and_clicks_through(width, scheme):
    complaints = []
    with (
        listening(source(), source("plain", table=False)) as address,
        tab_at(address, complaints, width, color_scheme=scheme) as tab,
    ):
        tab.locator("#lists li button.name").first.wait_for()
        tab.keyboard.press("/")
        tab.keyboard.type("日本")
        tab.locator("#found li:has-text('日本')").wait_for()
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Enter")
        tab.locator("#name:has-text('日本 😀')").wait_for()
        expected = model().recommend(["日本 😀"], k=20)[0][0]
        tab.locator(f"#lists li button[data-id='{expected[0]}']").wait_for()
        shown = tab.locator("#lists li button.name").evaluate_all("list => list.map(one => one.dataset.id)")
        assert shown == [key for key in expected.tolist() if key is not None]
        tab.locator("#lists li button.why").first.click()
        tab.locator("#why-parts tr").last.wait_for()
        cells = tab.locator("#why-parts td:nth-child(2)").evaluate_all(
            "list => list.map(one => Number(one.textContent))"
        )
        assert sum(cells[:-1]) == pytest.approx(cells[-1], abs=1e-3)
        parts = {one.name for one in model().explain("日本 😀", expected[0]).contributions}
        assert len(cells) >= min(12, len(parts))
        tab.locator("#why-close").click()
        assert not tab.locator("#why").is_visible()
        tab.locator("#column").select_option("genre")
        tab.locator("#value").fill("War")
        war = [key for key, values in genres().items() if "War" in values]
        wanted = [key for key in model().recommend(["日本 😀"], k=20, allow=war)[0][0].tolist() if key is not None]
        ids = "[...document.querySelectorAll('#lists button.name')].map(one => one.dataset.id)"
        tab.wait_for_function(f"wanted => JSON.stringify({ids}) === JSON.stringify(wanted)", arg=wanted)
        tab.locator("#value").fill("")
        tab.locator("#neighbours button.name").first.click()  # another left entity
        tab.wait_for_function("() => !document.getElementById('name').textContent.includes('日本')")
        tab.locator("#history button.name").first.click()  # a right one
        tab.locator("#cells[data-side=right] dt:text-is('item')").wait_for()
        assert not tab.locator("#recommended").is_visible()
        tab.go_back()
        tab.locator("#cells[data-side=left] dt:text-is('user')").wait_for()
        assert tab.locator(".side").all_inner_texts() == ["user", "item"]  # as the data calls them
        assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert complaints == []


@needs_browser
def test_in_a_browser_a_new_one_is_built_the_map_zooms_and_the_run_shows():
    complaints = []
    with (
        listening(source(test=held_out), source("plain", table=False)) as address,
        tab_at(f"{address}#left/t/{'user%200'}", complaints) as tab,
    ):
        tab.locator("#name:has-text('user 0')").wait_for()
        tab.locator("#history .pick").nth(0).click()
        tab.locator("#history .pick").nth(1).click()
        picked = tab.locator("#history button.name").evaluate_all("list => list.slice(0, 2).map(one => one.dataset.id)")
        expected = [key for key in model().recommend(histories=[picked], k=20)[0][0].tolist() if key is not None]
        ids = "[...document.querySelectorAll('#built button.name')].map(one => one.dataset.id)"
        tab.wait_for_function(f"wanted => JSON.stringify({ids}) === JSON.stringify(wanted)", arg=expected)
        tab.locator("#picks button").first.click()
        tab.wait_for_function("() => document.querySelectorAll('#picks button').length === 1")
        left = [key for key in model().recommend(histories=[picked[1:]], k=20)[0][0].tolist() if key is not None]
        tab.wait_for_function(f"wanted => JSON.stringify({ids}) === JSON.stringify(wanted)", arg=left)

        points = "document.getElementById('map').dataset"
        tab.wait_for_function(f"() => {points}.points === '{ITEMS}'")
        assert int(tab.evaluate(f"{points}.labels")) > 5
        before = float(tab.evaluate(f"{points}.zoom"))
        tab.locator("#map").focus()
        tab.keyboard.press("+")
        assert float(tab.evaluate(f"{points}.zoom")) > before
        tab.locator("#colour").select_option("genre")
        tab.locator("#legend span:has-text('Comedy')").wait_for()
        tab.locator("#map").hover()
        tab.mouse.wheel(0, -200)
        tab.locator("#whole").click()
        assert float(tab.evaluate(f"{points}.zoom")) == pytest.approx(before)
        tab.locator("#map-side").select_option("left")
        tab.wait_for_function(f"() => {points}.points === '{len(model().left_.ids)}'")

        tab.locator("#curves svg path").first.wait_for(state="attached")
        assert "40" in tab.locator("#data").inner_text()
        assert tab.locator("#evaluation tr").count() == 4
        shown = tab.locator("#evaluation tr:has-text('recall@20') td").all_inner_texts()
        metrics = model().evaluate(held_out(), by="popularity")
        assert float(shown[0]) == pytest.approx(metrics["recall@20"], rel=1e-4)
        assert float(shown[1]) == pytest.approx(metrics["recall@20 popularity=low"], rel=1e-4)
        tab.locator("#theme").click()
        assert tab.evaluate("document.documentElement.dataset.theme") == "light"
        tab.locator("#model").select_option("plain")
        tab.locator("#evaluation").wait_for(state="hidden")
        tab.locator("#build-how:has-text('most similar to all of your picks')").wait_for()
        tab.locator("#lists li button.name").first.wait_for()
    assert complaints == []


@needs_browser
@pytest.mark.parametrize("width", [390, 1366])
def test_in_a_browser_no_page_scrolls_sideways_and_no_list_is_cut(width):
    complaints = []
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    with listening(source(test=held_out)) as address, tab_at(address, complaints, width) as tab:
        tab.locator("#lists li button.why").first.click()
        tab.locator("#why-parts tr").last.wait_for()
        tab.locator("#evaluation tr").last.wait_for()
        assert tab.evaluate(fits)
        clips = "one.clientHeight && getComputedStyle(one).overflowY !== 'visible'"
        cut = f"one => {clips} && one.scrollHeight > one.clientHeight + 1"
        assert tab.locator("main, main *").evaluate_all(f"list => list.filter({cut}).map(one => one.outerHTML)") == []
        shown = tab.locator("#lists li button.name").evaluate_all("list => list.map(one => one.checkVisibility())")
        assert shown
        assert all(shown)
        tab.goto(f"{address}docs")
        tab.locator("table").first.wait_for()
        assert tab.evaluate(fits)
    assert complaints == []


@needs_browser
def test_in_a_browser_a_long_history_is_shown_on_demand(tmp_path):
    pairs = [(f"u{i}", f"i{j}") for i in range(3) for j in range(60) if i == 0 or (i + j) % 2]
    named = {"left_name": "reader <b>", "right_name": "book"}
    known = gt.Interactions.from_arrays(*zip(*pairs, strict=True), **named)
    gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu").fit(known).save(tmp_path / "one.gramtower")
    complaints = []
    with (
        listening(Source("one", tmp_path / "one.gramtower")) as address,
        tab_at(f"{address}#left/t/u0", complaints) as tab,
    ):
        tab.locator("#more").wait_for()
        assert tab.locator("#history li").count() == 20
        tab.locator("#more").click()
        assert tab.locator("#history li").count() == 60
        assert not tab.locator("#more").is_visible()
        assert tab.locator(".side").all_inner_texts() == ["reader <b>", "book"]  # text, not HTML
        assert tab.locator("#map-side option").all_inner_texts() == ["book", "reader <b>"]
    assert complaints == []


@needs_browser
def test_in_a_browser_a_token_is_asked_for():
    complaints = []
    with listening(source(), token="s3cret") as address, tab_at(address, complaints) as tab:
        tab.locator("#token").fill("s3cret")
        tab.keyboard.press("Enter")
        tab.locator("#lists li button.name").first.wait_for()
        assert tab.evaluate("document.cookie + Object.keys(sessionStorage) + Object.keys(localStorage)") == ""
    assert len(complaints) == 1  # the browser's own line on the first answer, 401
    assert "401" in complaints[0]


def test_ids_of_any_kind_survive_the_way_to_the_page_and_back(api):
    for key in ODD:
        assert api.post("/entity", json={"side": "left", "id": key}).json()["id"] == key
