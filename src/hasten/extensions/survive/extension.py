"""Declaration of the extension: runs that continue when replicas are lost."""

from hasten.extension import Extension

extension = Extension(
    name="survive",
    summary="runs that continue when replicas are lost",
    run_parts={"survive": "hasten.survive.build:Survive"},
    public_names={"survival_report": "hasten.survive.build:survival_report"},
    run_part_settings={"survive": "survive"},
)
