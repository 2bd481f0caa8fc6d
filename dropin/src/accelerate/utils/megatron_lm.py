"""Megatron-LM: follows later."""

from accelerate import notyet

AbstractTrainStep = notyet.klass("utils.AbstractTrainStep", notyet.MEGATRON)
BertTrainStep = notyet.klass("utils.BertTrainStep", notyet.MEGATRON)
GPTTrainStep = notyet.klass("utils.GPTTrainStep", notyet.MEGATRON)
T5TrainStep = notyet.klass("utils.T5TrainStep", notyet.MEGATRON)
MegatronEngine = notyet.klass("utils.MegatronEngine", notyet.MEGATRON)
MegatronLMDummyDataLoader = notyet.klass("utils.MegatronLMDummyDataLoader", notyet.MEGATRON)
MegatronLMDummyScheduler = notyet.klass("utils.MegatronLMDummyScheduler", notyet.MEGATRON)
MegatronLMOptimizerWrapper = notyet.klass("utils.MegatronLMOptimizerWrapper", notyet.MEGATRON)
MegatronLMSchedulerWrapper = notyet.klass("utils.MegatronLMSchedulerWrapper", notyet.MEGATRON)
avg_losses_across_data_parallel_group = notyet.function("utils.avg_losses_across_data_parallel_group", notyet.MEGATRON)
finish_mpu_init = notyet.function("utils.finish_mpu_init", notyet.MEGATRON)
gather_across_data_parallel_groups = notyet.function("utils.gather_across_data_parallel_groups", notyet.MEGATRON)
initialize = notyet.function("utils.initialize", notyet.MEGATRON)
model_provider_func = notyet.function("utils.model_provider_func", notyet.MEGATRON)
prepare_data_loader = notyet.function("utils.prepare_data_loader", notyet.MEGATRON)
prepare_model_optimizer_scheduler = notyet.function("utils.prepare_model_optimizer_scheduler", notyet.MEGATRON)
prepare_optimizer = notyet.function("utils.prepare_optimizer", notyet.MEGATRON)
prepare_scheduler = notyet.function("utils.prepare_scheduler", notyet.MEGATRON)
