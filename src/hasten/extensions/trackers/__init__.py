"""Trackers of services, one file each."""
