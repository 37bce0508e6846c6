"""What our processes write for each other is read back as it was, and nothing else is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.records import read_record
from pipeplan.errors import InvalidInputError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A count that must not be 0."""

    count: int

    def __post_init__(self) -> None:
        require(self.count != 0, "count", "must not be 0", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A field of every kind."""

    text: str = "text"
    truth: bool = True
    amount: float = 0.5
    inner: Inner = Inner(count=1)
    choice: Literal["one", "two"] = "one"
    maybe: int | None = None
    many: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "one")
    inners: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A field without a default."""

    needed: int


def test_a_record_comes_back_as_it_was() -> None:
    record = Outer(
        amount=2,
        choice="two",
        maybe=3,
        many=(1.5, 2.0, 1e300),
        texts=("a", "\u0000"),
        inners=(Inner(count=5),),
        by_name={"x": Inner(count=-1)},
    )
    assert read_record(Outer, canonical_json(record)) == record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "document: must be a JSON document"),
        ("[" * 100_000, "document: must be a JSON document"),
        ("[]", "document: must be an object"),
        ('{"other": 1}', "other: is not a known key, got 1"),
        ('{"text": 1}', "text: must be a text, got 1"),
        ('{"truth": 1}', "truth: must be true or false, got 1"),
        ('{"amount": "1"}', "amount: must be a number, got '1'"),
        ('{"amount": true}', "amount: must be a number, got True"),
        ('{"amount": NaN}', "document: must hold finite numbers, got 'NaN'"),
        ('{"amount": 1e999}', "amount: must be finite, got inf"),
        ('{"amount": 1' + 400 * "0" + "}", "amount: must be finite"),
        ('{"maybe": 1.5}', "maybe: must be a whole number, got 1.5"),
        ('{"maybe": true}', "maybe: must be a whole number, got True"),
        ('{"choice": "three"}', "choice: must be one of one, two, got 'three'"),
        ('{"choice": [1]}', r"choice: must be one of one, two, got \[1\]"),
        ('{"many": 1}', "many: must be a list, got 1"),
        ('{"many": [1, "2"]}', "many.1: must be a number, got '2'"),
        ('{"many": [1, 1e999]}', "many.1: must be finite, got inf"),
        ('{"texts": ["a", null]}', "texts.1: must be a text, got None"),
        ('{"pair": [1]}', "pair: must have 2 items"),
        ('{"pair": [1, 1]}', "pair.1: must be a text, got 1"),
        ('{"inners": [{"count": 1}, {"count": 0}]}', "inners.1.count: must not be 0, got 0"),
        ('{"inners": [{}]}', "inners.0.count: is required"),
        ('{"by_name": {"x": {"count": "1"}}}', "by_name.x.count: must be a whole number, got '1'"),
        ('{"by_name": []}', "by_name: must be an object"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_record(Outer, text)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InvalidInputError, match="needed: is required"):
        read_record(Needed, "{}")
