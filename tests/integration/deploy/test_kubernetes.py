import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deployments import check_schema

from deltasync.trainer.example.predictor import DRAIN_SECONDS

Doc = dict[str, Any]
Stages = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def kustomization(deploy: Path) -> Doc:
    return dict(yaml.safe_load((deploy / "kubernetes/kustomization.yaml").read_text()))


def _of_kind(manifests: list[Doc], kind: str) -> dict[str, Doc]:
    return {doc["metadata"]["name"]: doc for doc in manifests if doc["kind"] == kind}


def _workloads(manifests: list[Doc]) -> Iterator[tuple[Doc, Doc]]:
    """Each workload with the spec of its pods."""
    for doc in manifests:
        if "template" in doc.get("spec", {}):
            yield doc, doc["spec"]["template"]["spec"]


def _containers(manifests: list[Doc]) -> Iterator[tuple[Doc, Doc, Doc]]:
    for doc, pod in _workloads(manifests):
        for container in pod["containers"]:
            yield doc, pod, container


def _container(manifests: list[Doc], kind: str) -> Doc:
    (found,) = [container for doc, _, container in _containers(manifests) if doc["kind"] == kind]
    return found


def _argument(container: Doc, name: str) -> str:
    return next(str(arg).split("=", 1)[1] for arg in container["args"] if arg.startswith(f"--{name}="))


def _backends(manifests: list[Doc], service: Doc) -> list[Doc]:
    selector = service["spec"]["selector"].items()
    return [
        doc
        for doc, _ in _workloads(manifests)
        if selector <= doc["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_documents_fit_the_schema(manifests: list[Doc], overlay: list[Doc]) -> None:
    check_schema((*manifests, *overlay))


def test_kustomization_names_every_file(deploy: Path, kustomization: Doc) -> None:
    generated = [file for config in kustomization["configMapGenerator"] for file in config["files"]]
    named = ["kustomization.yaml", *kustomization["resources"], *generated]
    assert sorted(named) == sorted(path.name for path in (deploy / "kubernetes").iterdir() if path.is_file())


@pytest.mark.parametrize("name", ["cert-manager", "prometheus-operator"])
def test_what_other_operators_take_is_in_folders_of_its_own(deploy: Path, kustomization: Doc, name: str) -> None:
    folder = deploy / "kubernetes" / name
    other = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert other["namespace"] == kustomization["namespace"]
    assert {"kustomization.yaml", *other["resources"]} == {path.name for path in folder.iterdir()}
    assert f"kubectl apply --kustomize deploy/kubernetes/{name}" in (deploy / "README.md").read_text()


def test_kustomization_has_a_namespace_and_the_projects_version(
    manifests: list[Doc], kustomization: Doc, project: Doc
) -> None:
    assert kustomization["namespace"] in _of_kind(manifests, "Namespace")
    images = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert images.keys() == {container["image"] for _, _, container in _containers(manifests)}
    assert set(images.values()) == {project["project"]["version"]}


def test_kustomize_renders_valid_documents(deploy: Path, tool: Callable[[str], str]) -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", deploy / "kubernetes"], capture_output=True, text=True, check=True
    )
    rendered = list(yaml.safe_load_all(done.stdout))
    check_schema(rendered)
    (config,) = _of_kind(rendered, "ConfigMap")
    volumes = _of_kind(rendered, "StatefulSet")["deltasync"]["spec"]["template"]["spec"]["volumes"]
    assert config in {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}


def test_services_select_pods_that_have_their_ports(manifests: list[Doc]) -> None:
    services = _of_kind(manifests, "Service")
    assert services
    for name, service in services.items():
        (backend,) = _backends(manifests, service)
        assert name != "deltasync-predictor" or backend["kind"] == "Deployment"
        ports = {port["name"] for _, _, c in _containers([backend]) for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_workloads_select_their_own_pods_only(manifests: list[Doc]) -> None:
    selected = [doc for doc, _ in _workloads(manifests) if "selector" in doc["spec"]]
    assert {doc["kind"] for doc in selected} == {"StatefulSet", "Deployment"}
    for doc in selected:
        labels = doc["spec"]["selector"]["matchLabels"].items()
        own = [
            other
            for other, _ in _workloads(manifests)
            if labels <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert own == [doc]


@pytest.mark.parametrize(("kind", "readiness"), [("StatefulSet", "/readyz"), ("Deployment", "/ready")])
def test_probes_ask_named_ports(manifests: list[Doc], kind: str, readiness: str) -> None:
    container = _container(manifests, kind)
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    (port,) = {probe["port"] for probe in probes.values()}
    (number,) = [each["containerPort"] for each in container["ports"] if each["name"] == port]
    if kind == "Deployment":
        assert _argument(container, "http-port") == str(number)
        assert _argument(container, "host") == "0.0.0.0"  # noqa: S104
    # What is alive but not ready must not be killed for it.
    paths = {"startup": "/livez", "liveness": "/livez", "readiness": readiness}
    assert {name: probe["path"] for name, probe in probes.items()} == paths


def test_mounts_have_volumes_and_volumes_mounts(manifests: list[Doc]) -> None:
    for doc, pod, container in _containers(manifests):
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in doc["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_data_survives_the_pod(manifests: list[Doc], stages: Stages) -> None:
    (stateful,) = _of_kind(manifests, "StatefulSet").values()
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths[claim["metadata"]["name"]] == next(rest for word, rest in stages["service"] if word == "VOLUME")


def test_config_maps_and_their_files_exist(manifests: list[Doc], kustomization: Doc) -> None:
    generated = {config["name"]: config["files"] for config in kustomization["configMapGenerator"]}
    (pod,) = [pod for doc, pod in _workloads(manifests) if doc["kind"] == "StatefulSet"]
    (volume,) = [volume for volume in pod["volumes"] if "configMap" in volume]
    (container,) = pod["containers"]
    folder = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == volume["name"])
    file = _argument(container, "config")
    (endpoint,) = [each["value"] for each in container["env"] if each["name"] == "DELTASYNC_ENDPOINT"]
    probe = _argument(container, "probe-endpoint")
    assert {file, endpoint, probe} == {f"{folder}/{name}" for name in generated[volume["configMap"]["name"]]}


def _secret_files(pod: Doc) -> dict[str, str]:
    """The Secrets that a pod mounts, by where."""
    named = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert all(mounts[name]["readOnly"] for name in named)
    # A file that is mounted by itself never changes.
    assert not [name for name in named if "subPath" in mounts[name]]
    assert {each["secret"]["defaultMode"] for each in pod["volumes"] if "secret" in each} == {0o440}
    assert "fsGroup" in pod["securityContext"]
    return {mounts[name]["mountPath"]: secret for name, secret in named.items()}


def test_secrets_that_pods_name_are_documented(deploy: Path, manifests: list[Doc], kustomization: Doc) -> None:
    readme = (deploy / "README.md").read_text()
    used = 0
    for _, pod, container in _containers(manifests):
        endpoint = (deploy / "kubernetes/endpoint.toml").read_text() if container["name"] == "service" else ""
        text = " ".join([*container["args"], *(each.get("value", "") for each in container["env"]), endpoint])
        for folder, secret in _secret_files(pod).items():
            line = f"kubectl create secret generic {secret} --namespace {kustomization['namespace']} "
            (created,) = [each for each in readme.splitlines() if each.startswith(line)]
            keys = set(re.findall(rf"{folder}/([\w.-]+)", text))
            assert keys == set(re.findall(r"--from-file=([\w.-]+)=", created))
            used += len(keys)
    assert used == 11


def test_certificates_have_the_names_that_clients_dial_and_roles_name(deploy: Path, manifests: list[Doc]) -> None:
    """Those of cert-manager are those that the README makes by hand."""
    docs = list(yaml.safe_load_all((deploy / "kubernetes/cert-manager/certificates.yaml").read_text()))
    certificates = {doc["spec"]["secretName"]: doc["spec"] for doc in docs if doc["kind"] == "Certificate"}
    readme = (deploy / "README.md").read_text()
    line, cluster = re.findall(r"(?m)^deltasync certs access (.*)$", readme)
    assert set(re.findall(r"--host (\S+)", line)) < set(re.findall(r"--host (\S+)", cluster))
    assert certificates["deltasync-tls"]["dnsNames"] == re.findall(r"--host (\S+)", line)
    assert "deltasync" in certificates["deltasync-tls"]["dnsNames"]
    clients = {
        name: certificates[f"deltasync-{name}-tls"]["dnsNames"] for name in re.findall(r"--client (\S+)", line)
    }
    assert clients == {"trainer": ["trainer"], "predictor": ["predictor"]}
    mounted = {secret for _, pod in _workloads(manifests) for secret in _secret_files(pod).values()}
    assert certificates.keys() - {"deltasync-ca"} == mounted - {"deltasync-access"}


def test_ports_of_the_configuration_are_those_of_the_container(deploy: Path, manifests: list[Doc]) -> None:
    settings = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    service = _container(manifests, "StatefulSet")
    ports = {port["name"]: port["containerPort"] for port in service["ports"]}
    assert ports == {"grpc": settings["grpc_port"], "http": settings["http_port"]}


def test_environment_does_not_hide_the_configuration(deploy: Path, manifests: list[Doc], stages: Stages) -> None:
    settings = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    service = _container(manifests, "StatefulSet")
    set_by = {entry["name"] for entry in service["env"]}
    set_by |= {word.split("=")[0] for name, rest in stages["service"] if name == "ENV" for word in rest.split()}
    assert not set_by & {f"DELTASYNC_{key.upper()}" for key in settings}


def test_pods_are_confined_and_run_as_the_images_user(
    manifests: list[Doc], overlay: list[Doc], stages: Stages
) -> None:
    user, group = (int(n) for n in [r for w, r in stages["service"] if w == "USER"][-1].split(":"))
    ours = [(pod["securityContext"], c["resources"]) for _, pod, c in _containers(manifests)]
    assert len(ours) == 3
    for context, resources in ours:
        assert (context["runAsUser"], context["runAsGroup"]) == (user, group)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"cpu", "memory"} <= resources["requests"].keys()
    for _, pod, container in (*_containers(manifests), *_containers(overlay)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_arguments_expand_only_variables_that_are_there(manifests: list[Doc], overlay: list[Doc]) -> None:
    used = set()
    for doc, _, container in (*_containers(manifests), *_containers(overlay)):
        there = {entry["name"] for entry in container.get("env", [])}
        if doc["spec"].get("completionMode") == "Indexed":
            there.add("JOB_COMPLETION_INDEX")
        names = set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", []))))
        assert names <= there
        used |= {(doc["kind"], name) for name in names}
    assert used == {("Deployment", "POD_NAME"), ("Job", "JOB_COMPLETION_INDEX"), ("StatefulSet", "POD_NAME")}


def test_ranks_meet_at_the_first_pod(manifests: list[Doc]) -> None:
    (job,) = _of_kind(manifests, "Job").values()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] == int(_argument(container, "nnodes"))
    assert _argument(container, "node-rank") == "$(JOB_COMPLETION_INDEX)"
    # c10d would ignore the node rank.
    assert _argument(container, "rdzv-backend") == "static"
    meeting = _of_kind(manifests, "Service")[pod["subdomain"]]
    assert _argument(container, "master-addr") == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert _backends(manifests, meeting) == [job]
    assert meeting["spec"]["clusterIP"] == "None"
    assert meeting["spec"]["publishNotReadyAddresses"] is True
    assert int(_argument(container, "master-port")) in {port["port"] for port in meeting["spec"]["ports"]}


def test_clients_dial_the_service_and_name_what_it_has(consumers: Doc, manifests: list[Doc]) -> None:
    clients = {doc["kind"]: c for doc, _, c in _containers(manifests) if c["image"] == "deltasync-trainer"}
    for client in clients.values():
        host, port = _argument(client, "service").split(":")
        service = _of_kind(manifests, "Service")[host]
        assert {"name": "grpc", "port": int(port)}.items() <= service["spec"]["ports"][0].items()
    predictor = clients["Deployment"]
    consumer = consumers[_argument(predictor, "consumer")]
    assert consumer["model"] == _argument(clients["Job"], "model")
    assert consumer["value_type"] == _argument(predictor, "value-type")
    assert consumer["ready_within_seconds"] >= 12 * 3600, "longer than any outage of the service should be"
    assert {"--managed" in client["args"] for client in clients.values()} == {True}, "they have one model"


def test_a_predictor_has_time_to_answer_what_it_has_taken(manifests: list[Doc], compose: Doc) -> None:
    (deployment,) = _of_kind(manifests, "Deployment").values()
    pod = deployment["spec"]["template"]["spec"]
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= before + DRAIN_SECONDS + 5
    assert {compose["services"][f"predictor-{n}"]["stop_grace_period"] for n in (1, 2)} == {f"{grace}s"}


def test_a_replica_has_the_name_of_its_pod(manifests: list[Doc]) -> None:
    container = _container(manifests, "Deployment")
    variable = re.fullmatch(r"\$\((\w+)\)", _argument(container, "replica"))
    assert variable
    sources = {each["name"]: each.get("valueFrom", {}) for each in container["env"]}
    fields = {name: source["fieldRef"] for name, source in sources.items() if "fieldRef" in source}
    assert fields[variable[1]] == {"fieldPath": "metadata.name"}


def test_one_drain_time_everywhere(manifests: list[Doc], compose: Doc, unit: list[tuple[str, str]]) -> None:
    (stateful,) = _of_kind(manifests, "StatefulSet").values()
    seconds = stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert compose["services"]["service"]["stop_grace_period"] == f"{seconds}s"
    assert dict(unit)["TimeoutStopSec"] == str(seconds)


def test_a_log_at_its_cap_leaves_room_on_the_volume(deploy: Path, manifests: list[Doc]) -> None:
    settings = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    (stateful,) = _of_kind(manifests, "StatefulSet").values()
    size = stateful["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert settings["log_max_bytes"] <= int(size.removesuffix("Gi")) * 2**30 // 2


def test_each_workload_has_a_monitor_that_finds_its_metrics(deploy: Path, manifests: list[Doc]) -> None:
    docs = yaml.safe_load_all((deploy / "kubernetes/prometheus-operator/monitors.yaml").read_text())
    monitored = []
    for monitor in docs:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = _of_kind(manifests, "Service").values()
        (service,) = [each for each in services if wanted <= each["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        monitored += _backends(manifests, service)
    assert sorted(doc["kind"] for doc in monitored) == ["Deployment", "Job", "StatefulSet"]


def test_what_answers_in_several_pods_keeps_one_while_a_node_is_drained(manifests: list[Doc]) -> None:
    """Not the one process of the service, nor trainers, whose nodes could never be drained."""
    (budget,) = _of_kind(manifests, "PodDisruptionBudget").values()
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    (deployment,) = [
        doc for doc, _ in _workloads(manifests) if wanted <= doc["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert deployment["kind"] == "Deployment"
    assert 1 <= budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_the_service_asks_for_the_memory_that_sizing_says(root: Path, manifests: list[Doc]) -> None:
    """With tables and views of 1 GB that change, as its comment says."""
    sizing = (root / "sync_service/docs/sizing.md").read_text()

    def says(row: str, unit: str) -> int:
        (number,) = re.findall(rf"(?m)^\| {row}.*? \| (\d+) {unit}", sizing)
        return int(number)

    (job,) = _of_kind(manifests, "Job").values()
    ranks = says("all publishing ranks", "MiB for each") * job["spec"]["completions"]
    rows = says("each model", "MiB for the cut") + says("each model, and each consumer", "MiB for the rows")
    needed = says("the process", "MB") * 10**6 + (ranks + rows) * 2**20 + 10**9
    container = _container(manifests, "StatefulSet")
    requested, limit = (
        container["resources"][kind]["memory"].removesuffix("Gi") for kind in ("requests", "limits")
    )
    assert needed <= int(requested) * 2**30 <= int(limit) * 2**30
