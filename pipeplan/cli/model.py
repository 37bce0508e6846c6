"""Model: the profiles of `pipeplan solve --model`, which the worker estimates from datasheets and which are cached.

The worker's profiler runs as a process, `python -m worker_agent profile --analytic`: the library does not import the
worker. The profile is cached by content (`cli.profile_cache`): the same request starts no further process.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli import profile_cache
from pipeplan.cli.console import require_extra, typed_spec, working
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.files import parse, read_text
from pipeplan.documents.forms import Form
from pipeplan.documents.identity import canonical_json, text_id
from pipeplan.documents.names import parse_spec
from pipeplan.documents.profile import PRECISIONS, Profile
from pipeplan.errors import InvalidInputError, PipeplanError, require, require_one_of
from pipeplan.planners.problem import Options, require_batch_size
from pipeplan.protocol.estimates import FormsAsked, datasheet_of, forms_asked, microbatch_sizes

ModelSpec = Annotated[
    str | None,
    typer.Option("--model", help="Estimate the profile: hf:config.json, hf:FAMILY?key=value&... (extra worker)."),
]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence-length", help="With --model: tokens a sequence; default: at most 512.")
]
ModelDtype = Annotated[
    str | None, typer.Option("--dtype", help="With --model: float64, float32 (default), bfloat16 or float16.")
]
ModelPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision", help="With --model, for engines that have it: bf16, fp8, mxfp8 or nvfp4; dtype bfloat16."
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="With --model: neither use nor keep estimated profiles.")]

DTYPE = "float32"
WIDE = "bf16"
"""The precision in which linear layers compute in the dtype of the weights."""

_PROGRESS = re.compile(r"(estimating .*?)(: \d+ of \d+ steps, .*) \(\d+ s\)")
"""The profiler's lines of progress."""

_AS_IF_A_TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that make rich draw where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAsked:
    """The options of a model instead of a profile; `keep`: profiles are cached."""

    model: str
    sequence_length: int | None
    dtype: str
    precision: str | None
    keep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The question to the profiler: all options that determine the profile."""

    model: str
    analytic: str
    dtype: str
    optimizer: str
    microbatch_sizes: str
    sequence_length: int | None
    forms: FormsAsked | None = None

    @property
    def flags(self) -> list[str]:
        """The command line."""
        given = asdict(self) | {"forms": None} | (asdict(self.forms) if self.forms else {})
        switches = ["--forms"] if self.forms else []
        switches += [] if given.pop("sequence_parallel", True) else ["--no-sequence-parallel"]
        return switches + [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def model_asked(
    model: str | None,
    profile: Sequence[object] | None,
    *,
    sequence_length: int | None,
    dtype: str | None,
    precision: str | None,
    no_cache: bool = False,
) -> ModelAsked | None:
    """The model of these options; None if there are profiles. Raises InvalidInputError unless there is exactly one of
    both.
    """
    require(model is None or not profile, "model", "must not be given beside --profile, which holds a model", model)
    if model is not None:
        typed_spec(model, field="model")
        if precision is not None:
            require_one_of((WIDE, *PRECISIONS), "precision", precision)
            rule = f"must be left out, or bfloat16, with --precision {precision}"
            require(dtype in (None, "bfloat16"), "dtype", rule, dtype)
            dtype, precision = "bfloat16", None if precision == WIDE else precision
        rule = f"must be the type of the weights; linear layers in 8 and 4 bits are --precision {dtype}"
        require(dtype not in PRECISIONS, "dtype", rule, dtype)
        return ModelAsked(
            model=model, sequence_length=sequence_length, dtype=dtype or DTYPE, precision=precision, keep=not no_cache
        )
    rule = "is an option of --model: a profile has its own"
    require(sequence_length is None, "sequence_length", rule, sequence_length)
    require(dtype is None, "dtype", rule, dtype)
    require(precision is None, "precision", rule, precision)
    require(not no_cache, "no_cache", "is an option of --model: profiles in files are not cached", no_cache)
    require(bool(profile), "profile", "is required, unless there is a --model to estimate", None)
    return None


def estimated_profiles(asked: ModelAsked, cluster: Cluster, batch_size: int, options: Options) -> tuple[Profile, ...]:
    """The model's profile on each of the cluster's types of devices, in their order.

    Raises InvalidInputError for a device without a datasheet, and MissingDependencyError without the extra `worker`.
    Where the profiler refuses the model, its sentence is passed on and the command ends with its exit status.
    """
    require_batch_size(batch_size)
    sizes = microbatch_sizes(batch_size, asked.sequence_length, options.microbatch_size)
    keys = [datasheet_of(device) for device in cluster.types]
    forms = forms_asked(
        cluster, options, batch_size=batch_size, sequence_length=asked.sequence_length, precision=asked.precision
    )
    require_extra("worker", what="--model")
    return tuple(
        profile_of(
            Estimate(
                model=asked.model,
                analytic=key,
                dtype=asked.dtype,
                optimizer=options.optimizer_or_default,
                microbatch_sizes=",".join(map(str, sizes)),
                sequence_length=asked.sequence_length,
                forms=forms,
            ),
            keep=asked.keep,
        )
        for key in keys
    )


def profile_of(estimate: Estimate, *, keep: bool) -> Profile:
    """The estimate's profile, from the cache or new; standard error says which."""
    key = key_of(estimate) if keep else None
    kept = None if key is None else profile_cache.find(key)
    if kept is not None:
        path, profile = kept
        typer.echo(f"profile: from the cache, {path}", err=True)
        return profile
    started_s = time.perf_counter()
    text = run_profiler(estimate)
    profile = parse(Profile, text)
    where = "not kept"
    if key is not None:
        try:
            where = f"kept as {profile_cache.keep(key, text)}"
        except OSError as error:
            where = f"not kept: {profile_cache.cache_folder()} cannot be written ({error.strerror})"
    elapsed_s = time.perf_counter() - started_s
    typer.echo(f"profile: estimated for {estimate.analytic} in {elapsed_s:.1f} s, {where}", err=True)
    return profile


def run_profiler(estimate: Estimate) -> str:
    """The profile that the profiler writes.

    If it writes none, the command ends with the profiler's message and status.
    """
    shown = working(f"estimating {estimate.model} on {estimate.analytic}", lines_from_start=False)
    with shown as say, tempfile.TemporaryDirectory(prefix="pipeplan-model-") as folder:
        output = Path(folder) / "profile.json"
        # -P: nothing in the user's folder replaces a module; factories there are still found.
        command = [sys.executable, "-P", "-m", "worker_agent", "profile", f"--output={output}"]
        command += estimate.flags
        lines = []
        environment = {key: value for key, value in os.environ.items() if key not in _AS_IF_A_TERMINAL}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                for line in process.stderr or ():
                    progress = _PROGRESS.fullmatch(line.rstrip())
                    if progress:
                        say(f"{progress[1]} on {estimate.analytic}{progress[2]}")
                    elif line.strip():
                        lines.append(line.rstrip())
            except BaseException:  # an interrupt: nobody waits for the profile any more
                process.kill()
                raise
        if process.returncode == 0:
            return output.read_text(encoding="utf-8")
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise PipeplanError(f"the profiler was killed by {name}; the kernel sends SIGKILL when memory runs out")
    lines = lines or ["error: the profiler gave no reason"]
    said = next((line for line in lines if line.startswith("error: ")), f"error: the profiler: {lines[-1]}")
    field, _, rule = said.removeprefix("error: ").partition(": ")
    of_form = field in {each.name for each in fields(Form)}  # the profiler takes a form as one text
    typer.echo(f"error: --{field.replace('_', '-')}: {rule}" if of_form else said, err=True)
    raise SystemExit(process.returncode)


def key_of(estimate: Estimate) -> str | None:
    """A hash of everything that determines the profile; None for a model of a user's own code, and without a config.

    Beside the estimate these are the content of the model's config file, the device as it is known, the worker's own
    code, which holds the datasheets, and the versions of what it runs on. What a user's code makes is not known before
    it runs.
    """
    spec = parse_spec(estimate.model, field="model")
    if not (spec.is_hugging_face or spec.is_built_in):
        return None
    config = None
    if spec.path is not None:
        path = Path(spec.path)
        try:
            config = read_text(path / "config.json" if path.is_dir() else path, field="model")
        except InvalidInputError:  # the profiler says what it is instead
            return None
    worker = find_spec("worker_agent")
    folders = [] if worker is None else [Path(place) for place in worker.submodule_search_locations or ()]
    code = [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.rglob("*.py"))]
    versions = [version(name) for name in ("pipeplan", "torch", "transformers")]
    known = KNOWN_TYPES[estimate.analytic]
    return text_id(canonical_json([asdict(estimate), asdict(known), config, code, versions]))
