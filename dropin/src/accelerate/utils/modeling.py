"""Looking at models, placing and loading them: hasten's own ways under the established names."""

from accelerate._impl.environment.constants import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accelerate._impl.models.allocation import fallback_allocate, get_module_size_with_ties
from accelerate._impl.models.modeling import *
