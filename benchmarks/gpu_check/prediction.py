"""Prediction: models profiled on this device, planned for it, run on it, and what the datasheet alone would have said.

GPT-2 medium and a Llama of 1.1 billion parameters, in bfloat16 with Adam: of transformers where that is installed, else
of plain modules of the same shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_check import measured
from benchmarks.gpu_check.estimated import estimated_profile
from benchmarks.gpu_check.findings import Findings, NotRunError
from benchmarks.gpu_check.here import datasheet, device, is_installed, is_short
from benchmarks.gpu_check.measured import Trial
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Device, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.two_bw.planner import two_bw
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet

PLAIN = "benchmarks.gpu_check.blocks"
GPT2 = "n_layer=24&n_embd=1024&n_head=16&n_positions=1024"
LLAMA = (
    "num_hidden_layers=22&hidden_size=2048&num_attention_heads=32&num_key_value_heads=4&intermediate_size=5632"
    "&vocab_size=32000"
)
SHORT_GPT2 = "n_layer=2&n_embd=32&n_head=4&vocab_size=64&n_positions=64"
SHORT_LLAMA = (
    "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&num_key_value_heads=2&intermediate_size=64&vocab_size=64"
)
BATCH_SIZE, SIZES, SEQUENCE_LENGTH, STEPS = 32, (1, 2, 4, 8, 16), 512, 10
ESTIMATED_ON_CPU = "h100-sxm"
"""The datasheet of the short form, without a device for comparison."""


def check_gpt2(findings: Findings) -> None:
    """GPT-2 medium: 405 million parameters with a head of its own."""
    short = is_short(findings)
    transformers = _has_transformers(findings)
    query = SHORT_GPT2 if short else GPT2
    spec = f"hf:gpt2?{query}" if transformers else f"{PLAIN}:gpt2?{query}"
    _check(findings, _trial(spec, vocab_size=64 if short else 50257, short=short))


def check_llama(findings: Findings) -> None:
    """A Llama of 1.1 billion parameters. The short form takes plain modules: the other model shows transformers'."""
    short = is_short(findings)
    query = SHORT_LLAMA if short else LLAMA
    transformers = _has_transformers(findings) and not short
    spec = f"hf:llama?{query}&max_position_embeddings=1024" if transformers else f"{PLAIN}:llama?{query}"
    _check(findings, _trial(spec, vocab_size=64 if short else 32000, short=short))


def _has_transformers(findings: Findings) -> bool:
    if is_installed("transformers"):
        return True
    findings.leave_out("transformers' own layers", "transformers is not installed: plain modules of the same shapes")
    return False


def _trial(spec: str, *, vocab_size: int, short: bool) -> Trial:
    length = 16 if short else SEQUENCE_LENGTH
    return Trial(
        model=spec,
        data=f"worker_agent.models.text:random_tokens?vocab_size={vocab_size}&sequence_length={length}",
        dtype="bfloat16",
        optimizer="adam",
        microbatch_sizes=(1, 2) if short else SIZES,
        batch_size=4 if short else BATCH_SIZE,
        steps=3 if short else STEPS,
        rounds=2 if short else 5,
    )


@dataclass(slots=True)
class _Study:
    """A trial's profile and plans, as its cases find them."""

    trial: Trial
    findings: Findings
    profile: Profile | None = None
    plans: dict[str, Plan] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def measure(self) -> dict[str, Any]:
        """Profiles."""
        self.profile, figures = measured.profile(self.trial, self.findings)
        return figures

    def plan(self) -> dict[str, Any]:
        """The fastest plan that fits, and the fastest with and without recomputation."""
        profile = self._profile()
        cluster = _one(profile.device)
        figures: dict[str, Any] = {"device_memory_bytes": profile.device.memory_bytes}
        for name, recompute in (("chosen", None), ("kept whole", False), ("recomputing", True)):
            plan = planned(self.trial, profile, cluster, Options(optimizer=self.trial.optimizer, recompute=recompute))
            if isinstance(plan, str):
                self.without[name] = f"no plan fits: {plan}"
            elif any(plan.recompute == other.recompute for other in self.plans.values()):
                self.without[name] = "it is the chosen plan"
            else:
                self.plans[name] = plan
                figures[name] = _described(plan)
        return figures

    def run(self, name: str) -> Callable[[], dict[str, Any]]:
        """The case of one of the plans: predicted, estimated and measured beside each other."""

        def case() -> dict[str, Any]:
            if name not in self.plans:
                raise NotRunError(self.without.get(name, "there is no plan"))
            plan = self.plans[name]
            found = measured.run(self.trial, plan)
            predicted = measured.predicted(self.trial, plan)
            estimate = self._estimate(plan)
            return {"predicted": predicted, "measured": found, "estimated": estimate} | {
                "batch_s_predicted_to_measured": predicted["batch_s"] / found["batch_s"],
                "memory_predicted_to_measured": predicted["memory_bytes"] / found["memory_bytes"],
            }

        return case

    def _estimate(self, plan: Plan) -> dict[str, Any] | None:
        """The prediction of the datasheet alone for a plan like this one."""
        sheet, is_this_device = sheet_for(self.findings)
        if sheet is None:
            return None
        profile = estimated_profile(self.trial, sheet, plan.microbatch_size)
        options = Options(
            optimizer=self.trial.optimizer,
            recompute=plan.recompute,
            microbatch_size=plan.microbatch_size,
            schedule=plan.schedule,
        )
        found = planned(self.trial, profile, _one(profile.device), options)
        if isinstance(found, str):
            return {"datasheet": sheet.name, "fits": False, "why": found}
        figures = measured.predicted(self.trial, found)
        return {"datasheet": sheet.name, "of_this_device": is_this_device} | figures

    def _profile(self) -> Profile:
        if self.profile is None:
            raise NotRunError("there is no profile to plan from")
        return self.profile


def _check(findings: Findings, trial: Trial) -> None:
    study = _Study(trial, findings)
    sheet, _ = sheet_for(findings)
    if sheet is None:
        findings.leave_out("the analytic prediction", "no datasheet of this device is known")
    runs = {f"run, {name}": study.run(name) for name in ("chosen", "kept whole", "recomputing")}
    findings.run({"profile": study.measure, "plan": study.plan} | runs)


def sheet_for(findings: Findings) -> tuple[Datasheet | None, bool]:
    """The datasheet to estimate by, and whether it is this device's; the short form on a CPU takes some GPU's."""
    known = datasheet()
    if known is None and is_short(findings) and device().type == "cpu":
        return DATASHEETS[ESTIMATED_ON_CPU], False
    return known, True


def planned(trial: Trial, profile: Profile, cluster: Cluster, options: Options) -> Plan | str:
    """The fastest plan for one device, or why none fits."""
    problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=trial.batch_size, options=options)
    answer = two_bw(problem)
    return answer if isinstance(answer, Plan) else answer.reasons[0].detail


def _one(only: Device) -> Cluster:
    return Cluster(device=only, levels=(Level(size=1, bandwidth_bytes_per_s=1e9),))


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": plan.schedule,
        "microbatch_size": plan.microbatch_size,
        "microbatches": plan.microbatches,
        "recompute": plan.recompute,
        "samples_per_s": plan.throughput_samples_per_s,
        "memory_bytes": plan.stages[0].memory_bytes,
    }
