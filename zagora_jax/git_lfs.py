"""Pointers of Git LFS (Large File Storage), which stand in place of files that were not fetched."""

STUB = b"version https://git-lfs.github.com/spec/"  # what they begin with, by the specification
