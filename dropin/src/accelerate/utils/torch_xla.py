"""TPUs: follow later."""

from accelerate import notyet

install_xla = notyet.function("utils.install_xla", notyet.XLA)
