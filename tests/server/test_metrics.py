"""/metrics, /stats and the rate of tokens."""

from prometheus_client.parser import text_string_to_metric_families

from overspill.serve.llm import LLM
from overspill.server.rate import TokenRate
from tests.server.running import running


def test_metrics_count_what_was_asked_and_answered(llm: LLM) -> None:
    with running(llm) as server:
        body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "n": 2}
        for path in ("/v1/completions", "/v1/completions", "/made/up"):
            server.http.post(path, json=body)
        server.http.post("/v1/completions", json={**body, "n": 0})
        server.http.post("/v1/completions", content="a", headers={"Content-Encoding": "gzip"})
        text = server.http.get("/metrics").text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["overspill_http_requests_total", "/v1/completions", "200"] == 2
    assert found["overspill_http_requests_total", "/v1/completions", "400"] == 1
    assert found["overspill_http_requests_total", "/v1/completions", "415"] == 1
    assert found["overspill_http_requests_total", "404", "other"] == 1
    assert found["overspill_time_to_first_token_seconds_count",] == 4
    assert found["overspill_time_per_token_seconds_count",] == 4
    assert found["overspill_new_tokens_total",] == 20
    assert found["overspill_running",] == found["overspill_waiting",] == 0
    assert 0 < found["overspill_bytes", "gpu"] < found["overspill_budget_bytes", "gpu"]
    assert found["overspill_budget_bytes", "host"] > 0
    assert ("overspill_budget_bytes", "disk") not in found, "no experts are there"
    assert "made/up" not in text


def test_stats_have_what_the_page_shows(llm: LLM) -> None:
    with running(llm, max_queue=7) as server:
        server.http.post(
            "/v1/completions", json={"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        )
        stats = server.http.get("/stats").json()
    assert stats["new_tokens"] == 5
    assert stats["tokens_per_second"] > 0
    assert stats["hit_rate_per_layer"] is None  # there is no GPU
    assert stats["kv_blocks"] == stats["kv_blocks_free"] > 0
    assert set(stats["bytes_per_tier"]) == set(stats["budget_per_tier"]) == {"gpu", "host", "disk"}
    assert stats["gpu_reserved"] is None  # there is no GPU
    assert (stats["running"], stats["waiting"], stats["max_queue"]) == (0, 0, 7)


def test_the_rate_is_that_of_the_last_five_seconds() -> None:
    now = [100.0]
    rate = TokenRate(lambda: now[0])
    for _ in range(40):  # ten seconds
        rate.add(2)
        rate.add(3)
        now[0] += 0.25
    assert rate.per_second() == 20
    assert rate.total == 200
    now[0] += 6
    assert rate.per_second() == 0
