"""Lines logged on the main process only, on all, or in order."""

import logging

from accelerate import Accelerator
from accelerate.logging import get_logger


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run() -> object:
    accelerator = Accelerator(cpu=True)
    logger = get_logger("parity", log_level="INFO")
    handler = Kept()
    logger.logger.addHandler(handler)
    logger.info("main only")
    logger.info("all", main_process_only=False)
    logger.info("ordered", main_process_only=False, in_order=True)
    logger.warning_once("once")
    logger.warning_once("once")
    logger.debug("hidden")
    logger.logger.removeHandler(handler)
    return [handler.lines, accelerator.process_index]


PROCESSES = (1, 2)
