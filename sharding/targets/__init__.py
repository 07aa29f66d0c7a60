"""GPUs that programs are compiled for, whether this machine has them or not."""

from sharding.targets.absent import absent_devices, compile_for, is_absent, lower_for, target_description
from sharding.targets.gpus import GPUS, Gpu, gpu

__all__ = ["GPUS", "Gpu", "absent_devices", "compile_for", "gpu", "is_absent", "lower_for", "target_description"]
