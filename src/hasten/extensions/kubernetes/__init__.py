"""Extension: jobs in pods of Kubernetes, and reports of progress to Kubeflow's TrainJob.

Read `pods.py` (decides the pods of a job), then `manifests.py` (writes their manifests); `trainjob.py` is a part of a run.
"""
