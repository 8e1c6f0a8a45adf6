"""The child process of a trial. It imports torch and user code; no other part of autotune imports this package.

`__main__` is the template process that forks one child per launch; `run` carries out one launch from spec to result;
`probe`, `loop`, `workload_turns`, `train_check` and `hold` carry out the kinds of launch for workloads,
`script_launches` and `script_turns` for scripts; `failure` maps an exception to a status with its cause.
"""
