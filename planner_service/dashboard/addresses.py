"""Addresses: the page that is shown, and those beside it: sorted otherwise, filtered otherwise, a page on or back."""

from dataclasses import dataclass
from urllib.parse import urlencode

from fastapi import Request

SEPARATOR = "~"
"""Between the cursors of the pages before; no cursor holds it."""

MOST_BACK = 12
"""So many pages back are remembered in an address; the first page can always be gone to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A path, and the parameters that are not empty, in their order."""

    path: str
    parameters: tuple[tuple[str, str], ...]

    def value(self, name: str) -> str:
        """A parameter; empty where it is not given."""
        return dict(self.parameters).get(name, "")

    def changed(self, **changes: str | None) -> str:
        """The same list from its beginning, with other parameters (None: without one)."""
        return self._with(changes | {"cursor": None, "back": None})

    def ordered(self, name: str) -> str:
        """The list sorted by this name, from the most down; from the least up where it was so already."""
        return self.changed(sort=name if self.value("sort") == f"-{name}" else f"-{name}")

    def following(self, cursor: str) -> str:
        """The page that starts at the cursor; it remembers this one."""
        back = [*self._back(), self.value("cursor")][-MOST_BACK:]
        return self._with({"cursor": cursor, "back": SEPARATOR.join(back)}, keep_empty=("back",))

    @property
    def previous(self) -> str | None:
        """The page before; None on the first, and where it is forgotten."""
        before = self._back()
        if not self.value("cursor") or not before:
            return None
        kept = {"back": SEPARATOR.join(before[:-1])} if len(before) > 1 else {"back": None}
        return self._with({"cursor": before[-1] or None, **kept}, keep_empty=("back",) if len(before) > 1 else ())

    def _back(self) -> list[str]:
        given = dict(self.parameters)
        return given["back"].split(SEPARATOR) if "back" in given else []

    def _with(self, changes: dict[str, str | None], *, keep_empty: tuple[str, ...] = ()) -> str:
        kept = [(name, value) for name, value in self.parameters if name not in changes]
        added = [(n, v) for n, v in changes.items() if v is not None and (v or n in keep_empty)]
        return self.path + (f"?{urlencode(kept + added)}" if kept or added else "")


def address_of(request: Request) -> Address:
    """The address that is asked for. Forms send what was left empty too: it says nothing."""
    given = request.query_params.multi_items()
    return Address(
        path=request.url.path, parameters=tuple((name, value) for name, value in given if value or name == "back")
    )
