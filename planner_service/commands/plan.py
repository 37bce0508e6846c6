"""`pipeplan plan`: plans, asked for and read through a service."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner_service.commands.calibrate import read_calibration
from planner_service.commands.planner_options import takes_options
from planner_service.contract.console import INFEASIBLE
from planner_service.contract.documents import answer_document, plan_document, read
from planner_service.contract.http import DEFAULT_URL
from planner_service.contract.plans import MAX_BATCH_SIZE, PlanRequest
from planner_service.core.cluster import Cluster
from planner_service.core.errors import require
from planner_service.core.plan import Infeasible
from planner_service.core.planner.problem import Options
from planner_service.core.profile import Profile

if TYPE_CHECKING:
    from planner_service.client import PlanAnswer, ServiceClient

app = typer.Typer(no_args_is_help=True, help="Plans, asked for and read through a service.")

Url = Annotated[str, typer.Option("--url", envvar="PIPEPLAN_URL", help="The service.")]
Token = Annotated[str | None, typer.Option("--token", envvar="PIPEPLAN_TOKEN", help="The service's access token.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
PlanId = Annotated[str, typer.Argument(metavar="ID", help="The plan's id.")]
Source = "The id of a stored one, or a file, which is stored first."


@app.command()
@takes_options
def create(
    profile: Annotated[list[str], typer.Option(help=f"{Source} For unequal devices one for each type.")],
    cluster: Annotated[str, typer.Option(help=Source)],
    planner: Annotated[str, typer.Option(help="pipedream, pipedream-2bw, gpipe, ...")],
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_BATCH_SIZE, help="Samples in a batch.")],
    options: Options,
    calibration: Annotated[Path | None, typer.Option(help="Corrects the costs: `pipeplan calibrate` wrote it.")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Asks a planner for the fastest plan that fits, and stores it."""
    with _service(url, token) as service:
        request = PlanRequest(
            profile_id=_profile_id(service, profile[0]),
            cluster_id=_cluster_id(service, cluster),
            planner=planner,
            batch_size=batch_size,
            options=options,
            calibration=read_calibration(calibration),
            other_profile_ids=tuple(_profile_id(service, other) for other in profile[1:]),
        )
        created = service.create_plan(request)
    _show_answer(created, as_json=as_json)


@app.command()
def get(plan_id: PlanId, url: Url = DEFAULT_URL, token: Token = None, as_json: AsJson = False) -> None:
    """Shows a plan."""
    from planner_service.commands.solution import show_solution

    with _service(url, token) as service:
        plan = service.plan(plan_id)
    if as_json:
        typer.echo(json.dumps(plan_document(plan), indent=2))
    else:
        show_solution(plan)


@app.command("list")
def list_plans(
    url: Url = DEFAULT_URL,
    token: Token = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many at most.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="The next_cursor of the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists plans, newest first."""
    from planner_service.commands import plan_tables

    with _service(url, token) as service:
        page = service.plans(limit=limit, cursor=cursor)
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
    else:
        plan_tables.show_list(page)


@app.command()
def compare(
    plan_ids: Annotated[list[str], typer.Argument(metavar="ID ID...", help="Two plans or more.")],
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Shows plans side by side, and how much faster or slower each is than the first."""
    from planner_service.commands import plan_tables

    require(len(plan_ids) > 1, "ID", "must name at least two plans", plan_ids)
    with _service(url, token) as service:
        plans = [service.plan(plan_id) for plan_id in plan_ids]
    if as_json:
        typer.echo(json.dumps(plan_tables.comparison_document(plans), indent=2))
    else:
        plan_tables.show_comparison(plans)


def _show_answer(created: "PlanAnswer", *, as_json: bool) -> None:
    from planner_service.commands.plan_tables import show_reasons
    from planner_service.commands.solution import show_solution

    if as_json:
        document = answer_document(created.answer) | {"solve_time_s": created.solve_time_s}
        typer.echo(json.dumps(document, indent=2))
    elif not isinstance(created.answer, Infeasible):
        show_solution(created.answer)
    if isinstance(created.answer, Infeasible):
        show_reasons(created.answer)
        raise SystemExit(INFEASIBLE)


def _service(url: str, token: str | None) -> "ServiceClient":
    from planner_service.client import ServiceClient

    return ServiceClient(url, token)


def _profile_id(service: "ServiceClient", given: str) -> str:
    path = Path(given)
    return service.create_profile(read(Profile, path)).id if _is_file(path) else given


def _cluster_id(service: "ServiceClient", given: str) -> str:
    path = Path(given)
    return service.create_cluster(read(Cluster, path)).id if _is_file(path) else given


def _is_file(path: Path) -> bool:
    """Ids have no suffix: what has one is meant as a file, and is told of as one where it does not exist."""
    return path.is_file() or path.suffix == ".json"
