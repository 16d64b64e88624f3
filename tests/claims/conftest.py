"""What the tests of claims share: a look into the tables of their lines."""

import pytest

from wellcond.claims.claim import TableRow


@pytest.fixture(scope="session")
def cells():
    """`cells(lines)` are those of the main table, by row and column; `cells(lines, "title")` those of a folded one.
    Empty ones are left out, as on the page."""

    def of(lines, table=""):
        rows = [line for line in lines if isinstance(line, TableRow) and line.table == table]
        found = {row.what: {column: cell for column, cell in row.cells.items() if cell} for row in rows}
        assert len(found) == len(rows)  # no two rows are called the same
        return found

    return of
