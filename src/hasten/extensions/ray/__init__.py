"""Extension: scripts on the workers of a Ray cluster.

Read `launch_target.py` (`hasten launch --ray`), then `in_worker.py` (`hasten.ray`: metrics, checkpoints and errors of runs on Ray Train).
"""
