"""A whole RL step measured: vLLM draws, a trainer scores and updates; native beside ours."""
