"""Hypothesis strategies for legal and illegal configurations."""

from hypothesis import strategies as st

from autotune.knobs import KNOBS

_settings = {
    name: st.integers(min(1, knob.minimum), 64) if knob.values is None else st.sampled_from(knob.values)
    for name, knob in KNOBS.items()
}
_batch = {"batch_size": st.integers(1, 64)}
#: A batch size, and any of the other knobs with any of its values.
configs = st.fixed_dictionaries(_batch, optional={n: s for n, s in _settings.items() if n not in _batch})
