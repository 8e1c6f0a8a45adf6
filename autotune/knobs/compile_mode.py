"""The mode of `torch.compile`, or none.

``off`` trains eagerly. ``default`` compiles the model with Inductor; ``reduce-overhead`` also replays it as CUDA
graphs, and ``max-autotune`` also benchmarks several kernels for each operation. The model is compiled in place
(`nn.Module.compile`), so that its ``state_dict`` keeps its keys.

Helps: steps bound by memory traffic or by launching many small kernels; fusing reduces both.

Hurts: the first step takes from 30 s to several minutes, for every batch size and every input shape. Models with many
graph breaks gain nothing. CUDA graphs hold memory for each captured shape. With them, `Step` leaves no gradients behind
(see them in ``after_backward`` or ``after_step``), each call of the model overwrites the output of the last (clone what
you keep), and an evaluation belongs under ``torch.no_grad()``: a forward pass whose backward pass never comes keeps the
next one from reusing its memory.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.base.records import Config, HeatEntrant, Phase, TrialResult, Value
from autotune.knobs.knob import Door, Expected, Knob, Maths, OwnOption, Refusal, Scope, SiteFacts, StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Modes that replay CUDA graphs.
CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")
#: On a smaller GPU Inductor has no templates for matrix products to choose from (`torch._inductor.utils.is_big_gpu`).
LEAST_SMS = 68
#: Expected seconds of compiling, before the first compilation in that mode.
GUESS_S = {"default": 60.0, "reduce-overhead": 60.0, "max-autotune": 300.0}

#: Attribute of a model that has been switched between modes: its compiled call in each.
_COMPILED = "_autotune_compiled"
#: Graphs of one model that torch keeps then. Beyond its usual eight it would silently go on without compiling.
_GRAPHS = 64


class CompileMode(Knob):
    name = "compile_mode"
    about = "torch.compile"
    scope = Scope.MODEL
    place = 20
    not_outside = "CUDA graphs overwrite outputs and gradients that a script may keep"
    values = ("off", "default", "reduce-overhead", "max-autotune")
    default = "off"
    maths = Maths.KERNELS
    memory = True
    memory_slope = Expected(0.0, 0.15)
    switchable = True
    own_options = (
        OwnOption(("compile", "torch_compile", "torchcompile", "compile_model"), like=r".*compile.*", sets="default"),
        OwnOption(("compile_mode",), like=r".*compile.*", choices={v: v for v in ("default", *CUDAGRAPH_MODES)}),
    )
    refusals = (
        Refusal(
            "no working compiler found (Triton on a GPU, a C++ compiler on a CPU)",
            lambda facts, value: facts.probe.compiler is None,
            ("default", *CUDAGRAPH_MODES),
        ),
        Refusal(
            "uses CUDA graphs, which need a CUDA device",
            lambda facts, value: not facts.probe.cudagraphs,
            CUDAGRAPH_MODES,
        ),
        Refusal(
            "CUDA graphs need shapes that do not vary",
            lambda facts, value: facts.probe.varying_shapes or facts.images_vary,
            CUDAGRAPH_MODES,
            unless_stated=True,
        ),
        Refusal(
            f"Inductor's matrix templates, which it would choose from, need a GPU with {LEAST_SMS} multiprocessors",
            lambda facts, value: (facts.probe.multiprocessors or LEAST_SMS) < LEAST_SMS,
            ("max-autotune",),
            unless_stated=True,
        ),
    )
    expected = {
        "device": {
            "default": Expected(0.1, 0.2),
            "reduce-overhead": Expected(0.1, 0.2),
            "max-autotune": Expected(0.15, 0.2),
        },
    }

    def refusal(self, value: Value, facts: SiteFacts, *, stated: bool = False) -> str | None:
        lack = facts.probe.compiler_lack
        return lack if lack is not None and value != self.default else super().refusal(value, facts, stated=stated)

    def phrase(self, value: Value) -> str:
        return {"off": "no compile", "default": "compile"}.get(str(value), f"compile {value}")

    def compile_model(self, model: nn.Module, value: Value) -> None:
        if value != "off":
            model.compile(mode=str(value))

    def switch_model(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> None:
        # Each mode's compiled call is made once; torch finds the graph for a shape and a number format in its cache.
        made = model.__dict__.setdefault(_COMPILED, {self.default: None})
        if value not in made:
            import torch._dynamo

            # A second batch size would make torch compile for any size, which it would not in a training of its own.
            torch._dynamo.config.automatic_dynamic_shapes = False
            limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
            setattr(torch._dynamo.config, limit, max(_GRAPHS, getattr(torch._dynamo.config, limit)))
            self.compile_model(model, value)
            made[value] = model._compiled_call_impl
        model._compiled_call_impl = made[value]

    def is_in_force(self, model: nn.Module, optimizer: torch.optim.Optimizer, value: Value) -> bool:
        return (model._compiled_call_impl is not None) == (value != self.default)

    def own_outside(self, facts: Mapping[str, Any]) -> Value | None:
        # Which mode it has asked for is not seen.
        return "default" if facts["model"].get("compiled") else self.default

    def script_door(self, value: Value) -> tuple[Door, dict[str, Any]] | None:
        if value in CUDAGRAPH_MODES:
            return None
        return "model", {"compile": None if value == self.default else str(value)}

    def apply_step(self, plan: StepPlan, value: Value) -> None:
        plan.cudagraphs = value in CUDAGRAPH_MODES


KNOB = CompileMode()


def mode_of(config: Config) -> str:
    """Return the mode that a configuration compiles with, or ``off``."""
    return str(config.get(KNOB.name, KNOB.default))


def compiles(config: Config) -> bool:
    """Return whether a configuration compiles its model."""
    return mode_of(config) != "off"


def replays(config: Config) -> bool:
    """Return whether a configuration replays CUDA graphs."""
    return mode_of(config) in CUDAGRAPH_MODES


def closed_because(result: TrialResult | HeatEntrant) -> str:
    """Say that nothing is compiled any more in this search, after a launch on a machine that cannot compile."""
    advice = result.advice or ""
    closed = f"nothing can be compiled here, so {KNOB.name} stays off in this search: {result.cause}."
    return f"{closed} {advice[:1].upper()}{advice[1:]}".strip()


def eager(config: Config) -> dict[str, Value]:
    """Return a configuration without compiling."""
    return {n: KNOB.default if n == KNOB.name else v for n, v in config.items()}


def phase_text(phase: Phase, config: Config) -> str:
    """Name a phase for people: that of the first step is called ``compile`` only where something is compiled."""
    return "first step" if phase is Phase.COMPILE and not compiles(config) else phase.value


def phase_clause(phase: Phase, config: Config) -> str:
    """Name a phase within a sentence: ``phase load``, ``the first step``."""
    named = phase_text(phase, config)
    return f"phase {named}" if named == phase.value else f"the {named}"
