"""docs/metrics.md and docs/grafana.json name what /metrics has, and nothing else."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.metrics import Metrics
from scheduler.serve.prometheus import Exposition

DOCS = Path(__file__).parents[2] / "docs"
PAGE, _, LEFT_OUT = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Left out")
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]

SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
NAME = r"(?:vllm:|llamacpp:|lockstep:|process_)\w+"


class FakeEngine:
    metrics = Metrics(max_len=256)
    n_slots, max_len = 4, 256
    num_running = num_waiting = 0
    cache_usage = 0.0


TEXT = Exposition(FakeEngine(), "smol").render().decode()


def _labels_of_samples():
    labels = {}
    for family in text_string_to_metric_families(TEXT):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


LABELS = _labels_of_samples()


def _rows_of_the_exposition():
    meanings = dict(line.split(" ", 3)[2:] for line in TEXT.splitlines() if line.startswith("# HELP "))
    for line in TEXT.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            sample = f"{name}_count" if kind == "histogram" else name
            labels = ", ".join(f"`{label}`" for label in sorted(LABELS[sample]))
            yield name, kind, labels, meanings[name]


def test_the_tables_are_the_exposition_in_words():
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in PAGE.splitlines() if line[:3] == "| `"]
    assert [(name.strip("`"), *rest) for name, *rest in rows] == list(_rows_of_the_exposition())


def test_what_is_said_to_be_left_out_is_left_out():
    names = set(re.findall(NAME, LEFT_OUT))
    assert len(names) > 10
    assert names & set(LABELS) == {"vllm:prompt_tokens_cached_total"}  # the exception the page makes


@pytest.mark.parametrize("query", [*QUERIES, *VARIABLES, *re.findall(r"`((?:rate|histogram)\S.*?)`", PAGE)])
def test_every_query_asks_for_what_there_is(query):
    names = re.findall(NAME, query)
    assert names
    for name in names:
        assert name in LABELS
    asked = {
        label
        for group in re.findall(r"\{(.*?)\}|by \((.*?)\)", query)
        for label in re.findall(r"\w+(?==)", group[0]) + re.findall(r"\w+", group[1])
    }
    assert asked <= SCRAPED.union(*(LABELS[name] for name in names))


def test_every_panel_has_a_place_of_its_own():
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in DASHBOARD["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_legends_name_labels_of_their_query():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in SCRAPED or f"({label}" in target["expr"] or f", {label})" in target["expr"]
