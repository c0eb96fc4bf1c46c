"""Hydra configs."""
