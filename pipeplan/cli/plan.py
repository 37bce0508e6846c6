"""`pipeplan plan`: plans, asked for and read through a service."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from pipeplan.cli import completion
from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import is_file
from pipeplan.cli.console import INFEASIBLE, GroupedCommand
from pipeplan.cli.model import ModelDtype, ModelPrecision, SequenceLength, model_asked
from pipeplan.cli.plan_formats import GET_FORMATS, as_env, as_yaml
from pipeplan.cli.service import AsJson, Cursor, Limit, Token, Url, service_at
from pipeplan.cli.solve import PlannerName, takes_options, waiting
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import invalid_input, read, write_document
from pipeplan.documents.plan import Infeasible
from pipeplan.documents.profile import Profile
from pipeplan.errors import require, require_one_of
from pipeplan.formats import spoken_document
from pipeplan.planners.problem import MAX_BATCH_SIZE, Options
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.plans import PlanQuery, PlanRequest, is_short_id

app = typer.Typer(no_args_is_help=True, help="Plans of a service: made on request, and read.")

WAIT_S = 2
"""After this time a search becomes a job, whose progress is shown."""

FORMAT_NAMES = ("torchrun", "slurm", "kubernetes", "megatron", "deepspeed", "torchtitan", "chrome-trace")

PlanId = Annotated[str, typer.Argument(metavar="ID_OR_ALIAS", help="The plan's id, or an alias.")]
Source = "The id of a stored one, or a file, which is stored first."


@app.command(cls=GroupedCommand)
@takes_options
def create(
    cluster: Annotated[str, typer.Option(help=f"{Source[:-1]}; or a name, such as dgx-h100:4.")],
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_BATCH_SIZE, help="Samples in a batch.")],
    options: Options,
    profile: Annotated[list[str] | None, typer.Option(help=f"{Source} For unequal devices one for each type.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Have an agent estimate the profile: hf:FAMILY?key=value&..., or a path there.")
    ] = None,
    sequence_length: SequenceLength = None,
    dtype: ModelDtype = None,
    precision: ModelPrecision = None,
    planner: PlannerName = "auto",
    calibration: Annotated[Path | None, typer.Option(help="Corrects the costs: `pipeplan calibrate` wrote it.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Stores the fastest plan that fits. The service's planner looks for it.

    A long search shows its progress.
    """
    from pipeplan.cli.plan_tables import show_reasons, show_solution

    asked = model_asked(model, profile, sequence_length=sequence_length, dtype=dtype, precision=precision)
    with service_at(url, token) as service:
        profile_ids = [
            service.create_profile(read(Profile, Path(each))).id
            if is_file(each)
            else service.profile_id(each)
            if is_short_id(each)
            else each
            for each in profile or ()
        ]
        if is_file(cluster):
            cluster = service.create_cluster(read(Cluster, Path(cluster))).id
        elif is_short_id(cluster):
            cluster = service.cluster_id(cluster)
        question: dict[str, Any] = {
            "cluster_id": cluster,
            "planner": planner,
            "batch_size": batch_size,
            "options": options,
            "calibration": read_calibration(calibration),
        }
        if asked is None:
            question |= {"profile_id": profile_ids[0], "other_profile_ids": tuple(profile_ids[1:])}
        else:
            question |= {
                "model": asked.model,
                "sequence_length": asked.sequence_length,
                "dtype": asked.dtype,
                "precision": asked.precision,
            }
        try:
            request = (PlanRequest if asked is None else ModelPlanRequest).model_validate(question)
        except ValidationError as error:
            raise invalid_input(error) from error
        with waiting() as on_progress:
            created = service.create_plan(request, wait_s=WAIT_S, on_progress=on_progress)
    if as_json:
        document = spoken_document(created.answer) | {"solve_time_s": created.solve_time_s}
        typer.echo(json.dumps(document, indent=2))
    if isinstance(created.answer, Infeasible):
        show_reasons(created.answer)  # on standard error, with --json too
        raise SystemExit(INFEASIBLE)
    if not as_json:
        show_solution(created.answer)


@app.command()
def get(
    plan_id: PlanId,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"For scripts: {', '.join(GET_FORMATS)}; default: a table.",
            autocompletion=completion.names(GET_FORMATS),
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; default: standard output.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Shows a plan, or prints it for scripts."""
    from pipeplan.cli.plan_tables import show_solution

    asked = "json" if as_json else format_name
    require(
        not as_json or format_name in (None, "json"), "format", "must be json, or left out, with --json", format_name
    )
    if asked is not None:
        require_one_of(GET_FORMATS, "format", asked)
    require(
        asked is not None or output is None, "output", "needs --format: a table is not written to a file", str(output)
    )
    with service_at(url, token) as service:
        found = service.plan_id(plan_id)
        plan = service.plan(found)
        exported = service.export_plan(found, asked) if asked == "torchrun" else ""
    match asked:
        case None:
            show_solution(plan)
            return
        case "json":
            text = json.dumps(spoken_document(plan), indent=2)
        case "yaml":
            text = as_yaml(plan)
        case "env":
            text = as_env(plan)
        case _:
            text = exported
    _write(output, text)


@app.command("list")
def list_plans(
    planner: Annotated[str | None, typer.Option(help="Made by this planner.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of this schedule.")] = None,
    model: Annotated[str | None, typer.Option(help="For the model of this name.")] = None,
    device: Annotated[str | None, typer.Option(help="For devices of this type.")] = None,
    devices: Annotated[int | None, typer.Option(help="For a cluster of so many devices.")] = None,
    profile: Annotated[str | None, typer.Option(help="Made from the profile of this id.")] = None,
    cluster: Annotated[str | None, typer.Option(help="For the cluster of this id.")] = None,
    estimated: Annotated[
        bool | None, typer.Option("--estimated/--measured", help="Whether the profile was estimated.")
    ] = None,
    min_throughput: Annotated[float | None, typer.Option(help="Of at least so many samples/s, predicted.")] = None,
    created_after: Annotated[str | None, typer.Option(help="Stored then or later: 2026-01-31T12:00:00Z.")] = None,
    created_before: Annotated[str | None, typer.Option(help="Stored before: 2026-01-31T12:00:00Z.")] = None,
    sort: Annotated[str | None, typer.Option(help="created_at, throughput or memory; with a - the most first.")] = None,
    limit: Limit = 20,
    cursor: Cursor = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Lists plans that pass all filters. The newest come first, unless another order is asked for."""
    from pipeplan.cli import plan_tables

    filters: dict[str, Any] = {
        "planner": planner,
        "schedule": schedule,
        "model": model,
        "device": device,
        "devices": devices,
        "estimated": estimated,
        "min_throughput": min_throughput,
        "created_after": created_after,
        "created_before": created_before,
        "sort": sort,
    }
    with service_at(url, token) as service:
        filters["profile_id"] = profile and service.profile_id(profile)
        filters["cluster_id"] = cluster and service.cluster_id(cluster)
        try:
            query = PlanQuery.model_validate({name: value for name, value in filters.items() if value is not None})
        except ValidationError as error:
            raise invalid_input(error) from error
        page = service.plans(query, limit=limit, cursor=cursor).page()
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
    else:
        plan_tables.show_list(page)


@app.command()
def compare(
    plan_ids: Annotated[list[str], typer.Argument(metavar="ID ID...", help="Two plans or more, by id or alias.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Shows plans side by side. It shows how much faster or slower each is than the first, and why."""
    from pipeplan.cli import plan_tables

    require(len(plan_ids) > 1, "ID", "must name at least two plans", plan_ids)
    with service_at(url, token) as service:
        found = [service.plan_id(plan_id) for plan_id in plan_ids]
        comparison = service.compare_plans(found)
        plans = [service.plan(plan_id) for plan_id in found]
    if as_json:
        document = plan_tables.comparison_document(plans) | comparison.model_dump(mode="json", exclude={"plans"})
        typer.echo(json.dumps(document, indent=2))
    else:
        plan_tables.show_comparison(plans)
        plan_tables.show_reasons_of_speed(comparison)


@app.command()
def alternatives(plan_id: PlanId, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Shows the alternatives to a plan, and why each lost."""
    from pipeplan.cli import plan_tables

    with service_at(url, token) as service:
        found = service.plan_alternatives(service.plan_id(plan_id))
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        plan_tables.show_alternatives(found)


@app.command()
def export(
    plan_id: PlanId,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", help=f"One of {', '.join(FORMAT_NAMES)}.", autocompletion=completion.names(FORMAT_NAMES)
        ),
    ],
    target_version: Annotated[
        str | None, typer.Option(help="The version to write for. torchtitan: 0.2 (TOML, default) or 2026-08 (Python).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; default: standard output.")] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Writes a plan for another system. Comments or notes list what that system cannot express."""
    require_one_of(FORMAT_NAMES, "format", format_name)
    with service_at(url, token) as service:
        text = service.export_plan(service.plan_id(plan_id), format_name, target_version)
    _write(output, text)


def _write(output: Path | None, text: str) -> None:
    """Writes to the file, or to standard output if none is named."""
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        write_document(output, text.removesuffix("\n"))
