"""Every established name of `accelerate.utils`: what its modules define, and what they show of hasten."""

from accelerate._impl.surface.lazy import lazy
from accelerate.utils.tqdm import tqdm

__getattr__, __dir__ = lazy(__name__)
