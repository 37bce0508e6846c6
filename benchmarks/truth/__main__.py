"""`python -m benchmarks.truth FILE... [--json]`: measured iterations beside their predictions.

Kernels and links are those of the datasheets and named clusters, what an engine's host needs is the engine's: nothing
is fitted here.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.truth.report import document, predictions, print_tables
from benchmarks.truth.rows import read_rows
from pipeplan.errors import InvalidInputError


def main() -> int:
    """Prints the tables, or JSON; status 2 and one line for a file without the schema."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        found = predictions([row for file in given.files for row in read_rows(file)])
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(document(found), indent=1))
    else:
        print_tables(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
