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
from tests.support.fleet import Trainer, follow, wait_until_in_sync
from tests.support.metrics import METRICS, POLICY_METRICS
from tests.support.server import RunningService

from deltasync.client import NumpyTarget
from deltasync.core.policy import Policy
from deltasync.trainer.sync_options import COUNTERS, GAUGES

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
    "predict_linear",
}

# What the example predictor says, as its own tests show.
PREDICTOR = {"predictor_version": {"job", "instance"}}
TRAINER = {
    f"deltasync_trainer_{name}": {"model", "rank"} for name in (*(f"{each}_total" for each in COUNTERS), *GAUGES)
}

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
    for panel in _graphs(dashboard):
        shown += [(t["expr"], re.findall(r"{{(\w+)}}", t["legendFormat"])) for t in panel["targets"]]
    return [(expression, set(labels)) for expression, labels in shown]


def _graphs(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels, without the titles of rows of them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def _names(expression: str) -> list[str]:
    """The metrics of an expression, in order."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(?:by|on) \([^)]*\)', "", expression)
    return [name for name in re.findall(r"[a-z_]\w*", bare) if name not in FUNCTIONS]


def _selected_labels(expression: str) -> Iterator[tuple[str, str]]:
    """Each metric with each of the labels by which its samples are chosen."""
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        yield from ((name, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))


def _grouping_labels(expression: str) -> set[str]:
    groupings = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    return {label for grouping in groupings for label in re.split(r",\s*", grouping)}


def test_expressions_use_metrics_and_labels_that_exist(expressions: list[Expression]) -> None:
    known = METRICS | BUILT_IN | PREDICTOR | TRAINER
    assert len(expressions) > 10
    for expression, shown in expressions:
        names = _names(expression)
        assert names
        assert set(names) <= known.keys(), expression
        for name in names:
            assert _grouping_labels(expression) <= known[name] | BUILT_IN["up"], expression
        for name, label in _selected_labels(expression):
            assert label in known[name] | BUILT_IN["up"], expression
        # What is joined to the first one only says which of its samples count.
        assert shown <= known[names[0]] | BUILT_IN["up"], expression


def test_dashboard_and_alerts_show_every_lag_and_all_of_releases(expressions: list[Expression]) -> None:
    used = set().union(*(_names(expression) for expression, _ in expressions))
    assert {name for name in METRICS if "_lag_" in name} <= used
    assert POLICY_METRICS.keys() <= used
    assert {"deltasync_consumer_damages_total", "deltasync_consumer_damaged_tables"} <= used


def test_dashboard_shows_what_tracking_and_publishing_cost_trainers(dashboard: dict[str, Any]) -> None:
    (row,) = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    below = [panel for panel in _graphs(dashboard) if panel["gridPos"]["y"] > row["gridPos"]["y"]]
    used = {name for panel in below for target in panel["targets"] for name in _names(target["expr"])}
    assert row["title"] == "Trainers"
    wanted = ("tracking_seconds_total", "publish_seconds", "absorbed_total", "refused_seconds")
    assert {f"deltasync_trainer_{name}" for name in wanted} <= used <= TRAINER.keys()


def test_dashboard_calls_those_consumers_whole_whose_state_promises_it(dashboard: dict[str, Any]) -> None:
    """And those that nobody subscribes to; states that come later are not whole until somebody says so here."""
    (first,) = [panel for panel in dashboard["panels"] if panel["gridPos"]["x"] == panel["gridPos"]["y"] == 0]
    (whole,) = re.findall(r'state=~"([^"]*)"', first["targets"][0]["expr"])
    assert set(whole.split("|")) == {"in sync", "current", "delivered", "empty"}


def test_the_first_panels_show_consumers_in_trouble_and_their_lag(
    dashboard: dict[str, Any], tool: Callable[[str], str], tmp_path: Path
) -> None:
    """One is damaged and lacks no row; a policy keeps rows of another; nobody subscribes to the third."""
    states = {"edge": "current", "web": "damaged", "unused": "empty", "mobile": "in sync"}
    series = {f'deltasync_consumer_state{{consumer="{name}",state="{it}"}}': 1 for name, it in states.items()}
    for name, lag, replicas in (("edge", 2, 1), ("web", 0, 2), ("unused", 900, 0), ("mobile", 0, 1)):
        series[f'deltasync_consumer_lag_seconds{{consumer="{name}"}}'] = lag
        series[f'deltasync_consumer_replicas{{consumer="{name}",state="connected"}}'] = replicas
    first = [panel for panel in _graphs(dashboard) if panel["gridPos"]["y"] == 0][:2]
    asked = [panel["targets"][0]["expr"].replace("$consumer", ".*") for panel in first]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value}x5"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": value}]}
            for expression, value in zip(asked, (1, 2), strict=True)
        ],
    }
    nothing = {"expr": asked[0], "eval_time": "2m", "exp_samples": []}
    silent = {"interval": "1m", "input_series": [], "promql_expr_test": [nothing]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test, silent]}))
    _promtool(tool, "test", "rules", tmp_path / "test.yml")


def test_prometheus_reads_the_alerts_and_scrapes_the_job_they_name(
    deploy: Path, alerts: list[dict[str, Any]]
) -> None:
    config = yaml.safe_load((deploy / "prometheus/prometheus.yml").read_text())
    assert {deploy / "prometheus" / name for name in config["rule_files"]} == {deploy / "prometheus/alerts.yml"}
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert set(re.findall(r'job="(\w+)"', str([alert["expr"] for alert in alerts]))) <= jobs


def test_alerts_are_complete(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"].keys() == {"summary", "description"}


def test_the_runbook_has_a_section_for_each_alert(deploy: Path, alerts: list[dict[str, Any]]) -> None:
    """What it means, then where to look and what to do; or the alert whose section says that."""
    sections = re.split(r"(?m)^### ", (deploy / "RUNBOOK.md").read_text())[1:]
    found = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    assert found.keys() == {alert["alert"] for alert in alerts}
    for text in found.values():
        meaning, *steps = text.partition("\n## ")[0].split("\n\n")
        assert meaning
        assert re.search(r"- \*\*Look\*\* (?s:.*)- \*\*Do\*\* ", "".join(steps)) or "](#deltasync" in meaning


def _promtool(tool: Callable[[str], str], *arguments: str | Path, given: str | None = None) -> None:
    """It has nothing to say against it."""
    done = subprocess.run([tool("promtool"), *arguments], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert given is None or done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", ["prometheus.yml", "compose.yml"])
def test_promtool_accepts_the_configuration(
    deploy: Path, tool: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    shutil.copytree(deploy / "prometheus", tmp_path, dirs_exist_ok=True)
    (tmp_path / "access").mkdir()
    (tmp_path / "access/token").write_text("of a test")
    (tmp_path / "access/ca.pem").write_bytes(trustme.CA().cert_pem.bytes())
    _promtool(tool, "check", "config", tmp_path / name)


def test_alerts_fire_when_they_should(tool: Callable[[str], str]) -> None:
    _promtool(tool, "test", "rules", Path(__file__).parent / "alerts_test.yml")


def test_promtool_accepts_the_metrics_of_a_service_at_work(tool: Callable[[str], str], tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data", policies={"mobile": Policy(top_k=5)}) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", NumpyTarget()),
        follow(service, "mobile", "m", NumpyTarget()),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        _, exposition = service.get("/metrics")
    _promtool(tool, "check", "metrics", given=exposition)
    # Also those of which there is no sample yet: what alerts and dashboards are built on.
    families = re.findall(r"(?m)^# TYPE (deltasync_\w+) (\w+)", exposition)
    ends = {"histogram": ("_bucket", "_count", "_sum")}
    assert {name + end for name, kind in families for end in ends.get(kind, ("",))} == METRICS.keys()


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


def test_dashboard_declares_the_variables_it_uses(dashboard: dict[str, Any]) -> None:
    text = json.dumps(dashboard)
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == {variable["name"] for variable in dashboard["templating"]["list"]}
    query = next(v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert label in METRICS[metric]
