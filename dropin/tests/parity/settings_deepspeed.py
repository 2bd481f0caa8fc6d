"""DeepSpeed's configuration made from a plugin, and filled."""

from accelerate.utils import DeepSpeedPlugin


def run() -> object:
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        zero3_init_flag=False,
    )
    engine_config = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": "auto",
    }
    filled_plugin = DeepSpeedPlugin(hf_ds_config=engine_config)
    filled_plugin.deepspeed_config_process(
        must_match=False, train_batch_size=8, gradient_accumulation_steps=4
    )
    zero = plugin.deepspeed_config["zero_optimization"]
    return [
        zero["stage"],
        plugin.deepspeed_config["gradient_accumulation_steps"],
        plugin.deepspeed_config["gradient_clipping"],
        filled_plugin.deepspeed_config["train_batch_size"],
        filled_plugin.deepspeed_config["gradient_accumulation_steps"],
        filled_plugin.zero_stage,
    ]


PROCESSES = (1,)
