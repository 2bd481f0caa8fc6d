"""The bootstrap of a process: the program sees plain Python, and its failure is written down, not printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.runtime.launcher_files import ERROR_FILE


def run_bootstrap(
    tmp_path: Path, words: list[str], **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the bootstrap as the launcher would."""
    command = [sys.executable, "-m", "hasten.launch.worker", *words]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


PROBE = """
import sys, json, pickle, multiprocessing
class Thing: pass
def child(queue): queue.put(Thing.__module__)
if __name__ == "__main__":
    import neighbour
    print(json.dumps({"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "doc": __doc__,
        "names": sorted(n for n in globals() if not n.startswith("__")), "main": sys.modules["__main__"].Thing is Thing,
        "pickled": type(pickle.loads(pickle.dumps(Thing()))).__name__, "torch": "torch" in sys.modules}))
"""


def test_a_script_sees_what_plain_python_shows(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "neighbour.py").write_text("")
    launched = run_bootstrap(tmp_path, ["code/probe.py", "--lr", "3"])
    plain = subprocess.run(
        [sys.executable, "code/probe.py", "--lr", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launched.returncode == 0, launched.stderr
    launched_view, plain_view = json.loads(launched.stdout), json.loads(plain.stdout)
    assert launched_view == plain_view
    assert not launched_view["torch"]


def test_a_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/mod.py").write_text(
        "import sys; print(__name__, __package__, sys.argv[1:])"
    )
    assert (
        run_bootstrap(tmp_path, ["-m", "pkg.mod", "a"]).stdout == "__main__ pkg ['a']\n"
    )


def test_spawned_children_find_the_script(tmp_path: Path) -> None:
    script = (
        "import multiprocessing as mp\n"
        "def work(x): return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(work, [1, 2]))\n"
    )
    (tmp_path / "pool.py").write_text(script)
    completed = run_bootstrap(tmp_path, ["pool.py"])
    assert completed.stdout == "[2, 3]\n", completed.stderr


def test_an_exception_is_written_and_not_printed(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def inner():\n    raise ValueError('boom')\ninner()\n"
    )
    completed = run_bootstrap(
        tmp_path, ["bad.py"], **{ERROR_FILE: str(tmp_path / "deep/error.json")}
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (1, "", "")
    written = json.loads((tmp_path / "deep/error.json").read_text())
    trace = written["hasten"]["traceback"].splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    # nothing of ours before it
    assert trace[1] == f'  File "{tmp_path}/bad.py", line 3, in <module>'
    assert trace[-1] == "ValueError: boom"
    # torch's own form
    assert (
        written["message"]["extraInfo"]["py_callstack"]
        == written["hasten"]["traceback"]
    )
    assert written["hasten"]["summary"] == "ValueError: boom"


def test_without_an_error_file_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('boom')")
    plain = subprocess.run(
        [sys.executable, "bad.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run_bootstrap(tmp_path, ["bad.py"]).stderr == plain.stderr


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [("3", 3, ""), ("'no data'", 1, "no data\n"), ("None", 0, "")],
)
def test_exit_codes_pass_through(
    tmp_path: Path, code: str, status: int, words: str
) -> None:
    (tmp_path / "leave.py").write_text(f"import sys; sys.exit({code})")
    completed = run_bootstrap(
        tmp_path, ["leave.py"], **{ERROR_FILE: str(tmp_path / "error.json")}
    )
    assert (completed.returncode, completed.stderr) == (status, words)


def test_huge_tracebacks_are_cut_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('x' * 200_000 + 'end')")
    run_bootstrap(tmp_path, ["bad.py"], **{ERROR_FILE: str(tmp_path / "error.json")})
    trace = json.loads((tmp_path / "error.json").read_text())["hasten"]["traceback"]
    assert len(trace) < 61_000
    assert trace.endswith("end\n")


@pytest.mark.parametrize(
    ("text", "last"),
    [("x = 1\ndef f(:\n", "SyntaxError: invalid syntax"), ("\0", "in {}/bad.py")],
)
def test_a_script_that_is_no_python_shows_none_of_our_frames(
    tmp_path: Path, text: str, last: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    for words in (["bad.py"], ["-m", "bad"])[: 2 if "x" in text else 1]:
        run_bootstrap(tmp_path, words, **{ERROR_FILE: str(tmp_path / "error.json")})
        trace = json.loads((tmp_path / "error.json").read_text())["hasten"][
            "traceback"
        ].rstrip()
        assert "hasten" not in trace
        assert "frozen" not in trace
        assert trace.splitlines()[-1] == last.format(tmp_path)
    plain = subprocess.run(
        [sys.executable, "bad.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "x" in text:
        assert run_bootstrap(tmp_path, ["bad.py"]).stderr == plain.stderr


def test_what_a_program_of_ours_refuses_is_told_without_frames(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def boom(rows):\n    return rows[0]['missing']\n")
    for name, rows in (("ok.jsonl", '{"n": 1}\n'), ("bad.jsonl", '{"n": 1}\n{bad\n')):
        (tmp_path / name).write_text(rows)
        words = [
            "-m",
            "hasten.extensions.predict.program",
            "own:boom",
            name,
            "out.jsonl",
            "2",
        ]
        run_bootstrap(tmp_path, words, **{ERROR_FILE: str(tmp_path / f"{name}.error")})
    refused, raised = (
        json.loads((tmp_path / f"{name}.error").read_text())["hasten"]["traceback"]
        for name in ("bad.jsonl", "ok.jsonl")
    )
    assert refused.startswith(
        "hasten.errors.DataError: bad.jsonl, line 2 is no JSON object"
    )
    assert len(refused.splitlines()) == 1
    assert raised.splitlines()[1] == f'  File "{tmp_path}/own.py", line 2, in boom'
