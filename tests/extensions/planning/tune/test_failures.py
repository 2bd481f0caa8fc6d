"""The reason of a failed trial is the line that says what happened, not the end of a long message."""

from __future__ import annotations

import pytest

from hasten.extensions.planning.tune.tuning import happened, in_output

OVERWRITTEN = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. Stack trace: File "
    '"train.py", line 12, in forward\n    return self.head(x). To prevent overwriting, clone the tensor outside of '
    "torch.compile() or call torch.compiler.cudagraph_mark_step_begin() before each model invocation."
)
SAID = "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    float(loss)
RuntimeError: {OVERWRITTEN}
[rank0]: warning: something at the end
"""


def test_an_exception_is_its_kind_and_the_first_line() -> None:
    assert happened(RuntimeError(OVERWRITTEN)) == SAID
    assert happened(ValueError("\n  two\nlines ")) == "ValueError: two"
    assert happened(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_long_line_ends_with_a_sentence_or_a_word() -> None:
    full = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB"
        + " of which" * 20
    )
    assert (
        happened(MemoryError(full))
        == "MemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    words = happened(ValueError("word " * 100))
    assert len(words) < 170
    assert words.endswith("word …")


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "[1] "])
def test_the_last_traceback_of_a_process_says_why_it_ended(prefix: str) -> None:
    assert (
        in_output("\n".join(prefix + line for line in TRACEBACK.splitlines()), 1)
        == SAID
    )


def test_a_process_without_a_traceback() -> None:
    assert in_output("loading\nSegmentation fault\n\n", 1) == "Segmentation fault"
    assert in_output("", 3) == "exit code 3"
    assert in_output("loading\n", -9) == "killed by SIGKILL"
    assert (
        in_output(
            "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.",
            1,
        )
        == "OutOfMemoryError: CUDA out of memory."
    )
