"""Flax models: numbers in, numbers out. This package knows no device mesh and no file."""
