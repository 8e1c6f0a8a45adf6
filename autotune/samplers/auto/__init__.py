"""The sampler behind `--sampler auto`: its models of a training, and the decisions based on them."""

from autotune.samplers.auto.sampler import AutoSampler, Look, Proposal

__all__ = ["AutoSampler", "Look", "Proposal"]
