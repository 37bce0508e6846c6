"""Words: what other tools of the field call what our options, their values and our commands are.

A value that can mean only one of ours is taken as that (`meant`). The error for an option or a command that is not
there names the one that is meant (`option_for`, `command_for`).
"""

import re
from collections.abc import Collection, Mapping

from pipeplan.documents.engines import ENGINES, SHARDINGS
from pipeplan.documents.plan import OPTIMIZERS
from pipeplan.documents.profile import DTYPE_BYTES, PRECISIONS

_SEPARATORS = re.compile(r"[-_.\s]+")


def _plain(word: str) -> str:
    return _SEPARATORS.sub("", word).casefold()


def _values(names: Collection[str], **others: str) -> dict[str, str]:
    """By plain word the names, and `others` by the name that each means."""
    return {_plain(name): name for name in names} | {_plain(w): name for name in others for w in others[name].split()}


_DTYPES = _values(
    DTYPE_BYTES,
    float64="double fp64 f64",
    float32="float single fp32 f32",
    bfloat16="bf16 bfloat",
    float16="half fp16 f16",
)
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPES,
    "autocast": _DTYPES,
    "precision": _values(("bf16", *PRECISIONS), bf16="bfloat16 bfloat", fp8="float8 e4m3 hybrid", nvfp4="fp4 float4"),
    "sharding": _values(
        SHARDINGS,
        none="zero0 zero-stage-0 ddp",
        optimizer="zero1 zero-stage-1 distributed-optimizer",
        gradients="zero2 zero-stage-2",
        weights="zero3 zero-stage-3 fsdp full-shard",
    ),
    "optimizer": _values(OPTIMIZERS),
    "engine": _values(ENGINES, megatron="megatron-lm megatron-core mcore", deepspeed="ds", fsdp="fsdp2 torchtitan"),
    "planner": _values(("pipedream-2bw", "pipedream", "gpipe", "exact", "auto"), **{"pipedream-2bw": "2bw"}),
    "schedule": _values(
        ("1f1b", "gpipe", "1f1b-interleaved", "zb-h1", "zb-v", "v-half", "dual-pipe-v", "data-parallel"),
        **{"1f1b-interleaved": "interleaved interleaved-1f1b", "dual-pipe-v": "dualpipev"},
    ),
}
"""By the name of an option: the plain words for its values."""

_DEGREES = "dp ddp data-parallel data-parallel-size data-parallel-degree dp-size replicas width"
_DATA = "dataset datasets train-data data-path data-files"
_OPTIONS = {
    "--tensor": "tp tensor-parallel tensor-parallel-size tensor-model-parallel-size tensor-parallel-degree tp-size mp",
    "--stages": "pp pipeline pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size "
    "num-stages depth",
    "--data": f"{_DEGREES} {_DATA}",
    "--context": "cp context-parallel context-parallel-size cp-size",
    "--expert": "ep expert-parallel expert-parallel-size expert-model-parallel-size ep-size",
    "--expert-tensor": "etp expert-tensor-parallel expert-tensor-parallel-size expert-tensor-parallel-degree",
    "--sequence-parallel": "sp",
    "--chunks": "vpp vp virtual-pipeline virtual-stages num-virtual-stages model-chunks interleave",
    "--batch-size": "gbs global-batch-size train-batch-size global-batch bs batch b",
    "--microbatch-size": "mbs micro-batch-size micro-batch microbatch train-micro-batch-size-per-gpu "
    "per-device-train-batch-size gradient-accumulation-steps grad-accum",
    "--microbatch-sizes": "mbs micro-batch-size microbatch-size micro-batch microbatch batch-size bs",
    "--microbatches": "num-microbatches micro-batches gradient-accumulation-steps m",
    "--sequence-length": "seq seq-len seq-length seqlen seqlength sequence max-seq-len max-seq-length max-length "
    "context-length max-sequence-length block-size",
    "--dtype": "torch-dtype bf16 fp16 params-dtype",
    "--autocast": "amp mixed-precision bf16 fp16 precision dtype",
    "--precision": "fp8 mxfp8 nvfp4 float8 fp8-recipe fp8-format bf16",
    "--sharding": "zero zero-stage fsdp zero-optimization use-distributed-optimizer",
    "--replicate": "hsdp dp-replicate data-parallel-replicate-degree replicate-degree num-replicate",
    "--graphs": "cuda-graph cuda-graphs enable-cuda-graph cuda-graph-impl cudagraphs external-cuda-graph",
    "--recompute": "ac activation-checkpointing gradient-checkpointing activation-recomputation checkpointing "
    "checkpoint-activations recompute-activations recompute-granularity remat",
    "--a2a-overlap": "moe-a2a-overlap overlap-moe-expert-parallel-comm overlap-a2a all-to-all-overlap",
    "--offload-share": "cpu-offloading-num-layers activation-offload-fraction offload-fraction",
    "--offload": "cpu-offload optimizer-offload offload-optimizer",
    "--optimizer": "optim opt",
    "--engine": "framework backend",
    "--cluster": "gpus gpu num-gpus n-gpus ngpus gpu-type hardware hw topology system world-size "
    "nodes nnodes num-nodes",
    "--nodes": "nnodes num-nodes",
    "--node-rank": "machine-rank rank",
    "--devices": "gpus num-gpus ngpus nproc-per-node nproc",
    "--model": "config model-name model-name-or-path hf m pretrained",
    "--schedule": "sched pipeline-schedule",
    "--planner": "algorithm solver strategy",
    "--steps": "max-steps num-steps train-iters iterations iters train-steps epochs num-train-epochs",
    "--out": "output output-dir out-dir save run-dir o",
    "--output": "out out-file output-file save",
    "--cluster-output": "cluster",
    "--resume": "load resume-from resume-from-checkpoint",
    "--checkpoint-every": "save-interval save-steps save-every checkpoint-interval ckpt-interval",
    "--clip-norm": "clip-grad grad-clip gradient-clipping max-grad-norm clip-grad-norm clip",
    "--warmup-steps": "warmup lr-warmup-iters num-warmup-steps lr-warmup-steps",
    "--decay-steps": "lr-decay-iters lr-decay-steps",
    "--lr-schedule": "lr-scheduler lr-scheduler-type lr-decay-style scheduler",
    "--quiet": "silent",
    "--json": "format-json as-json",
    "--to": "output out output-dir out-dir o",
}
"""By our option: the words that mean it, if the command has it."""

_PLANNING = ("--tensor", "--stages", "--data", "--context", "--expert", "--chunks", "--sharding", "--microbatch-size")
"""Options of `solve` which other commands need not have: the plan says it."""

_OF_CONFIGS = "layers n-layer n-layers num-layers num-hidden-layers hidden hidden-size d-model n-embd heads n-head "
_OF_CONFIGS += "num-heads num-attention-heads vocab vocab-size ffn-hidden-size intermediate-size num-experts params"

COMMANDS = {
    "pipeplan": "solve calibrate check lock clusters simulate smallest largest sweep audit demo serve plan alias",
    "pipeplan-agent": "run export blocks models start prune train",
}
"""By our program: its commands, and words for them, which are looked for in other places."""


def meant(option: str, value: object) -> object:
    """The value of an option that a word can only mean; any other value as it is."""
    if not isinstance(value, str):
        return value
    word = value.removeprefix("torch.") if option in ("dtype", "autocast") else value
    return VALUES.get(option, {}).get(_plain(word), value)


def option_for(typed: str, own: Collection[str]) -> str | None:
    """What an option that a command does not have means, in words that end a sentence; None if that is not known.

    `own` are the options of the command.
    """
    word = typed.lstrip("-").partition("=")[0].replace("_", "-").casefold()
    if f"--{word}" in own:
        return f"--{word} is meant"
    if word in _OF_CONFIGS.split():
        return "it is a key of the model's config: --model 'hf:FAMILY?key=value&...'" if "--model" in own else None
    places = [option for option, words in _OPTIONS.items() if word in words.split() or f"--{word}" == option]
    planning = "--tensor" in own
    fitting = [each for each in places if each in own and (each != "--data" or planning == (word in _DEGREES.split()))]
    if fitting:
        return f"{fitting[0]} is meant"
    planned = [each for each in places if each in _PLANNING and (each != "--data" or word in _DEGREES.split())]
    if planned and "--plan" in own:
        return f"the plan says it: `pipeplan solve` has {planned[0]}"
    return None


def command_for(typed: str) -> str | None:
    """The command that is meant by one that is not there, in words that end a sentence; None if there is none."""
    word = typed.casefold()
    program = next((each for each, names in COMMANDS.items() if word in names.split()), None)
    return program and f"`{program} {'run' if word == 'train' else word}` is meant"
