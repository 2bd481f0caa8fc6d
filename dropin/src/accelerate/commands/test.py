"""`accelerate test`."""

from accelerate._impl.commands.answered import main_test as main
from accelerate._impl.commands.answered import test_command, test_command_parser
