"""The command `accelerate`."""

from accelerate._impl.commands.accelerate_cli import *

if __name__ == "__main__":
    main()
