"""Yes, no, numbers and choices in variables."""

from accelerate.utils import (
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)


def run() -> object:
    parsed_words = [
        str_to_bool(word) for word in ("yes", "on", "1", "n", "OFF", "false")
    ]
    with patch_environment(a_flag="true", a_number="4", a_word="x"):
        parsed_words += [
            parse_flag_from_env("A_FLAG"),
            get_int_from_env(["NONE", "A_NUMBER"], 9),
            parse_choice_from_env("A_WORD"),
        ]
    return [
        *parsed_words,
        parse_flag_from_env("A_FLAG"),
        get_int_from_env(["A_NUMBER"], 9),
        parse_choice_from_env("A_WORD", "z"),
    ]


PROCESSES = (1,)
