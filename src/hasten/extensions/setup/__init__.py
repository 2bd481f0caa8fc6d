"""Extension: the settings file and the machine that it suits.

Read `config_command.py` (`hasten config`, with the questions in `wizard.py`), then `env_command.py` (`hasten env`); `machine.py` describes the machine.
"""
