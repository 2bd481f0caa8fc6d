"""Rules of the house that a reader of the source can check: each is a function from a source file to complaints."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import pytest

from tests.support.syntax import lines_of_tokens, nodes, trees

REPOSITORY: Final = Path(__file__).parents[2]
ENVIRONMENT_READER: Final = "src/hasten/runtime/env.py"
LAZY_IMPORTERS: Final = ("src/hasten/lazy.py", "src/hasten/optional.py")
PUBLIC_FOLDERS: Final = frozenset(
    f"src/hasten/{folder}__init__.py"
    for folder in (
        "",
        "data/",
        "modules/",
        "testing/",
        "extensions/bigmodel/",
        "extensions/trainer/",
    )
)
"""The files with a table of public names; test_public_names.py holds their form."""
FORBIDDEN_NAMES: Final = ("util", "utils", "helper", "helpers", "common", "misc")
MUTABLE_MAKERS: Final = frozenset(
    """list dict set bytearray defaultdict OrderedDict Counter deque ChainMap WeakKeyDictionary WeakValueDictionary WeakSet
    ContextVar local Lock RLock Event Condition Semaphore Queue SimpleQueue count cycle iter Random Generator
    SimpleNamespace""".split()  # noqa: SIM905 - a list of thirty quoted words is no easier to read
)
IMMUTABLE_MAKERS: Final = frozenset(
    """MappingProxyType frozenset tuple TypeVar ParamSpec TypeVarTuple NewType compile getLogger get_logger namedtuple
    NamedTuple TypedDict exports Path PurePosixPath cast object Version int float str bool bytes Fraction Extension""".split()  # noqa: SIM905
)
MAX_FILE_TOKENS: Final = 4_600
MAX_BODY_TOKENS: Final = 475
"""Tokens, not lines: 500 and 50 lines before the formatter broke lines at 88 columns."""
LONG_WITH_REASON: Final = frozenset({"src/hasten/accelerator/facade.py"})
"""The one list of all that a training script can ask for; every method delegates, and none can go elsewhere."""
MARK: Final = "TO" + "DO"  # written so that this file does not complain about itself


@dataclass(frozen=True)
class Source:
    """One file of the repository, parsed."""

    path: str
    text: str
    parsed: ast.Module | None = None

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax tree."""
        return self.parsed or ast.parse(self.text, self.path)

    def comment_on(self, line: int) -> str:
        """Return the comment on a line, or on the lines around it, where the formatter or the writer put it, if any."""
        nearby_lines = self.text.splitlines()[max(0, line - 4) : line + 3]
        return "".join(re.findall(r"#\s*(.+)$", "\n".join(nearby_lines), re.MULTILINE))

    def say(self, node: ast.AST, complaint: str) -> str:
        """Return one complaint with its place."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {complaint}"


Rule = Callable[[Source], Iterator[str]]


def read_environment_in_one_place(source: Source) -> Iterator[str]:
    """os.environ and os.getenv belong to the one reader; others are handed what they need."""
    if source.path == ENVIRONMENT_READER:
        return
    for node in nodes(source.tree):
        match node:
            case ast.Attribute(
                value=ast.Name(id="os"),
                attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv",
            ):
                yield source.say(
                    node,
                    f"os.{node.attr} outside runtime/env.py; add a named reader there",
                )
            case ast.ImportFrom(module="os") if {a.name for a in node.names} & {
                "environ",
                "getenv",
                "putenv",
                "environb",
            }:
                yield source.say(
                    node,
                    "imports the environment from os; add a named reader to runtime/env.py",
                )


def keep_no_ambient_state(source: Source) -> Iterator[str]:
    """No module or class holds a value that can change: literals are wrapped, instances are Final, nothing is global."""
    for node in nodes(source.tree):
        match node:
            case ast.Global():
                yield source.say(
                    node, f"global {', '.join(node.names)}; pass the state in"
                )
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from memoised(source, node)
    yield from ambient_assignments(source, source.tree.body, owner="module")


def memoised(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[str]:
    """A cache outlives the call: it needs a reason on its line."""
    for decorator in function.decorator_list:
        name = last_name(
            decorator.func if isinstance(decorator, ast.Call) else decorator
        )
        if name in {"cache", "lru_cache"} and not source.comment_on(decorator.lineno):
            yield source.say(
                decorator,
                f"{name} keeps state for the life of the process; say why on the line",
            )


def ambient_assignments(
    source: Source, body: list[ast.stmt], owner: str
) -> Iterator[str]:
    """Complain about assignments in a module's or class's body that keep something mutable."""
    for node in body:
        match node:
            case ast.Assign(value=value):
                names = [last_name(target) for target in node.targets]
            case ast.AnnAssign(value=ast.expr() as value):
                names = [last_name(node.target)]
            case ast.ClassDef(bases=bases) if "Struct" in {
                last_name(base) for base in bases
            }:
                continue  # msgspec copies the defaults of fields
            case ast.ClassDef():
                yield from ambient_assignments(
                    source, node.body, owner=f"class {node.name}"
                )
                continue
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                blocks = (
                    getattr(node, block_name, [])
                    for block_name in ("body", "orelse", "finalbody")
                )
                for block in blocks:
                    yield from ambient_assignments(source, block, owner)
                continue
            case _:
                continue
        if all(name.startswith("__") and name.endswith("__") for name in names):
            continue  # __all__, __slots__, __match_args__: read by Python itself
        if problem := mutability(
            value,
            is_final="Final" in annotation_of(node),
            in_class=owner.startswith("class "),
        ):
            yield source.say(node, f"{owner} keeps {', '.join(names)} = {problem}")


def mutability(value: ast.expr, *, is_final: bool, in_class: bool) -> str:
    """Return what is mutable about a value, or nothing."""
    match value:
        case (
            ast.List()
            | ast.Dict()
            | ast.Set()
            | ast.ListComp()
            | ast.DictComp()
            | ast.SetComp()
            | ast.GeneratorExp()
        ):
            kind = type(value).__name__.removesuffix("Comp").lower()
            return f"a mutable {kind}; use a tuple, frozenset or MappingProxyType"
        case ast.Tuple(elts=members):
            return next(
                (
                    p
                    for member in members
                    if (p := mutability(member, is_final=is_final, in_class=in_class))
                ),
                "",
            )
        case ast.Call(func=made_by):
            maker = last_name(made_by)
            if maker in MUTABLE_MAKERS:
                return f"{maker}(...), which can change; pass it in"
            if in_class or is_final or maker in IMMUTABLE_MAKERS:
                return ""  # class bodies call field(), property() and the like
            return f"an instance made by {maker}(); annotate it Final if it cannot change, else pass it in"
        case _:
            return ""


def annotation_of(node: ast.stmt) -> str:
    """Return the annotation of an assignment as text."""
    return ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""


def last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c`, `a.b.c[...]` and `c`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner):
            return last_name(inner)
        case _:
            return ast.unparse(node)


def catch_narrowly(source: Source) -> Iterator[str]:
    """A handler for everything says on its line why that is right, unless it passes everything on."""
    broad = {"Exception", "BaseException"}
    for node in nodes(source.tree):
        match node:
            case ast.ExceptHandler(body=[*_, ast.Raise(exc=None)]):
                continue  # cleans up and lets the error go on
            case ast.ExceptHandler(type=None):
                yield source.say(node, "bare except; name the types")
            case ast.ExceptHandler(type=ast.expr() as kind):
                caught = {
                    last_name(k)
                    for k in (kind.elts if isinstance(kind, ast.Tuple) else [kind])
                }
                if caught & broad and not source.comment_on(node.lineno):
                    yield source.say(
                        node,
                        f"except {' | '.join(sorted(caught))} without a reason on the line",
                    )
            case ast.Call(func=func, args=args) if last_name(
                func
            ) == "suppress" and broad & {last_name(a) for a in args}:
                if not source.comment_on(node.lineno):
                    yield source.say(
                        node, "suppress(Exception) without a reason on the line"
                    )


def number_what_is_left_to_do(source: Source) -> Iterator[str]:
    """A note about work to do names its issue."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if (
            re.search(rf"\b({MARK}|FIXME|XXX)\b(?!\s*\(?#\d+)", line)
            and "MARK" not in line
            and "FIXME|" not in line
        ):
            yield f"{source.path}:{number}: {MARK} without an issue number; write {MARK}(#12)"


def begin_with_a_docstring(source: Source) -> Iterator[str]:
    """Every file that holds anything says on its first line what."""
    if not source.text.strip():
        return
    first = (ast.get_docstring(source.tree) or "").split("\n")[0].strip()
    if not first or not source.text.lstrip().startswith(('"""', "#!", 'r"""')):
        yield f"{source.path}:1: no docstring on the first line"


def import_at_the_top(source: Source) -> Iterator[str]:
    """Optional packages come through optional.need; a late import of a module of hasten says why on its line."""
    for function in nodes(source.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(
                node, ast.Import | ast.ImportFrom
            ) and not imports_hasten_late(source, node):
                yield source.say(
                    node,
                    f"`{ast.unparse(node)}` inside {function.name}(); use optional.need or the top",
                )
            elif isinstance(node, ast.Call) and imports_silently(source, node):
                yield source.say(
                    node,
                    f"{last_name(node.func)} without a reason on the line; use optional.need",
                )


def imports_hasten_late(source: Source, node: ast.Import | ast.ImportFrom) -> bool:
    """Say whether a late import is of a module of hasten, with a reason on its line."""
    module = (
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
    )
    return module.startswith("hasten.") and bool(source.comment_on(node.lineno))


def imports_silently(source: Source, call: ast.Call) -> bool:
    """Say whether a call imports a module by name, outside the two lazy files, without a reason on its line."""
    if (
        last_name(call.func) not in {"import_module", "__import__"}
        or source.path in LAZY_IMPORTERS
    ):
        return False
    return not source.comment_on(call.lineno)


def name_what_it_is(source: Source) -> Iterator[str]:
    """No file or folder is called after nothing."""
    for name in Path(source.path).with_suffix("").parts:
        if set(name.split("_")) & set(FORBIDDEN_NAMES):
            yield f"{source.path}:1: {name!r} says nothing about what is inside"


def keep_inner_packages_empty(source: Source) -> Iterator[str]:
    """A folder's __init__ holds a docstring that says where to start, and nothing else; public folders add their table."""
    if not source.path.endswith("/__init__.py") or source.path in PUBLIC_FOLDERS:
        return
    if len(source.tree.body) > 1 or not ast.get_docstring(source.tree):
        yield f"{source.path}:1: holds more or less than a docstring; public names go to a public module"


def do_no_work_at_import(source: Source) -> Iterator[str]:
    """Importing probes nothing, registers nothing and sets nothing up: no bare calls at module level."""
    for node in source.tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield source.say(node, f"work at import: {ast.unparse(node.value)[:60]}")


def give_reasons_for_late_imports(source: Source) -> Iterator[str]:
    """An import inside a function says on its line why it is not at the top."""
    for function in nodes(source.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom) and not source.comment_on(
                node.lineno
            ):
                yield source.say(
                    node,
                    f"`{ast.unparse(node)}` inside {function.name}() without a reason on the line",
                )


def run_last(source: Source) -> Iterator[str]:
    """A file that is also a program runs after all of its definitions."""
    for node in source.tree.body[:-1]:
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "__name__ == '__main__'"
        ):
            yield source.say(
                node,
                "runs before what is defined below it; move it to the end of the file",
            )


def stay_short(source: Source) -> Iterator[str]:
    """A file has at most 4,600 tokens, a function's body at most 475."""
    token_lines = lines_of_tokens(source.text)
    if len(token_lines) > MAX_FILE_TOKENS and source.path not in LONG_WITH_REASON:
        yield f"{source.path}:1: {len(token_lines)} tokens; split it by purpose"
    for node in nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first_line, last_line = node.body[0].lineno, node.end_lineno or 0
            body_size = sum(first_line <= line <= last_line for line in token_lines)
            if body_size > MAX_BODY_TOKENS:
                yield source.say(
                    node, f"{node.name}() has {body_size} tokens; split it"
                )


LIBRARY_RULES: Final[tuple[Rule, ...]] = (
    read_environment_in_one_place,
    keep_no_ambient_state,
    catch_narrowly,
    number_what_is_left_to_do,
    begin_with_a_docstring,
    import_at_the_top,
    name_what_it_is,
    keep_inner_packages_empty,
    do_no_work_at_import,
    run_last,
    stay_short,
)
DROPIN_RULES: Final[tuple[Rule, ...]] = (
    catch_narrowly,
    number_what_is_left_to_do,
    begin_with_a_docstring,
    give_reasons_for_late_imports,
    stay_short,
)
EVERYWHERE_RULES: Final[tuple[Rule, ...]] = (
    number_what_is_left_to_do,
    begin_with_a_docstring,
    run_last,
)


@cache  # the files do not change while their rules are checked
def sources(*folders: str) -> tuple[Source, ...]:
    """Return the Python files under folders of the repository."""
    files = (pair for folder in folders for pair in trees(REPOSITORY / folder).items())
    return tuple(
        Source(file.relative_to(REPOSITORY).as_posix(), file.read_text("utf-8"), tree)
        for file, tree in files
    )


@pytest.mark.parametrize("rule", LIBRARY_RULES, ids=lambda rule: rule.__name__)
def test_library_obeys(rule: Rule) -> None:
    complaints = [
        complaint for source in sources("src/hasten") for complaint in rule(source)
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


@pytest.mark.parametrize("rule", DROPIN_RULES, ids=lambda rule: rule.__name__)
def test_dropin_obeys(rule: Rule) -> None:
    complaints = [
        complaint
        for source in sources("dropin/src/accelerate")
        for complaint in rule(source)
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


@pytest.mark.parametrize("rule", EVERYWHERE_RULES, ids=lambda rule: rule.__name__)
def test_tests_and_examples_obey(rule: Rule) -> None:
    complaints = [
        complaint
        for source in sources("tests", "examples", "benchmarks")
        for complaint in rule(source)
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


DOC: Final = '"""Doc."""\n'
BAD: Final[tuple[tuple[Rule, str], ...]] = (
    (read_environment_in_one_place, "import os\nx = os.environ['A']"),
    (read_environment_in_one_place, "import os\ndef f(): return os.getenv('A')"),
    (read_environment_in_one_place, "from os import environ"),
    (keep_no_ambient_state, "cache = {}"),
    (keep_no_ambient_state, "CACHE: Final = {}"),
    (keep_no_ambient_state, "CACHE: Final = [x for x in 'abc']"),
    (keep_no_ambient_state, "PAIRS: Final = (1, [2])"),
    (keep_no_ambient_state, "state = State()"),
    (keep_no_ambient_state, "LOCK: Final = threading.Lock()"),
    (keep_no_ambient_state, "if x:\n    seen = set()"),
    (keep_no_ambient_state, "class A:\n    seen = []"),
    (keep_no_ambient_state, "def f():\n    global x"),
    (keep_no_ambient_state, "@functools.cache\ndef f(): ..."),
    (catch_narrowly, "try: ...\nexcept: ..."),
    (catch_narrowly, "try: ...\nexcept Exception: ..."),
    (catch_narrowly, "try: ...\nexcept (ValueError, BaseException): ..."),
    (catch_narrowly, "with contextlib.suppress(Exception): ..."),
    (number_what_is_left_to_do, f"# {MARK}: later"),
    (begin_with_a_docstring, "x = 1"),
    (import_at_the_top, "def f():\n    import deepspeed"),
    (import_at_the_top, "def f():\n    m = importlib.import_module('x')"),
    (do_no_work_at_import, "setup_logging()"),
    (run_last, "if __name__ == '__main__': f()\ndef f(): ..."),
    (
        give_reasons_for_late_imports,
        "def f():\n    x = 1\n    from deepspeed import ops\n    return ops",
    ),
    (stay_short, "x\n" * 4_601),
    (stay_short, "def f():\n" + "    x = 1\n" * 160),
)
GOOD: Final[tuple[tuple[Rule, str], ...]] = (
    (keep_no_ambient_state, "TABLE: Final = MappingProxyType({'a': 1})"),
    (keep_no_ambient_state, "NAMES = ('a', 'b')"),
    (keep_no_ambient_state, "UNSET: Final = Unset()"),
    (keep_no_ambient_state, "log = logging.getLogger(__name__)"),
    (
        keep_no_ambient_state,
        "class A:\n    seen: list[int] = field(default_factory=list)",
    ),
    (
        keep_no_ambient_state,
        "class A(msgspec.Struct, frozen=True):\n    seen: dict[str, int] = {}",
    ),
    (
        keep_no_ambient_state,
        "@functools.cache  # pure: the host does not change while we run\ndef f(): ...",
    ),
    (keep_no_ambient_state, "def f():\n    seen = []"),
    (
        catch_narrowly,
        "try: ...\nexcept Exception:  # the tracker's failure must not stop training\n    ...",
    ),
    (catch_narrowly, "try: ...\nexcept BaseException:\n    undo()\n    raise"),
    (number_what_is_left_to_do, f"# {MARK}(#12): later"),
    (import_at_the_top, "if TYPE_CHECKING:\n    import torch"),
    (
        give_reasons_for_late_imports,
        "def f():\n    import deepspeed  # an optional package",
    ),
    (stay_short, "def f():\n" + "    x = 1\n" * 155),
)


@pytest.mark.parametrize(
    ("rule", "text"), BAD, ids=lambda x: getattr(x, "__name__", None)
)
def test_rule_complains(rule: Rule, text: str) -> None:
    doc = "" if rule is begin_with_a_docstring else DOC
    assert list(rule(Source("src/hasten/room/file.py", doc + text)))


@pytest.mark.parametrize(
    ("rule", "text"), GOOD, ids=lambda x: getattr(x, "__name__", None)
)
def test_rule_is_content(rule: Rule, text: str) -> None:
    assert not list(rule(Source("src/hasten/room/file.py", DOC + text)))


@pytest.mark.parametrize(
    "path",
    ["src/hasten/utils.py", "src/hasten/data/helpers/x.py", "src/hasten/data_utils.py"],
)
def test_empty_names_are_refused(path: str) -> None:
    assert list(name_what_it_is(Source(path, DOC)))
