"""`python -m benchmarks.truth FILE... [--json] [--fit] [--floor]`: measured iterations beside their predictions.

`--fit` fits the constants to the files' rows first, then once more without each model, and stores what it finds; that
takes a quarter of an hour. Without it the stored constants are used: for a model that they were fitted to, also those
that were fitted without it; other models were not seen by either.

`--floor` prints instead the least errors of any model of the rows that were put together from traces.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.truth.constants import FILE, stored
from benchmarks.truth.counted import count_rows
from benchmarks.truth.fit import fit, without_each
from benchmarks.truth.floor import Floors, print_floors
from benchmarks.truth.report import document, predictions, print_tables
from benchmarks.truth.rows import Row, read_rows
from pipeplan.errors import InvalidInputError


def main() -> int:
    """Prints the tables, or JSON; status 2 and one line for a file without the schema."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fit", action="store_true", help="fit the constants to these files and store them")
    parser.add_argument("--floor", action="store_true", help="print the least errors of rows of traced layers")
    given = parser.parse_args()
    try:
        rows = [row for file in given.files for row in read_rows(file)]
        if given.fit:
            _fit(rows)
        constants, without = stored()
        if given.floor:
            print_floors(Floors([row for row in rows if row.program.trace is not None], constants).found())
            return 0
        found = predictions(rows, constants, without)
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(document(found, constants), indent=1))
    else:
        print_tables(found, constants)
    return 0


def _fit(rows: list[Row]) -> None:
    start, _ = stored()
    found = fit(count_rows(rows), rows, start)
    by_model = {model: each.document() for model, each in without_each(found).items()}
    FILE.write_text(json.dumps({"all": found.constants.document(), "without": by_model}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
