"""Entries from each source, by equality: paths, values, sources and marks; and the limits of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TrustSettings,
)
from hasten.config.checks import Problems, nearest_name
from hasten.config.files import read_text
from hasten.config.resolve import (
    argument_names,
    first_names,
    from_code,
    from_environment,
    from_tree,
    spelled_in_code,
    unknown_argument,
    unknown_setting,
)
from hasten.config.sections.loop import (
    AORecipeKwargs,
    AutocastKwargs,
    TERecipeKwargs,
)
from hasten.config.source import Marked, SettingEntry, SettingSource
from hasten.errors import (
    ConfigError,
    ContradictionError,
    HastenWarning,
    SettingValueError,
    UnknownSettingError,
)

NO_EFFECT = "which would have no effect"


# -- problems ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 49, 50, 51, 53])
def test_problems_are_told_in_the_order_of_lines_up_to_fifty(count: int) -> None:
    problems = Problems()
    for number in range(count, 0, -1):
        assert problems.worth_a_hint is (count - number < 50)
        problems.add(ConfigError(f"c.yaml:{number}: wrong"))
    problems.add(ConfigError("of no line: 7: first"))
    with pytest.raises(ConfigError) as caught:
        problems.settle()
    head, *lines = str(caught.value).split("\n")
    assert head == f"{count + 1} settings are wrong:"
    expected = [
        "of no line: 7: first",
        *(f"c.yaml:{n}: wrong" for n in range(1, count + 1)),
    ]
    shown = [f"  {n}. {text}" for n, text in enumerate(expected[:50], 1)]
    num_hidden = count + 1 - 50
    if num_hidden > 0:
        shown.append(f"  … and {num_hidden} more")
    assert lines == shown
    assert [str(problem) for problem in caught.value.problems] == expected


def raise_error(error: Exception) -> None:
    raise error


def test_one_problem_is_raised_as_itself_and_several_are_taken_apart() -> None:
    Problems().settle()
    problems = Problems()
    with problems.catching():
        raise_error(SettingValueError("the only one"))
    with pytest.raises(SettingValueError, match=r"^the only one$"):
        problems.settle()
    inner = (ConfigError("a"), ConfigError("b"))
    problems.add(ConfigError("both", problems=inner))
    assert problems.found[1:] == list(inner)
    with pytest.raises(KeyError), problems.catching():
        raise_error(KeyError())


# -- hints ---------------------------------------------------------------------------------------------------------
def test_names_are_near_or_few() -> None:
    assert nearest_name("Tp_Sze", ["tp_size", "pp_size", "other"]) == "tp_size"
    assert nearest_name("qqq", ["tp_size"]) == ""
    assert first_names(["a"]) == "a"
    assert first_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert (
        first_names(["a", "b", "c", "d", "e"]) == "a, b, c, d, … (see docs/config.md)"
    )


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (("fsdp", "cpu_ofload"), "did you mean 'fsdp.cpu_offload'?"),
        (("mixed_precison",), "did you mean 'mixed_precision'?"),
        # of another section, by its name or by its flag
        (("fsdp", "num_processes"), "it belongs under 'launch.num_processes'."),
        (("fsdp", "trust_numbers_spike"), "it belongs under 'trust.numbers_spike'."),
        # similar to one of another section
        (("parallelism", "num_procesess"), "did you mean 'launch.num_processes'?"),
        (("num_procesess",), "did you mean 'launch.num_processes'?"),
        (("fsdp", "qqqqq"), "known here are "),
    ],
)
def test_an_unknown_setting_names_the_one_that_is_meant(
    path: tuple[str, ...], hint: str
) -> None:
    text = str(unknown_setting("c.yaml:3", path))
    name = ".".join(path)
    assert text.startswith(f"c.yaml:3: unknown setting '{name}', {NO_EFFECT}; {hint}")


def test_arguments_are_sections_settings_and_handlers() -> None:
    names = argument_names()
    assert {"fsdp_plugin", "mixed_precision", "kwargs_handlers", "log_with"} <= set(
        names
    )
    assert not {"fsdp", "launch"} & set(names)
    assert len(names) == len(set(names))
    assert str(unknown_argument("mixed_precison")).endswith(
        "did you mean 'mixed_precision'?"
    )
    assert "it belongs under 'launch.num_processes'" in str(
        unknown_argument("num_processes")
    )


# -- files ---------------------------------------------------------------------------------------------------------
def tree_entries(text: str) -> list[tuple[tuple[str, ...], Any, str]]:
    entries = read_text(text, Path("c.yaml")).entries
    return [(entry.path, entry.value, str(entry.source)) for entry in entries]


def test_a_tree_gives_one_entry_a_setting() -> None:
    policies = ("stall", "divergence", "numbers")
    for word, value in (("off", "off"), ("true", True)):
        assert tree_entries(
            f"cpu: true\ntrust: {word}\nfsdp:\n  cpu_offload: false\n"
        ) == [
            (("cpu",), True, "c.yaml:1"),
            *((("trust", policy), value, "c.yaml:2") for policy in policies),
            (("fsdp", "cpu_offload"), False, "c.yaml:4"),
        ]
    assert tree_entries("fsdp:\n  sharding_strategy: FULL_SHARD\n") == [
        (("fsdp", "sharding_strategy"), "FULL_SHARD", "c.yaml:2")
    ]
    assert tree_entries("fsdp:\nparallelism: {}\n") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp: 3\n", r"c\.yaml:1: 'fsdp' is a section, but 3 is given; write"),
        ("trust: 3\n", r"c\.yaml:1: 'trust' is a section, but 3 is given"),
        ("fsdp: off\n", r"'fsdp' is a section"),
        ("ddp:\n  sharding_strategy: FULL_SHARD\n", r"unknown setting 'ddp\.shard"),
        (
            "fsdp:\n  param_init_fn: x\n",
            r"c\.yaml:2: 'fsdp\.param_init_fn' holds a Python object; set it in code",
        ),
    ],
)
def test_what_a_file_cannot_say_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tree_entries(text)


def test_hints_end_after_fifty_problems() -> None:
    problems = Problems()
    leaves = {f"mixed_precision_{index}": Marked(1, index) for index in range(52)}
    assert from_tree(Marked(leaves, 1), "c.yaml", problems) == []
    assert [
        "did you mean 'mixed_precision'?" in str(problem) for problem in problems.found
    ] == [True] * 50 + [False] * 2


# -- variables -----------------------------------------------------------------------------------------------------
def test_variables_are_texts() -> None:
    name = "HASTEN_FSDP_HYBRID_SHARD"
    env = {name: "1", "FSDP_HYBRID_SHARD": "0", "HASTEN_FSDP_CPU_OFFLOAD": " "}
    assert from_environment(env) == [
        SettingEntry(
            ("fsdp", "hybrid_shard"), "1", SettingSource("environment", name), text=True
        )
    ]


def test_a_variable_that_is_almost_a_setting_is_refused() -> None:
    with pytest.raises(
        UnknownSettingError,
        match=r"HASTEN_MIXED_PRECISON=bf16: .*HASTEN_MIXED_PRECISION\?",
    ):
        from_environment({"HASTEN_MIXED_PRECISON": "bf16"})
    # of tests, of hasten but no setting, of a worker: no warning, which would be an error here
    for name in ("HASTEN_TEST_QQQ", "HASTEN_TOKEN", "HASTEN_HOME"):
        assert from_environment({name: "1"}) == []
    assert from_environment({"HASTEN_QQQ": "1", "HASTEN_CONFIG": "{}"}) == []


def test_the_warning_of_a_variable_points_at_the_caller() -> None:
    with pytest.warns(HastenWarning) as caught:
        from_environment({"HASTEN_QQQ": "1"})
    assert [warning.filename for warning in caught] == [__file__]


# -- code ----------------------------------------------------------------------------------------------------------
def code_source(detail: str) -> SettingSource:
    return SettingSource("code", detail)


def test_arguments_give_entries_with_their_sources() -> None:
    assert from_code({"cpu": True, "mixed_precision": None}) == [
        SettingEntry(("cpu",), True, code_source("cpu"))
    ]
    assert from_code({"fsdp.cpu_offload": True}) == [
        SettingEntry(("fsdp", "cpu_offload"), True, code_source("fsdp.cpu_offload"))
    ]
    assert from_code({"gradient_accumulation_steps": 4}) == [
        SettingEntry(
            ("gradient_accumulation", "num_steps"),
            4,
            code_source("gradient_accumulation_steps"),
        )
    ]
    assert from_code({"trust": "off"}) == [
        SettingEntry(("trust", name), "off", code_source("trust"))
        for name in ("stall", "divergence", "numbers")
    ]
    for trackers in (["wandb", object()], ("wandb",), {"wandb"}, "wandb"):
        assert from_code({"log_with": trackers}) == [
            SettingEntry(("tracking", "log_with"), ["wandb"], code_source("log_with"))
        ]


def test_a_class_gives_the_fields_it_was_made_with_and_chooses_its_strategy() -> None:
    plugin = FullyShardedDataParallelPlugin(hybrid_shard=False, cpu_offload=True)
    assert from_code({"fsdp_plugin": plugin}) == [
        SettingEntry(
            ("fsdp", "cpu_offload"), True, code_source("fsdp_plugin.cpu_offload")
        ),
        SettingEntry(
            ("fsdp", "hybrid_shard"), False, code_source("fsdp_plugin.hybrid_shard")
        ),
        SettingEntry(("strategy",), "fsdp", code_source("fsdp_plugin"), weak=True),
    ]
    accumulation = GradientAccumulationPlugin(num_steps=2)
    assert from_code({"gradient_accumulation_plugin": accumulation}) == [
        SettingEntry(
            ("gradient_accumulation", "num_steps"),
            2,
            code_source("gradient_accumulation_plugin.num_steps"),
        )
    ]
    assert from_code({"fsdp_plugin": {"cpu_offload": True}}) == [
        SettingEntry(
            ("fsdp", "cpu_offload"), True, code_source("fsdp_plugin.cpu_offload")
        )
    ]


@pytest.mark.parametrize(
    ("kind", "backend"), [(AORecipeKwargs, "ao"), (TERecipeKwargs, "te")]
)
def test_a_recipe_chooses_its_backend_if_nothing_else_does(
    kind: Any, backend: str
) -> None:
    entries = from_code({"kwargs_handlers": [kind()]})
    assert entries == [
        SettingEntry(("fp8", "backend"), backend, code_source(kind.__name__), weak=True)
    ]
    assert from_code({"kwargs_handlers": (AutocastKwargs(enabled=False),)}) == [
        SettingEntry(
            ("autocast", "enabled"), False, code_source("AutocastKwargs.enabled")
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precison": "bf16"}, UnknownSettingError, "did you mean 'mixed_prec"),
        ({"fsdp_plugn": 1}, UnknownSettingError, "did you mean 'fsdp_plugin'"),
        ({"fsdp.qqq": 1}, UnknownSettingError, "unknown setting 'fsdp.qqq'"),
        (
            {"fsdp_plugin": {"qqq": 1}},
            UnknownSettingError,
            r"unknown setting 'fsdp\.qqq'",
        ),
        ({"fsdp_plugin": TrustSettings()}, ConfigError, "TrustSettings was given"),
        ({"kwargs_handlers": AutocastKwargs()}, SettingValueError, "expected a list"),
        ({"kwargs_handlers": "amp"}, SettingValueError, "expected a list"),
        ({"kwargs_handlers": b"amp"}, SettingValueError, "expected a list"),
        ({"kwargs_handlers": {}}, SettingValueError, "expected a list"),
        ({"kwargs_handlers": [3]}, UnknownSettingError, "holds int"),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            ContradictionError,
            "AutocastKwargs twice",
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: dict[str, Any], error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_code(arguments)


@pytest.mark.parametrize(
    ("path", "spelling"),
    [
        (("fsdp",), "fsdp_plugin=FullyShardedDataParallelPlugin(x=1)"),
        (("ddp",), "kwargs_handlers=[DistributedDataParallelKwargs(x=1)]"),
        (("stall",), "trust=TrustSettings(stall=x=1)"),
        (("launch",), "it in a settings file, or as a flag of `hasten launch`"),
    ],
)
def test_settings_are_spelled_as_in_code(path: tuple[str, ...], spelling: str) -> None:
    assert spelled_in_code(path, "x=1") == spelling
