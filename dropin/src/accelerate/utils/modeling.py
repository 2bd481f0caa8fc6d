"""Looking at models, placing and loading them: hasten's own ways under the established names."""

from accelerate._impl.environment.constants import (
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from accelerate._impl.models.modeling import *
from accelerate._impl.models.planning import *
from hasten.extensions.bigmodel.device_map import retie_parameters
