"""`accelerate env`."""

from accelerate._impl.commands.answered import env_command, env_command_parser
from accelerate._impl.commands.answered import main_env as main
from accelerate._impl.commands.answered import run_env as run
