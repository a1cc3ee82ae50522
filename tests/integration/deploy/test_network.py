"""Who may reach whom in Kubernetes: the policies, as a cluster reads them, against the labels of the pods."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

Doc = dict[str, Any]

NAMESPACE = "deltasync"
# Pods of others, with the labels of their namespace and their own.
OTHERS = {
    "prometheus": ("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "dns": ("kube-system", {"k8s-app": "kube-dns"}),
    "stranger": ("elsewhere", {"app.kubernetes.io/name": "deltasync", "app.kubernetes.io/component": "trainer"}),
    # Somebody else's, in the same namespace.
    "neighbour": (NAMESPACE, {"app.kubernetes.io/name": "other"}),
}
PORTS = (50051, 8080, 29500, 40000, 53, 4222, 6222, 8222, 8333, 9400)


def _fits(selector: Doc, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


Pods = dict[str, tuple[str, dict[str, str]]]


@pytest.fixture(scope="module")
def pods(manifests: list[Doc]) -> Pods:
    return _pods(manifests)


def _pods(manifests: list[Doc]) -> Pods:
    ours = {
        doc["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: doc["spec"]["template"]
        for doc in manifests
        if "template" in doc.get("spec", {})
    }
    return OTHERS | {name: (NAMESPACE, template["metadata"]["labels"]) for name, template in ours.items()}


@pytest.fixture(scope="module")
def policies(deploy: Path) -> list[Doc]:
    return _policies(deploy / "kubernetes/network.yaml")


def _policies(path: Path) -> list[Doc]:
    found = [doc["spec"] for doc in yaml.safe_load_all(path.read_text())]
    assert all(set(policy["policyTypes"]) == {"Ingress", "Egress"} for policy in found)
    return found


def _peer_fits(peer: Doc, namespace: str, labels: dict[str, str]) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in peer:
        there = _fits(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    else:
        there = namespace == NAMESPACE
    return there and _fits(peer.get("podSelector", {}), labels)


def _allows(
    policies: list[Doc], pod: tuple[str, dict[str, str]], peer: tuple[str, dict[str, str]], port: int, way: str
) -> bool:
    """Whether the policies of a pod let it be reached by a peer (`ingress`), or reach one (`egress`)."""
    if pod[0] != NAMESPACE:
        return True
    rules = [rule for each in policies if _fits(each["podSelector"], pod[1]) for rule in each.get(way, [])]
    side = "from" if way == "ingress" else "to"
    return any(
        any(_peer_fits(each, *peer) for each in rule[side])
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for rule in rules
    )


def _reached(policies: list[Doc], pods: Pods) -> set[tuple[str, str, int]]:
    return {
        (one, other, port)
        for one, other, port in product(pods, pods, PORTS)
        if _allows(policies, pods[one], pods[other], port, "egress")
        and _allows(policies, pods[other], pods[one], port, "ingress")
        and NAMESPACE in (pods[one][0], pods[other][0])
    }


# Ranks choose their ports.
REACHED = {
    ("trainer", "service", 50051),
    ("predictor", "service", 50051),
    ("prometheus", "service", 8080),
    ("prometheus", "trainer", 9400),
    *(("trainer", "trainer", port) for port in PORTS),
    *((name, "predictor", 8080) for name in ("prometheus", "dns", "stranger")),
    ("trainer", "dns", 53),
    ("predictor", "dns", 53),
}


def test_pods_reach_what_they_need_and_nothing_else(policies: list[Doc], pods: Pods) -> None:
    assert _reached(policies, pods) == REACHED


def test_so_do_those_of_several_processes(deploy: Path, policies: list[Doc], pods: Pods) -> None:
    folder = deploy / "kubernetes-cluster"
    docs = [
        doc for name in ("brokers", "storage") for doc in yaml.safe_load_all((folder / f"{name}.yaml").read_text())
    ]
    reached = _reached(policies + _policies(folder / "network.yaml"), pods | _pods(docs))
    assert reached - REACHED == {
        *(("service", "service", port) for port in (50051, 8080)),
        *(("service", "broker", port) for port in (4222, 8222)),
        ("service", "storage", 8333),
        ("broker", "broker", 6222),
        *((name, "dns", 53) for name in ("service", "broker")),
    }
    assert reached >= REACHED


def test_who_has_no_policy_of_its_own_is_closed(policies: list[Doc]) -> None:
    (default,) = [policy for policy in policies if policy["podSelector"] == {}]
    assert "ingress" not in default
    assert "egress" not in default
