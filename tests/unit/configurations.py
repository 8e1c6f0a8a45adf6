"""Hypothesis strategies for legal and illegal configurations."""

from hypothesis import strategies as st

from autotune.knobs import KNOBS

_numbers = st.integers(0, 64)
_settings = {n: st.sampled_from(k.values) if k.values is not None else _numbers for n, k in KNOBS.items()}
_batch = {"batch_size": st.integers(1, 64)}
#: A batch size, and any of the other knobs with any of its values.
configs = st.fixed_dictionaries(_batch, optional={n: s for n, s in _settings.items() if n not in _batch})
