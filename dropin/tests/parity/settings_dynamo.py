"""Options of compilation from the constructor and from variables."""

from accelerate.utils import TorchDynamoPlugin, patch_environment


def run() -> object:
    settings = [
        {
            name: str(value)
            for name, value in TorchDynamoPlugin(
                backend="eager", mode="reduce-overhead"
            )
            .to_kwargs()
            .items()
        }
    ]
    with patch_environment(
        accelerate_dynamo_backend="INDUCTOR", accelerate_dynamo_use_fullgraph="true"
    ):
        settings.append(
            {name: str(value) for name, value in TorchDynamoPlugin().to_dict().items()}
        )
    return settings


PROCESSES = (1,)
