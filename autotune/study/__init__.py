"""The study: ask, launch, record, tell, until the budget is spent or the space is. Prints nothing.

`loop.Study` is the loop; `history` what it remembers, `budget` what it may spend, `launches` what it starts.
"""
