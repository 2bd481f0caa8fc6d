"""Helpers for the environment."""

import os

from accelerate.utils import (
    compare_versions,
    get_int_from_env,
    is_torch_version,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)


def run() -> object:
    with patch_environment(some_name="3", OTHER="yes"):
        inside = [
            os.environ["SOME_NAME"],
            get_int_from_env(["NOPE", "SOME_NAME"], 7),
            parse_flag_from_env("OTHER"),
            parse_choice_from_env("NOPE"),
        ]
    return [
        inside,
        "SOME_NAME" in os.environ,
        str_to_bool("on"),
        str_to_bool("off"),
        is_torch_version(">=", "2.0"),
        compare_versions("numpy", ">", "1.0"),
    ]


PROCESSES = (1,)
