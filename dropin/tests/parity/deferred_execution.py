"""Functions that some processes run."""

from accelerate import Accelerator, PartialState


def run() -> object:
    accelerator, ran = Accelerator(cpu=True), []
    state = PartialState()
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_local_main_process(lambda: ran.append("local"))()
    state.on_process(lambda: ran.append("first"), process_index=0)()
    accelerator.on_local_process(lambda: ran.append("second"), local_process_index=1)()
    accelerator.wait_for_everyone()
    return [
        ran,
        accelerator.is_main_process,
        state.is_last_process,
        state.local_process_index,
    ]


PROCESSES = (1, 2)
