import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from tests.support.metrics import POLICY_METRICS

# What Prometheus itself adds.
BUILT_IN = {"up": {"job", "instance"}}
FUNCTIONS = {
    "min_over_time",
    "max_over_time",
    "deriv",
    "changes",
    "increase",
    "rate",
    "sum",
    "by",
    "and",
    "or",
    "unless",
    "on",
    "max",
    "min",
    "count",
    "vector",
    "histogram_quantile",
    "time",
}

# What the example predictor says, as its own tests show.
PREDICTOR = {"predictor_version": {"job", "instance"}}

Expression = tuple[str, set[str]]


@pytest.fixture(scope="module")
def alerts(deploy: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load((deploy / "prometheus/alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard(deploy: Path) -> dict[str, Any]:
    return dict(json.loads((deploy / "grafana/deltasync.json").read_text()))


@pytest.fixture(scope="module")
def expressions(alerts: list[dict[str, Any]], dashboard: dict[str, Any]) -> list[Expression]:
    """Each expression with the labels that are read from its result."""
    shown = [(r["expr"], re.findall(r"\$labels\.(\w+)", str(r["annotations"]))) for r in alerts]
    for panel in dashboard["panels"]:
        shown += [(t["expr"], re.findall(r"{{(\w+)}}", t["legendFormat"])) for t in panel["targets"]]
    return [(expression, set(labels)) for expression, labels in shown]


def _names(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(?:by|on) \([^)]*\)', "", expression)
    return set(re.findall(r"[a-z_]\w*", bare)) - FUNCTIONS


def _used_labels(expression: str) -> Iterator[str]:
    for selector in re.findall(r"\{([^}]*)\}", expression):
        yield from re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        yield from re.split(r",\s*", grouping)


def test_expressions_use_metrics_and_labels_that_exist(
    expressions: list[Expression], metrics: dict[str, set[str]]
) -> None:
    known = metrics | BUILT_IN | PREDICTOR
    assert len(expressions) > 10
    for expression, shown in expressions:
        names = _names(expression)
        assert names
        assert names <= known.keys(), expression
        for name in names:
            assert shown | set(_used_labels(expression)) <= known[name] | BUILT_IN["up"], expression


def test_dashboard_and_alerts_show_every_lag_and_all_of_releases(
    expressions: list[Expression], metrics: dict[str, set[str]]
) -> None:
    used = set().union(*(_names(expression) for expression, _ in expressions))
    assert {name for name in metrics if "_lag_" in name} <= used
    assert POLICY_METRICS.keys() <= used
    assert {"deltasync_consumer_damages_total", "deltasync_consumer_damaged_tables"} <= used


def test_prometheus_reads_the_alerts_and_scrapes_the_job_they_name(
    deploy: Path, alerts: list[dict[str, Any]]
) -> None:
    config = yaml.safe_load((deploy / "prometheus/prometheus.yml").read_text())
    assert {deploy / "prometheus" / name for name in config["rule_files"]} == {deploy / "prometheus/alerts.yml"}
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert set(re.findall(r'job="(\w+)"', str([alert["expr"] for alert in alerts]))) <= jobs


def test_alerts_are_complete_and_documented(deploy: Path, alerts: list[dict[str, Any]]) -> None:
    readme = (deploy / "README.md").read_text()
    assert set(re.findall(r"`(Deltasync\w+)`", readme)) == {alert["alert"] for alert in alerts}
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"].keys() == {"summary", "description"}


def test_the_runbook_has_a_section_for_each_alert(deploy: Path, alerts: list[dict[str, Any]]) -> None:
    sections = re.split(r"(?m)^### ", (deploy / "RUNBOOK.md").read_text())[1:]
    found = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    assert found.keys() == {alert["alert"] for alert in alerts}
    assert all(found.values())


@pytest.mark.parametrize("name", ["prometheus.yml", "compose.yml"])
def test_promtool_accepts_the_configuration(
    deploy: Path, tool: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    shutil.copytree(deploy / "prometheus", tmp_path, dirs_exist_ok=True)
    (tmp_path / "access").mkdir()
    (tmp_path / "access/token").write_text("of a test")
    (tmp_path / "access/ca.pem").write_bytes(trustme.CA().cert_pem.bytes())
    done = subprocess.run(
        [tool("promtool"), "check", "config", tmp_path / name],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_alerts_fire_when_they_should(tool: Callable[[str], str]) -> None:
    done = subprocess.run(
        [tool("promtool"), "test", "rules", Path(__file__).parent / "alerts_test.yml"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {
            (p["gridPos"]["x"] + x, p["gridPos"]["y"] + y)
            for x in range(p["gridPos"]["w"])
            for y in range(p["gridPos"]["h"])
        }
        for p in panels
    ]
    assert not [1 for one, other in combinations(cells, 2) if one & other]
    assert max(x for cell in cells for x, _ in cell) < 24


def test_dashboard_declares_the_variables_it_uses(dashboard: dict[str, Any], metrics: dict[str, set[str]]) -> None:
    text = json.dumps(dashboard)
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == {variable["name"] for variable in dashboard["templating"]["list"]}
    query = next(v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert label in metrics[metric]
