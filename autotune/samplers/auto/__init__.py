"""The searcher behind `--sampler auto`: what it knows of a training, and what it makes of it."""

from autotune.samplers.auto.sampler import AutoSampler, Look, Proposal

__all__ = ["AutoSampler", "Look", "Proposal"]
