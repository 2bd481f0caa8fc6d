"""Settings of SageMaker as data."""

from accelerate.commands.config.config_args import SageMakerConfig


def run() -> object:
    config = SageMakerConfig(
        compute_environment="AMAZON_SAGEMAKER",
        distributed_type="NO",
        mixed_precision="fp16",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p3.2xlarge",
        iam_role_name="role",
        base_job_name="job",
    )
    names = "compute_environment distributed_type mixed_precision ec2_instance_type iam_role_name region num_machines base_job_name"
    return {
        name: value for name, value in config.to_dict().items() if name in names.split()
    }


PROCESSES = (1,)
