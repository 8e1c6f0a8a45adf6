"""The child: what runs in a trial's own process. Imports torch and user code; nothing of autotune imports it.

`__main__` is the template process that forks one child per launch; `child` is one launch from spec to result;
`probe` and `measure` are the kinds of launch; `failure` turns an exception into a status with a cause.
"""
