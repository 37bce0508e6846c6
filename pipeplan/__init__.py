"""pipeplan: measure a model block by block, find the configuration that trains it fastest, and run exactly that.

    profile, cluster = pipeplan.load(pipeplan.Profile, "profile.json"), pipeplan.load(pipeplan.Cluster, "cluster.json")
    plan = pipeplan.solve("auto", pipeplan.PlanningProblem(profile=profile, cluster=cluster, batch_size=512))

What stands here is the library's front door; each name is loaded when it is first used, and with it what it needs:
pydantic for `load`, httpx for `Client`, OR-tools for the planner exact. The rooms behind it are described in
docs/architecture.md.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan.client.client import ServiceClient as Client
    from pipeplan.documents.calibration import Calibration
    from pipeplan.documents.cluster import Cluster
    from pipeplan.documents.files import load, save
    from pipeplan.documents.plan import Infeasible, Plan
    from pipeplan.documents.profile import Profile
    from pipeplan.planners.problem import Options, PlanningProblem
    from pipeplan.planners.solve import solve
    from pipeplan.programs.timeline import Timeline
    from pipeplan.simulation.play import simulate
    from pipeplan.simulation.predict import predict

__all__ = [
    "Calibration",
    "Client",
    "Cluster",
    "Infeasible",
    "Options",
    "Plan",
    "PlanningProblem",
    "Profile",
    "Timeline",
    "load",
    "predict",
    "save",
    "simulate",
    "solve",
]

_ROOMS = {
    "Calibration": "documents.calibration",
    "Client": "client.client",
    "Cluster": "documents.cluster",
    "Infeasible": "documents.plan",
    "Options": "planners.problem",
    "Plan": "documents.plan",
    "PlanningProblem": "planners.problem",
    "Profile": "documents.profile",
    "Timeline": "programs.timeline",
    "load": "documents.files",
    "predict": "simulation.predict",
    "save": "documents.files",
    "simulate": "simulation.play",
    "solve": "planners.solve",
}
_NAMES = {"Client": "ServiceClient"}


def __getattr__(name: str) -> Any:
    """Loads a name of the front door."""
    if name == "__version__":
        return version("pipeplan")
    if name not in _ROOMS:
        raise AttributeError(f"module 'pipeplan' has no attribute {name!r}")
    value = getattr(import_module(f"pipeplan.{_ROOMS[name]}"), _NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
