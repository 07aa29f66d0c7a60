"""Quantised weight formats, one file each."""
