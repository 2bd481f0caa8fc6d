"""The established commands, each with its parser by name."""
