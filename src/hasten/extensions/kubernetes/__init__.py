"""Extension: reports of progress to Kubeflow's TrainJob."""
