"""Hooks around a module's forward: hasten's, under the names and with the attributes that other libraries look at."""

from accelerate._impl.models.align import AlignDevicesHook
from accelerate._impl.models.hooks import *
from hasten.extensions.bigmodel.dispatch import CpuOffload
from hasten.modules.hooks import LayerwiseCastingHook, ModelHook, SequentialHook
