"""What is trained: the contract of a workload file, and its parts."""

from autotune.workload.contract import Context, Workload, knob, without_context

__all__ = ["Context", "Workload", "knob", "without_context"]
