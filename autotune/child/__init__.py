"""The child process of a trial. It imports torch and user code; no other part of autotune imports this package.

`__main__` is the template process that forks one child per launch; `run` carries out one launch from spec to result;
`probe`, `measure`, `ceilings`, `train_check` and `hold` are the kinds of launch; `failure` maps an exception to a
status with its cause.
"""
