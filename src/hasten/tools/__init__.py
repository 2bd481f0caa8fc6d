"""What the subcommands of `hasten` do, one folder each; imported by `cli` alone."""
