"""Settings of runs that continue when replicas are lost."""

from hasten.config.base import Section, SectionNames, setting, settings


@settings
class SurviveSettings(Section):
    """Replicas of which some may be lost while the run continues; coordinated by torchft's lighthouse. Set by `hasten launch --replicas N`."""

    section_names = SectionNames(
        argument="survive", flag_group="replicas that may be lost"
    )

    replicas: int = setting(
        0,
        "replicas of the model over all machines, which may be lost (0: none); num_processes counts the processes of all (default: one each)",
        minimum=0,
        flag="replicas",
    )
    min_replicas: int = setting(
        1,
        "replicas below which the run waits for others to return",
        minimum=1,
        flag="min_replicas",
    )
    lighthouse: str | None = setting(
        None, "host:port of torchft's lighthouse (default: the launcher starts one)"
    )
    replica: str | None = setting(
        None,
        "name of this replica (by the launcher)",
    )
    timeout_s: float = setting(
        10.0,
        "seconds after which a replica that does not respond counts as lost",
        minimum=0.5,
    )
    heartbeat_timeout_s: float = setting(
        2.0,
        "seconds without a heartbeat after which a replica counts as lost",
        minimum=0.2,
    )
    hang_timeout_s: float = setting(
        600.0,
        "seconds without an update, also by an evaluation, after which a replica counts as lost, also for one that waits to be healed by it",
        minimum=1,
    )
    folder: str | None = setting(
        None, "folder in which the launcher notes the end of the run", path=True
    )

    def writes_run(self) -> bool:
        """Return True for the first replica, which writes the run's log and trackers."""
        return self.replica in (None, "0")
