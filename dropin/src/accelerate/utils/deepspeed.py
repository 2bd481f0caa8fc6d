"""DeepSpeed: follows later; its placeholders can be named but not used."""

from accelerate import notyet

DeepSpeedEngineWrapper = notyet.klass("utils.DeepSpeedEngineWrapper", notyet.DEEPSPEED)
DeepSpeedOptimizerWrapper = notyet.klass("utils.DeepSpeedOptimizerWrapper", notyet.DEEPSPEED)
DeepSpeedSchedulerWrapper = notyet.klass("utils.DeepSpeedSchedulerWrapper", notyet.DEEPSPEED)
DummyOptim = notyet.klass("utils.DummyOptim", notyet.DEEPSPEED)
DummyScheduler = notyet.klass("utils.DummyScheduler", notyet.DEEPSPEED)
HfDeepSpeedConfig = notyet.klass("utils.HfDeepSpeedConfig", notyet.DEEPSPEED)
map_pytorch_optim_to_deepspeed = notyet.function("utils.map_pytorch_optim_to_deepspeed", notyet.DEEPSPEED)


def get_active_deepspeed_plugin(state: object) -> None:
    """The plugin in use; there is none without DeepSpeed."""
    raise ValueError("Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled.")
