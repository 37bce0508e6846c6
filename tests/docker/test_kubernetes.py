"""docker/kubernetes: settings, routes, ports, commands and secrets that exist, and objects that find each other."""

import base64
import binascii
import re
import shlex
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

from planner_service.app import create_app
from planner_service.commands.serve import GRACE_S
from planner_service.events.routes import SILENCE_S
from planner_service.platform.settings import DEFAULT_PORT, Settings, load_settings
from tests.docker.composition import ROOT, services
from tests.docker.manifests import FOLDER, Node, amount, objects, pod, pods, the, variables, variables_here
from tests.house.pages import DOCS, fences
from tests.pipeplan.cli.commands import pipeplan
from worker_agent.agent import settings as agent_settings

CONTAINERS = [(each, container) for each in pods() for container in each.containers]
IDS = [f"{each.owner}-{container['name']}" for each, container in CONTAINERS]
SERVED = pod("pipeplan").spec["containers"][0]
POD = pytest.mark.parametrize("owner", [each.owner for each in pods()])


def commands() -> list[list[str]]:
    """The documented commands, as words."""
    blocks = [fence for fence in fences(DOCS / "operations.md") if "kubectl" in fence.text]
    return [shlex.split(command) for fence in blocks for command in fence.commands]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The service's settings as the Deployment gives them, on a database of the test."""
    (tmp_path / "database_url").write_text(f"sqlite:///{tmp_path / 'service.sqlite3'}", encoding="utf-8")
    for name, value in variables_here(SERVED, tmp_path).items():
        monkeypatch.setenv(name, value)
    return load_settings()


@pytest.fixture
def served(settings: Settings) -> Iterator[TestClient]:
    """The service so set, asked by its pod's address. Its tables and tokens are made as documented, in the console."""
    for words in commands():
        if words[:3] == ["kubectl", "exec", "console"]:
            command = [word for word in words[words.index("--") + 1 :] if word not in (">", "secrets/agent_token")]
            assert command[0] == "pipeplan"
            ended = pipeplan(*command[1:])
            assert ended.status == 0, ended.err
    with TestClient(create_app(settings), base_url=f"http://10.244.1.7:{settings.port}") as client:
        yield client


def test_every_object_has_a_name_of_its_own_in_the_namespace() -> None:
    names = [(node["kind"], node["metadata"]["name"]) for node in objects()]
    assert len(names) == len(set(names)) >= 14
    for node in objects():
        assert node["apiVersion"]
        namespaced = node["kind"] != "Namespace"
        assert node["metadata"].get("namespace") == (the("Namespace")["metadata"]["name"] if namespaced else None)


@pytest.mark.parametrize("container", [container for _, container in CONTAINERS], ids=IDS)
def test_every_variable_of_ours_is_a_setting_of_the_program_that_gets_it(container: Node) -> None:
    agents = {f"PIPEPLAN_AGENT_{name}".upper() for name in agent_settings.AgentSettings.model_fields}
    service = {f"PIPEPLAN_{name}".upper() for name in Settings.model_fields}
    ours = [name for name in variables(container) if name.startswith("PIPEPLAN_")]
    known = agents if "agent" in container["image"] else service
    assert {name.removesuffix("_FILE") for name in ours} <= known
    assert bool(ours) == container["image"].startswith("pipeplan-")


def test_the_services_settings_are_accepted(settings: Settings) -> None:
    assert settings.demands_tokens
    assert settings.base_path == "/pipeplan"
    (proxies,) = settings.trusted_proxies
    assert ip_network(proxies).is_private
    assert variables(pod("pipeplan").containers[0]) == variables(SERVED)


def test_the_agents_settings_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod("pipeplan-agent").containers
    (tmp_path / "agent_token").write_text("ppl_token\n", encoding="utf-8")
    for name, value in variables_here(container, tmp_path).items():
        monkeypatch.setenv(name, value)
    loaded = agent_settings.load_settings()
    assert loaded.token == "ppl_token"
    assert str(loaded.work_dir) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert pod("pipeplan-agent").spec["terminationGracePeriodSeconds"] > loaded.drain_s


def test_agents_find_the_service_by_a_name_that_it_answers(served: TestClient, settings: Settings) -> None:
    url = urlsplit(variables(pod("pipeplan-agent").containers[0])["PIPEPLAN_AGENT_URL"])
    assert the("Service", str(url.hostname))["spec"]["ports"][0]["port"] == url.port
    hosts = [url.netloc, *(rule["host"] for rule in the("Ingress")["spec"]["rules"])]
    for host in hosts:
        assert served.get("/v1/plans", headers={"Host": host}).status_code == 401, "it asks for a token"
    assert {str(urlsplit(f"//{host}").hostname) for host in hosts} == set(settings.allowed_hosts)
    assert served.get("/v1/plans", headers={"Host": "elsewhere.example"}).status_code == 403
    assert served.get("/metrics").status_code == 401, "it asks for a token under a pod's address, which is no such name"


def test_probes_are_answered_by_address_and_without_a_token(served: TestClient) -> None:
    probes = {name: SERVED[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    names = {port["name"] for port in SERVED["ports"]}
    for probe in probes.values():
        assert served.get(probe["path"]).status_code == 200
        assert probe["port"] in names
    assert served.get("/readyz").status_code == 401, "if it needs no token, ask it whether a pod is ready"


def test_ports_are_those_of_the_images(settings: Settings) -> None:
    exposed = re.findall(r"^EXPOSE (\d+)$", (ROOT / "docker" / "service.Dockerfile").read_text(), re.MULTILINE)
    listening = [port["containerPort"] for port in SERVED["ports"]]
    assert [settings.port] == listening == [int(port) for port in exposed] == [DEFAULT_PORT]
    for service in objects("Service"):
        selected = [each for each in pods() if service["spec"]["selector"].items() <= each.labels.items()]
        named = {port["name"] for each in selected for box in each.containers for port in box.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} <= named
    (allowed,) = the("NetworkPolicy", "postgres")["spec"]["ingress"]
    (postgres,) = pod("postgres").containers
    assert [port["port"] for port in allowed["ports"]] == [port["containerPort"] for port in postgres["ports"]]


def test_images_and_commands_are_those_of_the_compose_file() -> None:
    composed = services()
    expected = {
        "pipeplan-migrate": composed["migrate"],
        "pipeplan-service": composed["service"],
        "pipeplan-agent-agent": composed["agent-gpu"],
    }
    for name, (_, container) in zip(IDS, CONTAINERS, strict=True):
        service = expected.get(name)
        if service is not None:
            assert (container["image"], container["args"]) == (service["image"], service["command"])
            assert "command" not in container, "the image's entry point is the command"
    assert set(expected) <= set(IDS)
    (postgres,), (console,) = pod("postgres").containers, pod("console").containers
    assert postgres["image"] == composed["postgres"]["image"]
    assert postgres["readinessProbe"]["exec"]["command"] == composed["postgres"]["healthcheck"]["test"][1:]
    assert console["image"] == composed["service"]["image"]


def test_secrets_are_defined_used_and_read_where_they_are_mounted() -> None:
    defined = {node["metadata"]["name"]: set(node["data"]) for node in objects("Secret")}
    used = {entry["secretName"]: {"tls.crt", "tls.key"} for entry in the("Ingress")["spec"]["tls"]}
    for each in pods():
        (secret,) = [volume["secret"] for volume in each.volumes.values() if "secret" in volume]
        used.setdefault(secret["secretName"], set()).update(item["key"] for item in secret["items"])
        for container in each.containers:
            (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "secrets"]
            read = {value for name, value in variables(container).items() if name.endswith("_FILE")}
            assert read == {f"{folder}/{item['path']}" for item in secret["items"]}
    assert used == defined


def test_no_secret_stands_in_the_files_and_no_placeholder_can_be_applied() -> None:
    for node in objects("Secret"):
        assert "stringData" not in node
        for value in node["data"].values():
            with pytest.raises(binascii.Error):
                base64.b64decode(value, validate=True)
    for _, container in CONTAINERS:
        for name in variables(container):
            assert name.endswith("_FILE") or not re.search("PASSWORD|TOKEN|DATABASE_URL|KEY", name)


def test_selectors_find_the_pods_that_they_are_for() -> None:
    def found(selector: dict[str, str]) -> set[str]:
        return {each.owner for each in pods() if selector.items() <= each.labels.items()}

    for node in [*objects("Deployment"), *objects("StatefulSet")]:
        assert found(node["spec"]["selector"]["matchLabels"]) == {node["metadata"]["name"]}
    for node in objects("StatefulSet"):
        assert the("Service", node["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    for node in objects("Service"):
        assert found(node["spec"]["selector"]) == {node["metadata"]["name"]}
    clients = {each.owner for each in pods() if any("DATABASE_URL_FILE" in str(box) for box in each.containers)}
    sources = {"postgres": clients, "pipeplan-agent": {"pipeplan-agent"}}
    for node in objects("NetworkPolicy"):
        name = node["metadata"]["name"]
        assert found(node["spec"]["podSelector"]["matchLabels"]) == {name}
        (source,) = [peer for rule in node["spec"]["ingress"] for peer in rule["from"]]
        assert found(source["podSelector"]["matchLabels"]) == sources.pop(name)
    assert sources == {}


@POD
def test_no_pod_takes_a_services_address_for_a_setting(owner: str) -> None:
    """For the Service "pipeplan" Kubernetes sets PIPEPLAN_PORT=tcp://ADDRESS:8437 in pods that do not forbid it."""
    assert pod(owner).spec["enableServiceLinks"] is False


@POD
def test_nothing_runs_as_root_or_gains_rights_or_writes_to_its_image(owner: str) -> None:
    """What the level "restricted" asks for, which the namespace enforces, and an image that cannot be written to."""
    spec, volumes = pod(owner).spec, pod(owner).volumes
    assert the("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert all(set(volume) <= {"name", "secret", "emptyDir"} for volume in volumes.values())
    for container in pod(owner).containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "emptyDir" in volumes[mounted["/tmp"]]
        assert set(mounted.values()) <= set(volumes)


def test_users_are_those_of_the_images() -> None:
    composed = {"postgres": "postgres", "pipeplan": "service", "console": "service", "pipeplan-agent": "agent"}
    for owner, name in composed.items():
        security = pod(owner).spec["securityContext"]
        assert services()[name]["user"] == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_what_the_service_may_take_fits_its_limit(settings: Settings) -> None:
    """Plans, one price beside them, documents, and the service's own process."""
    searches = (settings.solver_processes + 1) * settings.solver_memory_bytes
    documents = settings.parser_processes * settings.parser_memory_bytes
    assert searches + documents + 2**29 <= amount(SERVED["resources"]["limits"]["memory"])


def test_the_tables_change_while_no_service_runs() -> None:
    spec = the("Deployment")["spec"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert [container["name"] for container in spec["template"]["spec"]["initContainers"]] == ["migrate"]


def test_pods_have_the_time_to_end(settings: Settings) -> None:
    assert pod("pipeplan").spec["terminationGracePeriodSeconds"] >= settings.shutdown_s + GRACE_S


def test_the_ingress_passes_on_what_the_service_takes(settings: Settings) -> None:
    ingress = the("Ingress")
    (rule,), (tls,) = ingress["spec"]["rules"], ingress["spec"]["tls"]
    (path,) = rule["http"]["paths"]
    assert tls["hosts"] == [rule["host"]]
    assert (path["path"], path["pathType"]) == (settings.base_path, "Prefix")
    backend = path["backend"]["service"]
    assert backend["port"]["name"] in {port["name"] for port in the("Service", backend["name"])["spec"]["ports"]}
    given = ingress["metadata"]["annotations"]
    assert given["nginx.org/client-max-body-size"] == f"{settings.max_body_bytes // 2**20}m"
    assert float(given["nginx.org/proxy-read-timeout"].removesuffix("s")) > max(settings.solve_deadline_s, SILENCE_S)
    assert "rewrite" not in str(given), "the service takes the path off"


def test_the_documented_commands_name_what_there_is() -> None:
    files = [ROOT / words[place + 1] for words in commands() for place, word in enumerate(words) if word == "-f"]
    assert files[0] == FOLDER / "namespace.yaml"
    assert {path.name for path in files} == {path.name for path in FOLDER.glob("*.yaml")} - {"secrets.yaml"}
    made = {}
    for words in commands():
        if words[:3] == ["kubectl", "create", "secret"]:
            keys = {Path(word).name for word in words if word.startswith("--from-file=")}
            made[words[4]] = keys or {f"tls.{'crt' if word.startswith('--cert=') else 'key'}" for word in words[-2:]}
    assert made == {node["metadata"]["name"]: set(node["data"]) for node in objects("Secret")}
    for words in commands():
        if words[0] == "kubectl" and words[1] != "apply":
            assert words[words.index("-n") + 1] == the("Namespace")["metadata"]["name"]
