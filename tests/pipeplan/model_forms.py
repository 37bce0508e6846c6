"""Forms of a transformer for tests, from Megatron's formulas: Narayanan et al. 2021, Korthikanti et al. 2022."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from pipeplan.documents.forms import BlockKind, Collective, Form, FormMeasurement, ModelForm, Selective
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Block, Device, Model, Overheads, Profile

FLOPS = 312e12 * 0.5
"""What the device of these tests computes a second."""


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int = 51200,
    tensors: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (1,),
    sizes: Sequence[int] = (1, 2, 4, 8),
    flops: float = FLOPS,
) -> Profile:
    """A GPT in 16 bits: an embedding, layers, a head; forms for all pairs of degrees."""
    forms = tuple(
        ModelForm(
            form=Form(tensor=t, sequence_parallel=t > 1, context=c),
            kinds=(
                _embedding(t, c, hidden, sequence, vocabulary, sizes),
                _layer(t, c, hidden, heads, sequence, sizes, flops),
                _head(t, c, hidden, sequence, vocabulary, sizes, flops),
            ),
            blocks=(0, *[1] * layers, 2),
        )
        for t, c in product(tensors, contexts)
    )
    whole = forms[0]
    names = ("embedding", *(f"layer.{index}" for index in range(layers)), "head")
    blocks = tuple(
        Block(
            name=name,
            weight_bytes=2 * whole.kinds[kind].parameters,
            measurements=tuple(
                Measurement(
                    microbatch_size=m.microbatch_size,
                    forward_s=m.forward_s,
                    backward_s=m.backward_s,
                    input_bytes=m.input_bytes,
                    output_bytes=m.output_bytes,
                    activation_bytes=m.activation_bytes,
                )
                for m in whole.kinds[kind].measurements
            ),
        )
        for name, kind in zip(names, whole.blocks, strict=True)
    )
    return Profile(
        model=Model(name="gpt"),
        device=Device(name="A100-SXM4-80GB", memory_bytes=80 * 2**30),
        dtype="float16",
        blocks=blocks,
        overheads=Overheads(update_s_per_byte=2e-11),
        estimated=True,
        forms=forms,
    )


def _layer(t: int, c: int, h: int, heads: int, sequence: int, sizes: Sequence[int], flops: float) -> BlockKind:
    measured = []
    for b in sizes:
        tokens = b * sequence // c
        whole = tokens * h * 2  # bytes of the tensor between layers, of all t devices
        forward_s = (24 * tokens * h * h + 4 * tokens * sequence * h) / t / flops
        scores = 5 * heads * sequence * sequence * b // c // t
        share = whole // t
        moved = tuple(
            Collective(kind=kind, axis="tensor", size_bytes=whole, count=2) for kind in ("all-gather", "reduce-scatter")
        )
        turn = (Collective(kind="ring", axis="context", size_bytes=2 * whole * (c - 1) // t),) if c > 1 else ()
        measured.append(
            FormMeasurement(
                microbatch_size=b,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                input_bytes=share,
                output_bytes=share,
                activation_bytes=34 * tokens * h // t + scores,
                forward_collectives=(moved if t > 1 else ()) + turn,
                backward_collectives=(moved if t > 1 else ()) + turn + turn,
                selective=Selective(
                    recompute_s=4 * tokens * sequence * h / t / flops, activation_bytes=34 * tokens * h // t
                ),
            )
        )
    return BlockKind(name="layer", parameters=12 * h * h // t + 13 * h, measurements=tuple(measured))


def _embedding(t: int, c: int, h: int, sequence: int, vocabulary: int, sizes: Sequence[int]) -> BlockKind:
    measured = tuple(
        FormMeasurement(
            microbatch_size=b,
            forward_s=1e-5,
            backward_s=2e-5,
            input_bytes=8 * b * sequence // c,
            output_bytes=2 * b * sequence * h // c // t,
            activation_bytes=8 * b * sequence // c,
        )
        for b in sizes
    )
    return BlockKind(name="embedding", parameters=vocabulary * h // t + sequence * h, measurements=measured)


def _head(t: int, c: int, h: int, sequence: int, vocabulary: int, sizes: Sequence[int], flops: float) -> BlockKind:
    measured = []
    for b in sizes:
        tokens = b * sequence // c
        forward_s = 2 * tokens * h * vocabulary / t / flops
        measured.append(
            FormMeasurement(
                microbatch_size=b,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                input_bytes=2 * tokens * h // t,
                output_bytes=4 * tokens,
                activation_bytes=4 * tokens * vocabulary // t + 4 * tokens * h // t,
                workspace_bytes=4 * tokens * vocabulary // t,
            )
        )
    return BlockKind(name="head", parameters=vocabulary * h // t, measurements=tuple(measured))


def with_modules(profile: Profile, *modules: str, share: float = 0.5, recompute_s: float = 1e-6) -> Profile:
    """The profile in which layers can also free the outputs of these modules: a share of what they keep."""

    def changed(m: FormMeasurement) -> FormMeasurement:
        kept = int((1 - share) * m.activation_bytes)
        way = Selective(
            recompute_s=recompute_s, activation_bytes=kept, operations=2, unit="modules", modules=tuple(modules)
        )
        return replace(m, other_selective=(way,)) if m.selective else m

    forms = []
    for form in profile.forms:
        kinds = [replace(kind, measurements=tuple(map(changed, kind.measurements))) for kind in form.kinds]
        forms.append(replace(form, kinds=tuple(kinds)))
    return replace(profile, forms=tuple(forms))
