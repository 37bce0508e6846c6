"""Forms: one device's part of a model whose blocks devices share, estimated from counted operations.

Engines that share blocks fuse elementwise operations, with Transformer Engine or a compiler (`fusion`). Programs of
2021, whose attention is unfused, and eager programs (`fusion` none) run torch's own kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

from pipeplan.documents.forms import AXES, WHOLE, BlockKind, Form, FormMeasurement, ModelForm, Selective
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.models.data import length_of
from worker_agent.profiler.analytic import ModelCounts, figures_of, profile_of, require_speed
from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.datasheets import Datasheet
from worker_agent.profiler.kernels import Kernels, duration_s
from worker_agent.profiler.modules import dynamic
from worker_agent.profiler.operations import DeviceOperation
from worker_agent.profiler.precision import in_recipe, recipe_of
from worker_agent.profiler.sharded import FormCounts, count_form, shape_model

OnForm = Callable[[int, int, Form], None]
"""Called with the number of finished forms, of all forms, and the next form."""


def profile_with_forms(
    asked: FormsAsked, task: ProfileTask, sheet: Datasheet, on_form: OnForm = lambda *_: None
) -> Profile:
    """The model's profile on the datasheet's device, with its forms; its blocks are those of the form of one device.

    The profile notes what the model leaves out of its config, and which degrees have no form, with the reason. Raises
    InvalidInputError for a model that cannot be shared out, for a degree that must be possible and is not, and for a
    precision that the device does not have.
    """
    require_speed(task.dtype, sheet)
    recipe = recipe_of(asked.precision, sheet) if asked.precision else None
    model = shape_model(task.model, task.dtype)
    length = length_of(model.chain, task.sequence_length)
    wanted = tuple(dict.fromkeys((WHOLE, *asked.forms)))
    degrees = sorted({form.expert for form in wanted})
    outer = {*degrees[:3], *degrees[-1:]}  # the others may lie between these (`sharded`)
    found, lacking = {}, dict[tuple[str, str], list[int]]()
    for number, form in enumerate(sorted(wanted, key=lambda form: form.expert not in outer)):
        on_form(number, len(wanted), form)
        try:
            counts = count_form(
                model,
                form,
                microbatch_sizes=task.microbatch_sizes,
                sequence_length=length,
                attention=asked.attention,
                fusion=asked.fusion if sheet.kind == "gpu" and asked.attention != "unfused" else "none",
            )
            found[form] = counts if recipe is None else in_recipe(counts, recipe)
        except InvalidInputError as error:
            shared = [axis for axis in AXES if getattr(form, axis) > 1]
            known = (*AXES, "expert_tensor")
            axis = error.field if error.field in known else next(iter(shared), error.field)
            if form == WHOLE or not asked.may_lack(axis):
                raise
            rule = "no sharded form of its blocks is known here" if error.field == "model" else error.rule
            degrees = lacking.setdefault((axis, rule), [])
            degrees += [getattr(form, axis)] * (getattr(form, axis) not in degrees)
    whole, chain = found[WHOLE], model.chain
    experts = chain.sharding.experts if chain.sharding else 0
    notes = [
        f"{axis} {', '.join(map(str, degrees))} not considered: {rule}"
        for (axis, rule), degrees in lacking.items()
        if axis != "expert" or experts  # a model without experts has none to share
    ]
    blocks = [tuple(whole.kinds[kind].by_size[size] for kind in whole.blocks) for size in task.microbatch_sizes]
    sizes = task.microbatch_sizes
    whole_counts = ModelCounts(chain=chain, dtype=task.dtype, sizes=sizes, blocks=tuple(blocks), notes=tuple(notes))
    forms = tuple(form_of(found[form], sheet) for form in asked.forms if form in found)
    return replace(profile_of(whole_counts, sheet, task.optimizer), forms=forms, precision=asked.precision)


def form_of(counts: FormCounts, sheet: Datasheet) -> ModelForm:
    """The seconds and bytes of the counts."""
    return ModelForm(
        form=counts.form,
        kinds=tuple(
            BlockKind(
                **{each.name: getattr(kind, each.name) for each in fields(kind) if each.name != "by_size"},
                measurements=tuple(
                    _measurement(size, block, sheet, experts=kind.expert_parameters > 0)
                    for size, block in sorted(kind.by_size.items())
                ),
            )
            for kind in counts.kinds
        ),
        blocks=counts.blocks,
    )


def _measurement(microbatch_size: int, counts: BlockCounts, sheet: Datasheet, *, experts: bool) -> FormMeasurement:
    """A GPU's seconds are those of its kernels; the host's launches depend on the engine."""
    launched = sheet.kind == "gpu"
    ways = [
        Selective(
            recompute_s=_seconds(each.operations, sheet),
            activation_bytes=each.activation_bytes,
            unit=each.unit,
            operations=len(each.operations) if launched else 0,
            modules=each.modules,
        )
        for each in (counts.selective, counts.modules)
        if each is not None
    ]
    return FormMeasurement(
        microbatch_size=microbatch_size,
        **figures_of(counts, partial(_seconds, sheet=sheet)),
        forward_collectives=counts.forward_collectives,
        backward_collectives=counts.backward_collectives,
        forward_operations=len(counts.forward) if launched else 0,
        backward_operations=len(counts.backward) if launched else 0,
        dynamic_forward_operations=dynamic(counts.forward) if launched and experts else 0,
        dynamic_backward_operations=dynamic(counts.backward) if launched and experts else 0,
        selective=next((each for each in ways if each.unit != "modules"), None),
        other_selective=tuple(each for each in ways if each.unit == "modules"),
    )


def _seconds(operations: Sequence[DeviceOperation], sheet: Datasheet) -> float:
    if sheet.kind == "gpu":
        return float(Kernels.of(operations).seconds(sheet).sum())
    return duration_s(operations, sheet)
