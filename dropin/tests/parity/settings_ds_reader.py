"""Values of DeepSpeed's configuration by path."""

from accelerate.utils.deepspeed import HfDeepSpeedConfig


def run() -> object:
    config = HfDeepSpeedConfig(
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "fp16": {"enabled": True},
        }
    )
    return [
        config.get_value("zero_optimization.stage"),
        config.get_value("a.b", 7),
        config.is_zero3(),
        config.is_zero2(),
        config.is_offload(),
        config.is_true("fp16.enabled"),
        config.is_false("fp16.enabled"),
    ]


PROCESSES = (1,)
