"""Benchmarks of shmreplay: one file a question, every contender in the same run.

Run all of them from the root of the repository with ``python -m bench``; ``bench/README.md`` tells
the method.
"""
