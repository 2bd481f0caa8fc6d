"""Scripts that need other packages."""
