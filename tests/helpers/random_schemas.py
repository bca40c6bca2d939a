"""Random types whose JSON schemas pydantic writes, and by which it checks what was written."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, Union

from hypothesis import strategies as st
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

LEAVES: list[Any] = [
    Annotated[int, Field(ge=-5, le=200)],
    bool,
    None,
    Annotated[str, Field(max_length=8)],
    Annotated[str, Field(pattern="^[a-z]{1,3}-[0-9]{2}$")],
    Literal["red", "green", 3, None],
    Literal["one"],
]


def record(fields: dict[str, Any]) -> Any:
    """An object of the first of these fields, and maybe others of them."""
    first = next(iter(fields))
    kind = TypedDict("kind", {first: Required[fields[first]], **fields}, total=False)  # type: ignore[misc]
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return kind


NAMES = st.sampled_from(["a", "long name", 'quote"d', "ä"])
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda children: st.one_of(
        st.dictionaries(NAMES, children, min_size=1, max_size=3).map(record),
        children.map(lambda item: Annotated[list[item], Field(max_length=2)]),  # type: ignore[valid-type]
        st.tuples(children, children).map(lambda each: Union[each]),  # noqa: UP007
    ),
    max_leaves=5,
)
RECORDS = st.dictionaries(NAMES, TYPES, min_size=1, max_size=3).map(record)
