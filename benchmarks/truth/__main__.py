"""`python -m benchmarks.truth FILE... [--json]`: measured iterations beside their predictions.

Each row is a question to `pipeplan solve`: a model, a named cluster, an engine and its degrees. Nothing is fitted here.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.truth.files import read_rows
from benchmarks.truth.predictions import predictions
from benchmarks.truth.report import document, print_tables
from pipeplan.errors import InvalidInputError


def main() -> int:
    """Prints the tables, or JSON; status 2 and one line for a file without the schema."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        rows = [row for file in given.files for row in read_rows(file)]
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for each in predictions(rows):
        found.append(each)
        print(f"{len(found)} of {len(rows)} rows", end="\r", file=sys.stderr)
    if given.json:
        print(json.dumps(document(found), indent=1, default=str))
    else:
        print_tables(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
