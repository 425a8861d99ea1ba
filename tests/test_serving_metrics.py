"""What Prometheus reads: counts, a histogram that adds up, ages; labels that no request can multiply."""

from __future__ import annotations

import re

from serving_cases import client

from gramtower.serving.served_models import GaugeMetricFamily, Metrics

LINE = re.compile(
    r"(?:# (?:HELP|TYPE) [a-z_]+ .+|[a-z_]+(?:\{[a-z]+=\"[^\"\n]*\"(?:,[a-z]+=\"[^\"\n]*\")*\})? [-+.e\d]+)"
)


def test_requests_are_counted_by_path_and_status():
    with client() as api:
        for _ in range(3):
            api.post("/score", json={"left": ["a/b"], "right": ["i1"]})
        api.post("/score", content=b"{")
        for number in range(5):
            api.get(f"/nothing/{number}")
        answer = api.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.text.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert 'gramtower_requests_total{path="/score",status="200"} 3.0' in lines
    assert 'gramtower_requests_total{path="/score",status="422"} 1.0' in lines
    assert 'gramtower_requests_total{path="other",status="404"} 5.0' in lines
    assert not any("nothing" in line for line in lines)
    assert 'gramtower_request_seconds_count{path="/score"} 4.0' in lines
    assert any(line.startswith('gramtower_model_age_seconds{model="history"} ') for line in lines)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_a_histogram_counts_up_to_each_bound():
    metrics = Metrics()
    for seconds in (0.001, 0.0011, 0.3, 99.0):
        metrics.request("/x", 200, seconds)
    text = metrics.text()
    found = [int(n) for n in re.findall(r'seconds_bucket\{le="[^"]+",path="/x"\} (\d+)', text)]
    assert found == [1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4]
    assert 'seconds_sum{path="/x"} 99.3021' in text


def test_labels_are_escaped():
    gauge = GaugeMetricFamily("x", "help", labels=["model"])
    gauge.add_metric(['a"b\\c\nd'], 1.0)
    text = Metrics().text([gauge])
    assert 'x{model="a\\"b\\\\c\\nd"} 1' in text


def test_every_line_names_the_worker():
    metrics = Metrics("3")
    metrics.request("/x", 200, 0.5)
    samples = [line for line in metrics.text().splitlines() if not line.startswith("#")]
    assert 'gramtower_requests_total{path="/x",status="200",worker="3"} 1.0' in samples
    assert all('worker="3"' in line for line in samples)
