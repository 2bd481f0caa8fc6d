"""Trackers, one file for each tracking service."""
