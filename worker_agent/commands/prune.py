"""`pipeplan-agent prune`: removes folders of ended jobs from this node's disk."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.console import require_extra
from pipeplan.errors import require


def prune(
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Remove folders to which nothing was written for this many days.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Keep at most this many folders of ended jobs.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Keep at most this many bytes of such folders.")] = None,
    abandoned: Annotated[
        bool,
        typer.Option(
            "--abandoned", help="Also remove those of jobs that failed, were cancelled, or are unknown to the service."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be removed.")] = False,
    url: Annotated[str | None, typer.Option(help="The service. [PIPEPLAN_AGENT_URL, else PIPEPLAN_URL]")] = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Where jobs keep their files. [PIPEPLAN_AGENT_WORK_DIR]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Removes folders of jobs that have succeeded, the oldest first.

    Jobs that may be tried again keep their folders unless they are abandoned, because a run resumes from its
    checkpoints. Jobs that wait or run always keep theirs. The command asks the service about each job, and removes
    nothing while the service does not answer. What no option says, the settings PIPEPLAN_AGENT_PRUNE_... say, by which
    an agent removes folders itself.
    """
    require_extra("worker")
    from worker_agent.agent import retention
    from worker_agent.agent.client import AgentClient
    from worker_agent.agent.settings import load_settings

    settings = load_settings(
        url=url,
        work_dir=None if work_dir is None else work_dir.absolute(),
        prune_older_than_days=older_than_days,
        prune_keep=keep,
        prune_max_bytes=max_bytes,
        prune_abandoned=abandoned or None,
    )
    kept = retention.bounds_of(settings)
    rule = "must be bounded: give --older-than-days, --keep or --max-bytes, or the settings of these names"
    require(kept.any, "retention", rule, None)
    with AgentClient(settings.url, settings.token) as client:
        going = retention.surplus(settings.work_dir, lambda job_id: client.job(job_id).state, kept, time.time())
    if not dry_run:
        retention.finish(settings.work_dir)
        retention.remove(going)
    total_bytes = sum(folder.bytes for folder in going)
    if as_json:
        names = [folder.path.name for folder in going]
        typer.echo(json.dumps({"dry_run": dry_run, "removed": names, "bytes": total_bytes}))
        return
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"{settings.work_dir}: {verb} {len(going)} folders of ended jobs ({total_bytes} bytes)", err=True)
