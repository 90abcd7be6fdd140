"""TRL's trainers with the private step: its data preparation and its evaluation, our batches, step and log.

`from hf_dcsgd.trl import DCSGDSFTConfig, DCSGDSFTTrainer` in place of `from trl import SFTConfig, SFTTrainer`.
"""

try:
    import trl  # noqa: F401
except ImportError as error:
    raise ImportError("hf_dcsgd.trl needs the package trl: pip install 'hf-dcsgd[trl]'") from error

from hf_dcsgd.trl.arguments import DCSGDDPOConfig, DCSGDRewardConfig, DCSGDSFTConfig
from hf_dcsgd.trl.preference import DCSGDDPOTrainer, DCSGDRewardTrainer
from hf_dcsgd.trl.sft import DCSGDSFTTrainer

__all__ = [
    "DCSGDDPOConfig",
    "DCSGDDPOTrainer",
    "DCSGDRewardConfig",
    "DCSGDRewardTrainer",
    "DCSGDSFTConfig",
    "DCSGDSFTTrainer",
]
