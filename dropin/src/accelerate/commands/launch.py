"""`accelerate launch`: the established parser; hasten plans and starts the processes."""

from accelerate._impl.commands.launch import *
from accelerate._impl.settings.config_file import load_config_from_file

if __name__ == "__main__":
    main()
