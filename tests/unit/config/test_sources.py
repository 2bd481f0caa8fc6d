"""Where settings come from: files and their places, variables, code arguments, the handoff, and FSDP1 translations."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

import hasten
from hasten.config import files, handoff
from hasten.config.decode import Mismatch, decode
from hasten.config.established import established_variables
from hasten.config.files import parse_yaml
from hasten.config.legacy import fsdp_from_fsdp1
from hasten.config.resolve import OTHER_VARIABLES, Resolved, resolve
from hasten.config.root import Config
from hasten.config.schema import BY_PATH, BY_VARIABLE
from hasten.config.sections.loop import (
    AORecipeKwargs,
    AutocastKwargs,
    GradientAccumulationPlugin,
    TERecipeKwargs,
)
from hasten.config.sections.parallel import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.config.source import Marked, SettingEntry, SettingSource
from hasten.errors import (
    ConfigError,
    ConfigFileError,
    ContradictionError,
    HastenWarning,
    SettingValueError,
    UnknownSettingError,
)
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin


def from_file(text: str) -> Resolved:
    """Resolve the text of a file alone."""
    file = files.read_text(text, Path("c.yaml"))
    return resolve(file=file.entries, notes=file.notes)


# --- words and numbers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("word", ["False", "false", "no", "off", "0", "NO", " false "])
def test_a_word_for_false_is_never_true(word: str) -> None:
    assert decode(word, bool) is False
    assert resolve(env={"HASTEN_CPU": word}).config.cpu is False


@pytest.mark.parametrize("value", [0, 1, 0.0, None, [], "ja", ""])
def test_what_is_no_boolean_is_refused(value: object) -> None:
    with pytest.raises(Mismatch):
        decode(value, bool)


def test_yaml_words_follow_version_1_2() -> None:
    text = "a: no\nb: yes\nc: 1:2\nd: 1e-5\ne: 010\nf: true\ng: ~\nh: 'true'\ni: 0x10\nj: .inf\nk: 1_000\n"
    assert parse_yaml(text, "c").plain() == {
        "a": "no",
        "b": "yes",
        "c": "1:2",
        "d": 1e-5,
        "e": 10,
        "f": True,
        "g": None,
        "h": "true",
        "i": 16,
        "j": float("inf"),
        "k": 1000,
    }


def test_yaml_aliases_are_refused() -> None:
    with pytest.raises(ConfigFileError, match="c:1: settings have no aliases"):
        parse_yaml("x: &x {a: 1, b: 2}\nz: *x\n", "c")


def test_json_with_tabs_keeps_its_lines() -> None:
    assert parse_yaml('{\n\t"cpu": true\n}', "c").value["cpu"] == Marked(True, 2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("0.5", 0.5),
        ("2H", 7200),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert decode(text, timedelta) == timedelta(seconds=seconds)


def test_enums_are_case_insensitive_everywhere() -> None:
    assert from_file("mixed_precision: BF16").config.mixed_precision == "bf16"
    assert resolve(code={"mixed_precision": "Bf16"}).config.mixed_precision == "bf16"
    assert (
        resolve(env={"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}).config.dynamo.backend
        == "inductor"
    )
    assert (
        FullyShardedDataParallelPlugin(
            state_dict_type="full_state_dict"  # type: ignore[arg-type]
        ).state_dict_type
        == "FULL_STATE_DICT"
    )


# --- sources ---------------------------------------------------------------------------------------------------------
def test_every_value_knows_its_source() -> None:
    file = files.read_text(
        "mixed_precision: fp16\nfsdp:\n  cpu_offload: true\n", Path("c.yaml")
    )
    flags = [
        SettingEntry(
            ("launch", "num_processes"),
            "4",
            SettingSource("flag", "--num_processes"),
            text=True,
        )
    ]
    resolved = resolve(
        file=file.entries,
        flags=flags,
        env={"HASTEN_DEBUG": "1"},
        code={"gradient_accumulation_steps": 2},
    )
    assert str(resolved.source("mixed_precision")) == "c.yaml:1"
    assert str(resolved.source("fsdp.cpu_offload")) == "c.yaml:3"
    assert str(resolved.source("launch.num_processes")) == "flag --num_processes"
    assert str(resolved.source("debug")) == "environment HASTEN_DEBUG"
    assert (
        str(resolved.source("gradient_accumulation.num_steps"))
        == "code argument gradient_accumulation_steps"
    )
    assert str(resolved.source("cpu")) == "default"
    assert resolved.config.strategy == "fsdp"
    assert (
        "strategy: fsdp is chosen because fsdp.cpu_offload is given (c.yaml:3)"
        in resolved.notes
    )


def test_plugins_contribute_only_what_they_were_made_with() -> None:
    file = files.read_text(
        "fsdp: {cpu_offload: true, reshard_after_forward: false}", Path("c.yaml")
    )
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=True)
    config = resolve(file=file.entries, code={"fsdp_plugin": plugin}).config
    assert config.fsdp.cpu_offload, "the file still says it"
    assert config.fsdp.reshard_after_forward, "code said so, although it is the default"
    assert config.strategy == "fsdp"


def test_handlers_find_their_sections() -> None:
    handlers = [
        AutocastKwargs(enabled=False),
        DistributedDataParallelKwargs(static_graph=True),
        TERecipeKwargs(margin=2),
    ]
    config = resolve(
        code={"kwargs_handlers": handlers, "mixed_precision": "fp8"}
    ).config
    assert not config.autocast.enabled
    assert config.ddp.static_graph
    assert (config.fp8.backend, config.fp8.te.margin) == ("te", 2)
    with pytest.raises(ContradictionError, match="AutocastKwargs twice"):
        resolve(code={"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]})
    with pytest.raises(
        UnknownSettingError, match="holds int, which is not a settings class"
    ):
        resolve(code={"kwargs_handlers": [3]})
    with pytest.raises(ContradictionError, match=r"fp8\.backend"):
        resolve(
            code={
                "kwargs_handlers": [AORecipeKwargs(), TERecipeKwargs()],
                "mixed_precision": "fp8",
            }
        )


def test_code_arguments() -> None:
    config = resolve(
        code={
            "log_with": ["wandb", object()],
            "cpu": None,
            "fsdp_plugin": {"cpu_offload": True},
        }
    ).config
    assert config.tracking.log_with == ("wandb",)
    assert config.fsdp.cpu_offload
    with pytest.raises(UnknownSettingError, match="did you mean 'mixed_precision'"):
        resolve(code={"mixed_precison": "bf16"})
    with pytest.raises(ConfigError, match="give a ParallelismConfig"):
        resolve(code={"parallelism_config": GradientAccumulationPlugin()})
    with pytest.raises(ContradictionError, match=r"fsdp_plugin.*deepspeed_plugin"):
        resolve(
            code={
                "fsdp_plugin": FullyShardedDataParallelPlugin(),
                "deepspeed_plugin": DeepSpeedPlugin(),
            }
        )


def test_none_says_not_given_where_it_means_nothing_else() -> None:
    assert GradientAccumulationPlugin(num_steps=None).num_steps == 1  # type: ignore[arg-type]
    assert ParallelismConfig(dp_shard_size=None).dp_shard_size is None


def test_established_variables_are_settings() -> None:
    names = dict(established_variables())
    assert {path for path in names.values() if path[0] != "fsdp"} <= set(BY_PATH)
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Head",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
        "ACCELERATE_FP8_BACKEND": "",
        "UNRELATED": "1",
        "HASTEN_SOMETHING_ELSE_ENTIRELY": "1",
    }
    with pytest.warns(
        HastenWarning,
        match="HASTEN_SOMETHING_ELSE_ENTIRELY: hasten reads no variable of this name",
    ):
        config = resolve(env=env).config
    assert config.strategy == "fsdp"
    assert config.fsdp == FullyShardedDataParallelPlugin(
        cpu_offload=True,
        transformer_cls_names_to_wrap=("Block", "Head"),
        reshard_after_forward=True,
        hybrid_shard=True,
    )
    assert config.parallelism.tp_size == 2
    assert config.gradient_accumulation.num_steps == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("HASTEN_STALL", "did you mean HASTEN_TRUST_STALL?"),
        ("HASTEN_STALL_AFTER_S", "did you mean HASTEN_TRUST_STALL_AFTER_S?"),
        ("HASTEN_LOGLEVEL", "did you mean HASTEN_LOG_LEVEL?"),
        ("HASTEN_PRECISION", "did you mean HASTEN_MIXED_PRECISION?"),
        ("HASTEN_QQQ", "unset it, or see docs/config.md"),
    ],
)
def test_an_unknown_variable_is_reported_with_the_nearest_one(
    name: str, advice: str
) -> None:
    with pytest.warns(HastenWarning) as caught_warnings:
        resolve(env={name: "off"})
    assert [
        str(warning.message).startswith(f"environment {name}: ")
        and advice in str(warning.message)
        for warning in caught_warnings
    ] == [True]
    resolve(env={name: "off", "HASTEN_CONFIG": "{}"})  # the launcher has reported it
    resolve(env={name: " "})


def test_every_variable_in_the_source_is_known() -> None:
    written = {
        variable
        for path in Path(hasten.__file__).parent.rglob("*.py")
        for variable in re.findall(r'"(HASTEN_[A-Z_]*[A-Z])"', path.read_text("utf-8"))
    }
    assert written <= {*BY_VARIABLE, *OTHER_VARIABLES}
    assert written >= OTHER_VARIABLES


def test_a_weaker_sources_engine_options_rest() -> None:
    file = files.read_text(
        "strategy: fsdp\nfsdp: {cpu_offload: true}\n", Path("c.yaml")
    )
    resolved = resolve(file=file.entries, code={"strategy": "ddp"})
    assert resolved.config.strategy == "ddp"
    assert resolved.notes == (
        "fsdp options of c.yaml:2 rest: strategy is ddp (code argument strategy)",
    )


# --- files -----------------------------------------------------------------------------------------------------------
def test_places_of_files(tmp_path: Path) -> None:
    assert files.default_path({"HASTEN_HOME": "/h"}) == Path("/h/config.yaml")
    assert files.default_path({"HOME": "/u", "XDG_CONFIG_HOME": "/x"}) == Path(
        "/x/hasten/config.yaml"
    )
    assert files.home({"HOME": "/u"}) == Path("/u/.config/hasten")
    assert files.accelerate_paths({"HOME": "/u"})[0] == Path(
        "/u/.cache/huggingface/accelerate/default_config.yaml"
    )
    assert files.accelerate_paths({"XDG_CACHE_HOME": "/c"})[0].is_relative_to(
        "/c/huggingface"
    )
    assert files.accelerate_paths({"HF_HOME": "/hf"})[2] == Path(
        "/hf/accelerate/default_config.json"
    )
    env = {"HASTEN_HOME": str(tmp_path / "ours"), "HF_HOME": str(tmp_path / "hf")}
    assert files.find(env) is None
    accelerate_path = files.accelerate_paths(env)[0]
    accelerate_path.parent.mkdir(parents=True)
    accelerate_path.write_text("use_cpu: true\n")
    assert files.find(env) == accelerate_path
    assert files.write(Config(cpu=True), files.default_path(env)) == files.find(env)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigFileError, match=r"no settings file at .*; write one with `hasten config`"
    ):
        files.read(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        files.read(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        files.read(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    assert files.read(tmp_path / "empty.yaml").entries == ()


def test_write_and_read_back(tmp_path: Path) -> None:
    config = from_file(
        "mixed_precision: bf16\nlaunch: {num_processes: 2, gpu_ids: '0,1'}\n"
    ).config
    for name in ("c.yaml", "deep/c.json"):
        path = files.write(config, tmp_path / name)
        assert resolve(file=files.read(path).entries).config == config
        assert [left.name for left in path.parent.glob(".*")] == []


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2", "newer than this hasten understands"),
        ("0", "not a version"),
        ("true", "not a version"),
        ("one", "not a version"),
    ],
)
def test_other_versions_of_the_format_are_refused(version: str, words: str) -> None:
    with pytest.raises(ConfigFileError, match=rf"c\.yaml:1: schema: .*{words}"):
        files.read_text(f"schema: {version}\nmixed_precision: bf16\n", Path("c.yaml"))


# --- handoff ---------------------------------------------------------------------------------------------------------
def test_handoff_stands_for_file_flags_and_variables() -> None:
    file = files.read_text(
        "mixed_precision: fp16\nfsdp: {cpu_offload: true}\n", Path("c.yaml")
    )
    flags = [
        SettingEntry(
            ("mixed_precision",),
            "bf16",
            SettingSource("flag", "--mixed_precision"),
            text=True,
        )
    ]
    env = {"HASTEN_GRADIENT_ACCUMULATION_STEPS": "2"}
    launcher = resolve(file=file.entries, flags=flags, env=env)
    text = handoff.pack_settings(launcher.entries)
    assert "\n" not in text
    worker = resolve(env=env, handed=handoff.unpack_settings(text))
    assert worker.config == launcher.config
    assert {path: entry.source for path, entry in worker.entries.items()} == {
        path: entry.source for path, entry in launcher.entries.items()
    }
    changed = resolve(
        env={"HASTEN_GRADIENT_ACCUMULATION_STEPS": "3"},
        handed=handoff.unpack_settings(text),
    )
    assert changed.config.gradient_accumulation.num_steps == 3, (
        "the script changed its environment"
    )
    coded = resolve(
        code={"mixed_precision": "no"}, handed=handoff.unpack_settings(text)
    )
    assert coded.config.mixed_precision == "no"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 9, "settings": []}', '{"version": 1, "settings": [["a"]]}'],
)
def test_damaged_handoff_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match="HASTEN_CONFIG holds no settings of this version"
    ):
        handoff.unpack_settings(text)


def test_objects_do_not_travel() -> None:
    def policy() -> None: ...

    resolved = resolve(
        code={
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                auto_wrap_policy=policy, cpu_offload=True
            )
        }
    )
    assert {
        entry.path
        for entry in handoff.unpack_settings(handoff.pack_settings(resolved.entries))
    } == {
        ("fsdp", "cpu_offload"),
        ("strategy",),
    }


# --- FSDP1 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("strategy", "reshard", "hybrid"),
    [
        ("FULL_SHARD", True, False),
        (1, True, False),
        ("2", False, False),
        ("shard_grad_op", False, False),
        ("HYBRID_SHARD", True, True),
        ("_HYBRID_SHARD_ZERO2", False, True),
        (5, False, True),
    ],
)
def test_sharding_strategies(strategy: object, reshard: bool, hybrid: bool) -> None:
    plugin, notes = fsdp_from_fsdp1({"fsdp_sharding_strategy": strategy})
    assert plugin == FullyShardedDataParallelPlugin(
        reshard_after_forward=reshard, hybrid_shard=hybrid
    )
    assert len(notes) == 1


def test_fsdp1_options_in_full() -> None:
    plugin, notes = fsdp_from_fsdp1(
        {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_offload_params": "true",
            "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
            "fsdp_forward_prefetch": "True",
            "fsdp_state_dict_type": "LOCAL_STATE_DICT",
            "fsdp_use_orig_params": "false",
            "limit_all_gathers": False,
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        }
    )
    assert plugin == FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=("Block",),
        cpu_offload=True,
        forward_prefetch_depth=1,
        reshard_after_forward=False,
    )
    assert notes == [
        "fsdp_backward_prefetch_policy has no meaning any more: FSDP2 always gathers the next block during backward",
        "fsdp_forward_prefetch is FSDP2's forward_prefetch_depth: 1",
        "fsdp_state_dict_type LOCAL_STATE_DICT is SHARDED_STATE_DICT: shards load on any number of processes",
        "fsdp_use_orig_params has no meaning any more: FSDP2 always keeps the original parameters",
        "limit_all_gathers has no meaning any more: FSDP2 always limits the gathers in flight",
        "fsdp_version 1 is read as FSDP2: FSDP1 is no longer used",
        "fsdp_sharding_strategy FULL_SHARD is FSDP2's reshard_after_forward: true",
        "fsdp_reshard_after_forward SHARD_GRAD_OP is FSDP2's reshard_after_forward: false",
    ]


def test_fsdp1_without_equivalent() -> None:
    with pytest.raises(SettingValueError, match=r"NO_SHARD.*set strategy: ddp"):
        fsdp_from_fsdp1({"sharding_strategy": "NO_SHARD"})
    with pytest.raises(UnknownSettingError, match="not an option of FSDP"):
        fsdp_from_fsdp1({"fsdp_bananas": 1})
