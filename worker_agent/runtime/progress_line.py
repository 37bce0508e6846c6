"""Progress line: how far a run is, in words of one line."""

from worker_agent.runtime.watch import RunProgress

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe(progress: RunProgress) -> str:
    """`step 120 of 1000, loss 0.1234, 512 samples/s, bubble 12 %, memory 1.2 GiB (rank 0), 0:03:12 left`."""
    left = "" if progress.left_s is None else f", {_duration(progress.left_s)} left"
    return f"step {progress.done} of {progress.steps}, {describe_pace(progress)}{left}"


def describe_pace(progress: RunProgress) -> str:
    """The same without step and time: what is known of them of loss, samples a second, bubble, and memory."""
    words = [f"loss {progress.loss:.4f}"]
    if progress.samples_per_s is not None:
        words.append(f"{_amount(progress.samples_per_s)} samples/s")
    if progress.bubble_fraction is not None:
        words.append(f"bubble {100 * progress.bubble_fraction:.0f} %")
    if progress.peak_memory_bytes:
        words.append(f"memory {_bytes(progress.peak_memory_bytes)} (rank {progress.memory_rank})")
    return ", ".join(words)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float) -> str:
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.3g} {_UNITS[-1]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
