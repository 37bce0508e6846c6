"""Example: VGG-16 as PipeDream's authors profiled it (SOSP 2019, their repository), and a server for it.

One click on an empty dashboard stores both and asks for a plan, to have something to look at. Left alone, a planner
would train so small a model without a pipeline on four devices of one server: the request is for four stages.
"""

from pathlib import Path

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import Device, Model
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.problem import Options
from pipeplan.protocol.plans import PlanRequest
from planner_service.documents.service import clusters, profiles
from planner_service.platform.context import Context

GRAPH = Path(__file__).parent / "examples" / "vgg16.graph.txt"

DEVICE = Device(name="V100-16GB", memory_bytes=16 * 2**30)
CLUSTER = Cluster(device=DEVICE, levels=(Level(size=4, bandwidth_bytes_per_s=12e9, latency_s=1e-5),))
BATCH_SIZE = 1024


def store_example(context: Context) -> PlanRequest:
    """Stores profile and cluster, and returns the request for their plan."""
    profile = import_pipedream_graph(
        GRAPH.read_text(encoding="utf-8"),
        microbatch_size=None,
        model=Model(name="vgg16"),
        device=DEVICE,
        dtype="float32",
    )
    stored, _ = profiles.create(context, profile)
    cluster, _ = clusters.create(context, CLUSTER)
    return PlanRequest(
        profile_id=stored.id, cluster_id=cluster.id, planner="auto", batch_size=BATCH_SIZE, options=Options(stages=4)
    )
