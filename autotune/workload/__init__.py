"""What is trained: the contract of a workload file, and what it is made of."""

from autotune.workload.contract import Context, Workload, knob, without_context

__all__ = ["Context", "Workload", "knob", "without_context"]
