"""Checkpoints of pytrees, on any mesh, and safetensors files."""

from vescale_fn.checkpoint.load import load as load
from vescale_fn.checkpoint.messages import CheckpointError as CheckpointError
from vescale_fn.checkpoint.module_state import state_dict as state_dict
from vescale_fn.checkpoint.safetensors import load_safetensors as load_safetensors
from vescale_fn.checkpoint.safetensors import save_safetensors as save_safetensors
from vescale_fn.checkpoint.save import Saving as Saving
from vescale_fn.checkpoint.save import save as save
