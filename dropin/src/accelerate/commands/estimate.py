"""`accelerate estimate-memory`, answered by hasten."""

from accelerate._impl.commands.answered import estimate_command, estimate_command_parser
from accelerate._impl.commands.answered import main_estimate as main
from accelerate._impl.commands.answered import run_estimate as run
