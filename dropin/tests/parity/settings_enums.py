"""Words of enums."""

from accelerate.utils import DynamoBackend, LoggerType, PrecisionType, RNGType


def run() -> object:
    kinds = DynamoBackend, LoggerType, PrecisionType, RNGType
    return [[kind.list(), "no" in kind] for kind in kinds]


PROCESSES = (1,)
