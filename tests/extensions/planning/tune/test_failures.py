"""The reason of a failed trial is the line that says what happened, not the end of a long message."""

from __future__ import annotations

from hasten.extensions.planning.tune.tuning import happened, in_output


def test_an_exception_is_its_kind_and_the_first_line() -> None:
    assert happened(ValueError("\n  two\nlines ")) == "ValueError: two"
    assert happened(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_long_line_ends_with_a_word() -> None:
    words = happened(ValueError("word " * 100))
    assert len(words) < 170
    assert words.endswith("word …")


def test_a_process_without_a_traceback() -> None:
    assert in_output("loading\nSegmentation fault\n\n", 1) == "Segmentation fault"
    assert in_output("", 3) == "exit code 3"
    assert in_output("loading\n", -9) == "killed by SIGKILL"
    assert (
        in_output(
            "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.",
            1,
        )
        == "torch.OutOfMemoryError: CUDA out of memory."
    )
