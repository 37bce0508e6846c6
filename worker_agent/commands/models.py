"""`pipeplan-agent models`: lists the models that a SPEC can name without the user's code or files."""

import inspect
from typing import Annotated, Any

import typer

from pipeplan.cli.console import require_extra
from pipeplan.documents.files import dump
from pipeplan.documents.names import FAMILIES, query_of


def models(as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False) -> None:
    """Lists the papers' models and the Hugging Face families.

    Each model has its options with their defaults.
    """
    require_extra("worker")
    from worker_agent.models.papers import PAPERS

    papers = [
        {"model": f"preset:{name}", "description": description, "options": _options(name)}
        for name, description in PAPERS.items()
    ]
    families = [f"hf:{family}" for family in FAMILIES]
    if as_json:
        typer.echo(dump({"papers": papers, "families": families}))
        return
    for name, description in PAPERS.items():
        typer.echo(f"preset:{name}: {description}")
        typer.echo(f"    {query_of(_options(name))}")
    typer.echo(f"Hugging Face families, by config: {', '.join(families)}")


def _options(name: str) -> dict[str, Any]:
    """A preset's options and their defaults."""
    from worker_agent.models.spec import load_factory, parse_spec

    factory = load_factory(parse_spec(f"preset:{name}", field="model"), field="model")
    return {option: parameter.default for option, parameter in inspect.signature(factory).parameters.items()}
