"""docker/kubernetes as the tests read it: every object, the pods that they make, and the settings of a container."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.docker.composition import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
Node = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """A pod as an object of the folder describes it."""

    owner: str
    labels: dict[str, str]
    spec: Node
    claims: tuple[str, ...]

    @property
    def containers(self) -> list[Node]:
        """All containers, the first ones first."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, Node]:
        """By name; what a claim of the object makes is there, too."""
        return {volume["name"]: volume for volume in self.spec.get("volumes", ())} | {name: {} for name in self.claims}


def objects(kind: str | None = None) -> list[Node]:
    """Every object of the folder, or those of a kind."""
    read = [node for path in sorted(FOLDER.glob("*.yaml")) for node in yaml.safe_load_all(path.read_text("utf-8"))]
    return [node for node in read if kind in (None, node["kind"])]


def the(kind: str, name: str = "pipeplan") -> Node:
    """The object of this kind and name."""
    (found,) = [node for node in objects(kind) if node["metadata"]["name"] == name]
    return found


def pods() -> list[PodTemplate]:
    """What every object that makes pods makes."""
    made = []
    for node in objects():
        pod = node if node["kind"] == "Pod" else node.get("spec", {}).get("template")
        if pod is not None:
            claims = tuple(claim["metadata"]["name"] for claim in node["spec"].get("volumeClaimTemplates", ()))
            owner = node["metadata"]["name"]
            made.append(PodTemplate(owner=owner, labels=pod["metadata"]["labels"], spec=pod["spec"], claims=claims))
    return made


def pod(owner: str) -> PodTemplate:
    """The pod of one of them."""
    (found,) = [each for each in pods() if each.owner == owner]
    return found


def variables(container: Node) -> dict[str, str]:
    """What stands in the container's environment."""
    return {given["name"]: given["value"] for given in container.get("env", ())}


def variables_here(container: Node, secrets: Path) -> dict[str, str]:
    """The same, with the secrets in a folder of the test."""
    return {name: value.replace("/run/secrets/pipeplan", str(secrets)) for name, value in variables(container).items()}


def amount(text: str) -> float:
    """A quantity of Kubernetes as a number."""
    suffixes = {"Gi": 2**30, "Mi": 2**20, "Ki": 2**10, "m": 1e-3}
    for suffix, factor in suffixes.items():
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)
