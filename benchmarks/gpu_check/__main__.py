"""`python -m benchmarks.gpu_check [--seconds S] [--out FILE] [--only PART...] [--part MODULE:FUNCTION] [--short]`."""

import argparse
from pathlib import Path

from benchmarks.gpu_check.session import PARTS, WITHIN_S, Part, run


def main() -> None:
    """Runs the check. Exit status 0: everything that ran passed; 1: something failed, or was cut off."""
    arguments = _arguments()
    parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    weight = sum(part.weight for part in parts) or 1.0
    parts += [Part(name=target, target=target, weight=weight / len(parts or [1])) for target in arguments.part]
    document = run(parts, seconds=arguments.seconds, out=arguments.out, short=arguments.short)
    print(f"{'passed' if document['passed'] else 'FAILED'}; all figures: {arguments.out}", flush=True)
    raise SystemExit(0 if document["passed"] else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Everything that a GPU shows.")
    parser.add_argument("--seconds", type=_positive, default=WITHIN_S, help="the time for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the file with everything found")
    parser.add_argument("--only", nargs="*", choices=[p.name for p in PARTS], help="these parts alone")
    parser.add_argument("--part", action="append", default=[], metavar="MODULE:FUNCTION", help="one more part")
    parser.add_argument("--short", action="store_true", help="the short form, on a GPU as well")
    return parser.parse_args()


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return seconds


if __name__ == "__main__":
    main()
