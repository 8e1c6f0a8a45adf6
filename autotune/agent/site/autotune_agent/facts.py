"""Facts about loaders, batches, exceptions and the machine, as events report them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

#: The most links of a chain of exceptions to report.
_LINKS = 10
#: How many of the innermost frames of each to report.
_FRAMES = 30


def machine(device: str, index: int | None = None) -> dict[str, Any]:
    """Return facts about the script's PyTorch and the device that it trains on.

    Args:
        index: the index of the card; ``None`` for the current one.
    """
    import platform

    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "ranks": torch.distributed.get_world_size() if _is_distributed() else 1,
        "start_method": start_method(),
        "vision": getattr(sys.modules.get("torchvision"), "__version__", None),
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        facts.update(
            name=card.name,
            memory=card.total_memory,
            capability=[card.major, card.minor],
            multiprocessors=card.multi_processor_count,
            uuid=str(getattr(card, "uuid", "")) or None,
            cudnn=str(torch.backends.cudnn.version()),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        )
    return facts


def start_method() -> str:
    """Return how workers are started: ``fork``, ``forkserver`` or ``spawn``."""
    import multiprocessing

    # Without `allow_none`, the call would fix the start method.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def would_run_again() -> bool:
    """Return whether workers that are not forked would run the script from its beginning, because its first file does
    not check whether it is ``__main__``."""
    if start_method() == "fork":
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            # Scripts also name their loggers by it.
            code = frame.f_code
            return "__name__" not in code.co_names or "__main__" not in code.co_consts
        frame = frame.f_back
    return False


def _is_distributed() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def batch_size(loader: Any) -> int | None:
    """Return the number of samples in a batch of a loader; ``None`` if it is not known."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def length(loader: Any) -> int | None:
    """Return the number of batches in an epoch of a loader; ``None`` if it is not known."""
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        # PyTorch remembers the length that it reported, and warns about it later.
        return None
    try:
        return len(loader)
    except Exception:
        return None


def bytes_in(batch: Any) -> int:
    """Return the bytes of the tensors in a batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    return sum(map(bytes_in, _parts(batch)))


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    return next((n for n in map(samples_in, _parts(batch)) if n is not None), None)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (tuple, list)) else ()


def chain(error: BaseException | None) -> list[list[Any]]:
    """Return an exception and its causes, the last one raised first."""
    links: list[list[Any]] = []
    while error is not None and len(links) < _LINKS:
        kind = type(error)
        facts = {**{name: getattr(error, name, None) for name in ("errno", "filename")}, "layer": _layer(error)}
        details: dict[str, Any] = {name: value for name, value in facts.items() if isinstance(value, (int, str))}
        details["frames"] = [[f.filename, f.lineno or 0] for f in traceback.extract_tb(error.__traceback__)[-_FRAMES:]]
        links.append([_name(kind), [_name(base) for base in kind.__mro__[1:-2]], _words(error), details])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return links


def _layer(error: BaseException) -> str | None:
    """Return the class of the innermost module that an exception passed through; ``None`` if there is none."""
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((type(owner).__name__ for owner in reversed(owners) if isinstance(owner, module)), None)


def _words(error: BaseException) -> str:
    """Return an exception's message, even if its class fails to give one."""
    try:
        return str(error)[:2000]
    except Exception as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
