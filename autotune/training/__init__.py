"""A configuration applied in this process: the step, what feeds it, its ranks, and whole trainings."""
