"""Pages of the profiles and the clusters.

A profile's page shows the times and the memory of its blocks, as charts and as a table. Two profiles are compared block
by block. A cluster's page shows its
levels, as a drawing and as a table.
"""

from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.costs.memory import kept_bytes
from pipeplan.documents.alike import alike
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Device, Method, Model, Profile, numbers
from pipeplan.errors import require
from pipeplan.protocol.documents import ClusterQuery, ProfileQuery
from planner_service.documents.drawings import (
    BlockChart,
    cluster_drawing,
    memory_chart,
    memory_columns,
    size_of,
    time_chart,
    time_columns,
)
from planner_service.documents.pairs import pair_of
from planner_service.documents.service import clusters, profiles
from planner_service.platform.context import Context
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services

MOST_ROWS = 300
"""Blocks in the table of a profile."""

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """A block at the microbatch size that is shown, or several in a row that are equal. `index`: 3, or 3-82."""

    index: str
    name: str
    weight_bytes: int
    at: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """The content of a profile's page. Sums are over all blocks; the table has the first MOST_ROWS."""

    id: str
    model: Model
    device: Device
    numbers: str
    method: Method | None
    estimated: bool
    blocks: int
    edges: int
    microbatch_size: int
    sizes: tuple[int, ...]
    rows: tuple[MeasuredSizes, ...]
    hidden_rows: int
    times: BlockChart | None
    memory: BlockChart | None
    forward_s: float
    backward_s: float
    weight_bytes: int
    activation_bytes: int
    spread: float | None


@router.get("/profiles/compare")
def compare_profiles(services: Services, request: Request) -> HTMLResponse:
    """The two profiles that the address names with `profile`, in that order."""
    chosen = list(dict.fromkeys(filter(None, request.query_params.getlist("profile"))))
    require(len(chosen) == 2, "profile", "must name two profiles to compare", len(chosen))
    contents = (profiles.document(services, chosen[0]), profiles.document(services, chosen[1]))
    wanted = request.query_params.get("microbatch_size", "")
    view = services.parsing.read_stored(partial(pair_of, wanted), contents, sum(map(len, contents)))
    return page(request, "documents/compared.html", ids=chosen, view=view)


@router.get("/profiles/{profile_id}")
def show_profile(services: Services, request: Request, profile_id: str) -> HTMLResponse:
    """One profile, at one of the microbatch sizes that it was measured at."""
    wanted = request.query_params.get("microbatch_size", "")
    return page(request, "documents/profile.html", view=profile_view(services, profile_id, wanted))


def profile_view(context: Context, profile_id: str, wanted: str) -> ProfileView:
    """Gathers the page's content. Raises NotFoundError, InvalidInputError for a size that was not measured."""
    content = profiles.document(context, profile_id)
    return context.parsing.read_stored(partial(_view, profile_id, wanted), content, len(content))


def _view(profile_id: str, wanted: str, content: str) -> ProfileView:
    """The page of the profile that the text holds. The parser's process imports this by its name."""
    profile = parse(Profile, content)
    sizes = tuple(sorted(measurement.microbatch_size for measurement in profile.blocks[0].measurements))
    microbatch_size = size_of(profile, wanted)
    measured = [(block, block.at(microbatch_size)) for block in profile.blocks]
    names = [block.name for block in profile.blocks]
    runs = list(alike(names, [(block.weight_bytes, at) for block, at in measured]))
    shown = runs[:MOST_ROWS]

    # The spread is a share of the times, over all blocks that have one.
    spreads = [s for _, at in measured for s in (at.forward_spread_s, at.backward_spread_s) if s is not None]
    compute_s = sum(at.compute_s for _, at in measured)
    return ProfileView(
        id=profile_id,
        model=profile.model,
        device=profile.device,
        numbers=numbers(profile.dtype, profile.autocast, profile.precision),
        method=profile.method,
        estimated=profile.estimated,
        blocks=len(profile.blocks),
        edges=len(profile.edges or ()),
        microbatch_size=microbatch_size,
        sizes=sizes,
        rows=tuple(
            MeasuredSizes(
                index=f"{start}" if stop == start + 1 else f"{start}-{stop - 1}",
                name=name,
                weight_bytes=measured[start][0].weight_bytes,
                at=measured[start][1],
            )
            for start, stop, name in shown
        ),
        hidden_rows=len(measured) - shown[-1][1],
        times=time_chart(time_columns(profile, microbatch_size)),
        memory=memory_chart(memory_columns(profile, microbatch_size)),
        forward_s=sum(at.forward_s for _, at in measured),
        backward_s=sum(at.backward_s for _, at in measured),
        weight_bytes=sum(block.weight_bytes for block, _ in measured),
        activation_bytes=kept_bytes([at for _, at in measured]),
        spread=sum(spreads) / compute_s if spreads and compute_s > 0 else None,
    )


@router.get("/profiles")
def list_profiles(services: Services, request: Request) -> HTMLResponse:
    """A page of the profiles that pass the address's filters."""
    query = query_of(ProfileQuery, request)
    return page(request, "documents/profiles.html", profiles=profiles.page(services, query))


@router.get("/clusters/{cluster_id}")
def show_cluster(services: Services, request: Request, cluster_id: str) -> HTMLResponse:
    """One cluster."""
    cluster = parse(Cluster, clusters.document(services, cluster_id))
    drawing = cluster_drawing(cluster)
    return page(request, "documents/cluster.html", id=cluster_id, cluster=cluster, drawing=drawing)


@router.get("/clusters")
def list_clusters(services: Services, request: Request) -> HTMLResponse:
    """A page of the clusters that pass the address's filters."""
    found = clusters.page(services, query_of(ClusterQuery, request))
    return page(request, "documents/clusters.html", clusters=found)
