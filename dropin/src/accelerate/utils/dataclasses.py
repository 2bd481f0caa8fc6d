"""Every settings class by its established home; those of loaders, projects and parallel axes are defined here."""

from accelerate._impl.enums import *
from accelerate._impl.settings.deepspeed_plugin import *
from accelerate._impl.settings.fsdp_plugin import *
from accelerate._impl.settings.general import *
from accelerate._impl.settings.kwargs_handlers import *
from accelerate._impl.settings.megatron_plugin import *
