"""Tests that compile for GPUs which are not there need jax's CUDA plugin: `pip install 'zagora-jax[plan]'`."""

from __future__ import annotations

import importlib.util

import pytest

PLUGIN = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
needs_plugin = pytest.mark.skipif(not PLUGIN, reason="jax's CUDA plugin is not installed")

CUDNN = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
needs_cudnn = pytest.mark.skipif(not CUDNN, reason="cuDNN is not installed")
