"""What to try next. `translate` speaks Optuna, `sampler` keeps any Optuna sampler inside the legal and the new,
`start` holds the designed first configurations. No torch (`--sampler gp` makes Optuna load it)."""
