"""Scripts for tests."""
