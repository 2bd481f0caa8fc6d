"""Declaration of the extension: runs that continue when replicas are lost."""

from hasten.extension import Extension

extension = Extension(
    name="survive",
    summary="runs that continue when replicas are lost",
    run_parts={"survive": "hasten.survive.build:Survive"},
    run_part_settings={"survive": "survive"},
)
