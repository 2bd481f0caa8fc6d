"""Implementation of the subcommands of `hasten`, one folder each; imported only by `cli`."""
