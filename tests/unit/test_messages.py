"""Messages end once, also those that embed a sentence of somebody else."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator

import pytest

from hasten import errors
from hasten.errors import HastenError, HastenWarning, ended_once


def tree(kind: type[HastenError]) -> Iterator[type[HastenError]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from tree(inner)


OUR_ERRORS = sorted(
    (kind for kind in tree(HastenError) if kind.__module__ == errors.__name__),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", OUR_ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("no such file", "cannot read x: no such file. Nothing was loaded."),
        ("It failed.", "cannot read x: It failed. Nothing was loaded."),
        ("It failed!", "cannot read x: It failed! Nothing was loaded."),
        ("It failed.\n", "cannot read x: It failed. Nothing was loaded."),
        ("a\nb.\n ", "cannot read x: a\nb. Nothing was loaded."),
        ("text\n", "cannot read x: text. Nothing was loaded."),
    ],
)
def test_every_error_of_the_tree_ends_its_sentences_once(
    kind: type[HastenError], inner: str, expected: str
) -> None:
    error = kind(f"cannot read x: {inner}. Nothing was loaded.")
    assert str(error) == expected
    assert str(pickle.loads(pickle.dumps(error))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "the file '../x' leads to '..', outside.",
        "wait ... and see ...",
        "run `pip install .` in the folder; or cd .. and look.",
        "shapes (3, ...) differ. Set dim=1, e.g. there.",
        "path /a/b/.. is outside.",
        "version 2.13.; no",
        "",
    ],
)
def test_what_only_looks_doubled_stays(text: str) -> None:
    assert ended_once(text) == text.replace("13.;", "13;")


def test_an_error_inside_an_error_inside_a_warning() -> None:
    inner = errors.CheckpointError("it is gone. Load another.")
    outer = errors.LaunchError(f"rank 1: {inner}; the job was ended. {inner}.")
    assert (
        str(outer)
        == "rank 1: it is gone. Load another; the job was ended. it is gone. Load another."
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(
            f"resumed without it: {inner}. Look there.", HastenWarning, stacklevel=1
        )
    assert str(caught[0].message).endswith("Load another. Look there.")
