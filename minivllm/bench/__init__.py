"""The benchmarks' room: workloads, timing, the peers we compare with, and the files that results are kept in.

Nothing in the engine imports this package. A number that is shown anywhere comes either from a run in front of the
reader or from a file in `results/`, which says on what machine, by what command and with what code it was measured.
"""
