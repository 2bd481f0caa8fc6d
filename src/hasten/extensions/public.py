"""Names of bundled extensions that `from hasten import ...` provides, for type checkers; the running program finds them by declaration.

An import whose folder was deleted is ignored: `# type: ignore[import-not-found, unused-ignore]` on its line says so.
"""

from hasten.extensions.bigmodel.load import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.chunked_loss.cross_entropy import (
    ChunkedCrossEntropyLoss as ChunkedCrossEntropyLoss,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.chunked_loss.logits import use_chunked_loss as use_chunked_loss  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.deepspeed.placeholders import DummyOptim as DummyOptim  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.deepspeed.placeholders import DummyScheduler as DummyScheduler  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin as DeepSpeedPlugin  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.local_sgd.local_sgd import LocalSGD as LocalSGD  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.megatron.settings import MegatronLMPlugin as MegatronLMPlugin  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.muon.optimizers import optimizers as optimizers  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.packing.packing import PackedBatchSampler as PackedBatchSampler  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.packing.packing import PackedCollator as PackedCollator  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.packing.packing import num_label_tokens as num_label_tokens  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.packing.packing import (
    packed_attention_mask as packed_attention_mask,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.packing.packing import packed_block_mask as packed_block_mask  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.pipeline.inference import prepare_pipeline as prepare_pipeline  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.quantization.quantize import (
    dequantize_weights as dequantize_weights,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.quantization.quantize import quantize_weights as quantize_weights  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.setup.config_command import (
    write_basic_config as write_basic_config,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.survive.part import survival_report as survival_report  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.trainer.arguments import TrainingArguments as TrainingArguments  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.trainer.callbacks import (
    EarlyStoppingCallback as EarlyStoppingCallback,
)  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.trainer.callbacks import TrainerCallback as TrainerCallback  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.trainer.trainer import Trainer as Trainer  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.xla.settings import XLAConfig as XLAConfig  # type: ignore[import-not-found, unused-ignore]
