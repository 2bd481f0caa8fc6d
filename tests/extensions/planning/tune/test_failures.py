"""The reason of a failed trial is the line that says what happened, not the end of a long message."""

from __future__ import annotations

from hasten.extensions.planning.tune.tuning import describe_error, describe_exit


def test_an_exception_is_its_kind_and_the_first_line() -> None:
    assert describe_error(ValueError("\n  two\nlines ")) == "ValueError: two"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_long_line_ends_with_a_word() -> None:
    words = describe_error(ValueError("word " * 100))
    assert len(words) < 170
    assert words.endswith("word …")


def test_a_process_without_a_traceback() -> None:
    assert describe_exit("loading\nSegmentation fault\n\n", 1) == "Segmentation fault"
    assert describe_exit("", 3) == "exit code 3"
    assert describe_exit("loading\n", -9) == "killed by SIGKILL"
    assert (
        describe_exit(
            "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.",
            1,
        )
        == "torch.OutOfMemoryError: CUDA out of memory."
    )
