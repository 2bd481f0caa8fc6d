"""What the extension offers, as names and places; imported by every command, so that it imports no torch."""

from hasten.extending import Extension

extension = Extension(
    name="house_rules",
    summary="an example of an extension in an installed package",
    trackers={"csv": "house_rules.tracker:CsvTracker"},
    launch_targets={"queue": "house_rules.target:TARGET"},
    strategies={"counted": "house_rules.strategy:STRATEGY"},
    run_parts={"stop_file": "house_rules.stop_file:StopFile"},
    run_part_settings={"stop_file": "$STOP_FILE"},
)
