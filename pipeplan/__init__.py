"""pipeplan: measure a model block by block, find the configuration that trains it fastest, and run exactly that.

    profile, cluster = pipeplan.load(pipeplan.Profile, "profile.json"), pipeplan.load(pipeplan.Cluster, "cluster.json")
    plan = pipeplan.solve("auto", pipeplan.PlanningProblem(profile=profile, cluster=cluster, batch_size=512))

These are the library's public names. Each is imported when it is first used, together with the packages that it needs:
pydantic for `load`, httpx for the clients, OR-tools for the planner exact. docs/architecture.md describes the modules.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan.client.client import AsyncClient, Client
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
    "AsyncClient",
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

_MODULES = {
    "AsyncClient": "client.client",
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

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Imports a public name."""
        if name == "__version__":
            try:
                return version("pipeplan")
            except PackageNotFoundError as error:
                raise AttributeError("pipeplan is not installed: it has no version") from error
        if name not in _MODULES:
            raise AttributeError(f"module 'pipeplan' has no attribute {name!r}")
        value = getattr(import_module(f"pipeplan.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
