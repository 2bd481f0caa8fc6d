"""Pipelines for inference: follow later."""

from accelerate import notyet

_PART = "pipelined inference"
build_pipeline = notyet.function("inference.build_pipeline", _PART)
find_pippy_batch_size = notyet.function("inference.find_pippy_batch_size", _PART)
generate_device_map = notyet.function("inference.generate_device_map", _PART)
pippy_forward = notyet.function("inference.pippy_forward", _PART)
prepare_pippy = notyet.function("prepare_pippy", _PART)
