"""The demo: one small transformer, scored in rollout and in training, byte for byte.

``python -m cute_kernels demo`` runs `run.demo`.  Needs the extra ``demo``.
"""
